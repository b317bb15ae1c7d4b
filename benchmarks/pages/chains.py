"""Runs of chains in cells: one chain, one state of the caches, and every placement that ran it. Pure.

Ratios are taken only within a cell, and a cell is one file's runs of one commit on one machine.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from pages.machines import Machine, is_simulated, machine, version
from pages.markdown import series
from pages.rows import Found, by_key, rows
from profiles import PROFILES, Shape
from runs import RUN_MODES, Run

_DOCUMENT = re.compile(r"\bdocument \d+ (before|after)\b")
_NAMED_PREFIX = re.compile(r"(?:prefix|document) ([\d,]+)")


class Cell(msgspec.Struct, frozen=True):
    """What the runs of a comparison have in common; several cells of a suite may run the same chain."""

    file: str
    suite: str
    machine: Machine
    commit: str
    model: str
    dtype: str
    """Empty of simulated engines."""
    engine: str
    simulated: bool
    """Whether the engine only keeps time."""
    profile: str
    prefix: int
    """Tokens of each agent's own text before the upstreams' outputs; of chains of unknown make, the first prompt's."""
    outputs: tuple[int, ...]
    """`max_tokens` of each agent."""
    line: bool
    """Whether each agent reads the one before, and no other."""
    cache: str
    sampling: str

    @property
    def kind(self) -> str:
        """What is particular about the chain: "fan-in", "diamond", or where a document that all agents share stands.

        Empty where each agent has text of its own and reads the one before.
        """
        if found := _DOCUMENT.search(self.profile):
            return f"a document {found[1]} the role text"
        named = self.profile.partition(" ")[0]
        return "" if self.line else named if named in get_args(Shape) else "branches"

    @property
    def output(self) -> int:
        """Tokens that the first agent writes."""
        return self.outputs[0]


class Placed(msgspec.Struct, frozen=True):
    """The runs of one placement in a cell."""

    row: str
    """Daemon, mode and group, as its runs have them."""
    mode: str
    daemon: str
    group: str
    """That it was held to; empty: it chose."""
    baseline: str
    """The `row` that it is held to."""
    groups: int
    """Most that one of its runs ran on."""
    devices: int
    """Most that the engines of one of its runs had."""
    decode_first: bool | None
    """Whether its engines' scheduler was ours; None in older files."""
    level: str
    """Of exactness, with the cell."""
    session: str
    append_tokens: int | None
    found: list[Found[Run]]

    @property
    def runs(self) -> list[Run]:
        """Without their origins."""
        return rows(self.found)

    @property
    def median_ms(self) -> float:
        """End to end."""
        return statistics.median(run.e2e_ms for run in self.runs)

    @property
    def asked(self) -> tuple[str, str, int | None]:
        """What was asked for besides mode and group."""
        return self.level, self.session, self.append_tokens

    def repeats(self, earlier: Placed) -> bool:
        """Whether another suite's placement is the same, whatever daemon and group are called there."""
        return (self.mode, self.asked, self.devices) == (
            earlier.mode,
            earlier.asked,
            earlier.devices,
        ) and earlier.decode_first in (self.decode_first, None)

    @property
    def name(self) -> str:
        """As tables call it."""
        words = [series(self.row)]
        if self.level != "fast":
            words.append(self.level)
        if self.session != "default":
            words.append(self.session)
        if self.append_tokens is not None:
            words.append(f"appends of {self.append_tokens}")
        return ", ".join(words)


class Measured(msgspec.Struct, frozen=True):
    """A cell and what ran in it."""

    cell: Cell
    placed: list[Placed]
    """Series first."""

    @property
    def date(self) -> str:
        """Of the latest of its runs' provenances; ISO 8601, so that later ones are greater."""
        return max(str(run.provenance.get("date") or "") for placed in self.placed for run in placed.runs)


def cells(found: Sequence[Found[Run]]) -> list[Measured]:
    """Runs by cell and placement, in the order of the files."""
    return [Measured(cell, _placements(some)) for cell, some in by_key(found, _cell).items()]


def latest(measured: Sequence[Measured]) -> list[Measured]:
    """Without cells that a later one repeats: the same chain on the same machine, with every placement and more."""

    def repeats(later: Measured, one: Measured) -> bool:
        return (
            later.date > one.date
            and _alike(later.cell) == _alike(one.cell)
            and all(any(placed.repeats(earlier) for placed in later.placed) for earlier in one.placed)
        )

    return [one for one in measured if not any(repeats(later, one) for later in measured)]


def _alike(cell: Cell) -> Cell:
    return msgspec.structs.replace(cell, file="", suite="", commit="")


def _cell(one: Found[Run]) -> Cell:
    run = one.row
    engines = run.provenance.get("engines") or [{}]
    return Cell(
        file=one.origin.file,
        suite=run.suite,
        machine=machine(run.provenance),
        commit=version(run.provenance),
        model=str(engines[0].get("model") or "").rpartition("/")[2],
        dtype=str(engines[0].get("dtype") or "").replace("none", ""),
        engine=str(engines[0].get("engine") or ""),
        simulated=is_simulated(run.provenance),
        profile=run.profile,
        prefix=prefix_tokens(run),
        outputs=tuple(run.max_tokens),
        line=run.reads is None or run.reads == [[at - 1] if at else [] for at in range(len(run.reads))],
        cache=run.cache,
        sampling=f"temperature {run.temperature:g}, seed {run.seed}" if run.temperature else "greedy",
    )


def prefix_tokens(run: Run) -> int:
    """P of a run's chain: by its profile, the name of its shape, or the first prompt."""
    if run.profile in PROFILES:
        return PROFILES[run.profile].prefix
    named = _NAMED_PREFIX.search(run.profile)
    return int(named[1].replace(",", "")) if named else run.result.agents[0].prompt_tokens


def _placements(found: Sequence[Found[Run]]) -> list[Placed]:
    placed = []
    for (row, level, session, append_tokens), some in by_key(found, _placement_key).items():
        first = some[0].row
        placed.append(
            Placed(
                row=row,
                mode=first.mode,
                daemon=first.daemon,
                group=first.group,
                baseline=first.baseline,
                groups=max(len(_workers(one.row)) for one in some),
                devices=max(_devices(one.row) for one in some),
                decode_first=_decode_first(first),
                level=level,
                session=session,
                append_tokens=append_tokens,
                found=some,
            )
        )
    return sorted(placed, key=lambda one: RUN_MODES.index(one.mode) if one.mode in RUN_MODES else len(RUN_MODES))


def _placement_key(one: Found[Run]) -> tuple[str, str, str, int | None]:
    run = one.row
    level = f"grid of {run.result.grid}" if run.exactness == "grid" else run.exactness
    return run.row, level, run.session, run.append_tokens


def _workers(run: Run) -> set[str]:
    """The groups that its agents ran on."""
    return {agent.worker for agent in run.result.agents}


def _engines(run: Run) -> list[dict[str, Any]]:
    """Those of them."""
    used = _workers(run)
    return [engine for engine in run.provenance.get("engines") or () if engine.get("group") in used]


def _devices(run: Run) -> int:
    return sum(len(engine.get("devices") or ()) for engine in _engines(run)) or len(_workers(run))


def _decode_first(run: Run) -> bool | None:
    known = [engine["decode_first"] for engine in _engines(run) if "decode_first" in engine]
    return all(known) if known else None
