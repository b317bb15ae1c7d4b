"""What engines and the daemon take besides chains, as Markdown: overhead, decode first, exactness."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from decode_first_report import variants
from exactness import ChainPair, equal_chains
from figures import percentile
from overhead import MODES, SYSTEMS, OverheadRun
from pages.machines import version
from pages.markdown import NOTHING, counted, number, opened, percent, series, table
from pages.rows import Found, Results, by_key, rows


def source(found: Sequence[Found[Any]]) -> str:
    """The files that rows stand in, and the commits that made them."""
    files = list(dict.fromkeys(f"`{one.origin.file}`" for one in found))
    commits = list(dict.fromkeys(version(one.row.provenance) for one in found))
    return f"{'; commit '.join(filter(None, (', '.join(files), ', '.join(filter(None, commits)))))}."


def overhead(results: Results) -> list[str]:
    """The daemon against bare vLLM."""
    found = results.overhead
    if not found:
        return []
    lines = opened(
        "The daemon against bare vLLM",
        "The same chain on both, taking turns in one run, caches empty; the baseline is bare vLLM. *More* is the "
        f"median of pairs. {source(found)}",
    )
    body = []
    for profile, some in by_key(rows(found), lambda run: run.profile).items():
        for mode in MODES:
            bare, daemon = ([run for run in some if run.mode == mode and run.system == system] for system in SYSTEMS)
            if bare and daemon:
                body.append(
                    [
                        profile,
                        series(mode),
                        str(len(daemon)),
                        *(number(statistics.median(run.e2e_ms for run in both)) for both in (bare, daemon)),
                        percent(overhead_percent(bare, daemon), 2),
                        "yes" if all(run.outputs == bare[0].outputs for run in (*bare, *daemon)) else "no",
                    ]
                )
    header = ["chain", "placement", "pairs", "bare vLLM, ms", "pingpongd, ms", "more", "same ids"]
    return lines + table(header, body, left=2)


def overhead_percent(bare: Sequence[OverheadRun], daemon: Sequence[OverheadRun]) -> float:
    """How much longer the daemon takes: the median over the pairs of one index, in percent."""
    theirs = {run.index: run.e2e_ms for run in bare}
    return 100 * (statistics.median(run.e2e_ms / theirs[run.index] for run in daemon if run.index in theirs) - 1)


def decode_first(results: Results) -> list[str]:
    """What a decode bears beside appends, by scheduler and target."""
    found = results.decode_first
    if not found:
        return []
    measured = rows(found)
    gaps = [gap for one in measured if one.appends == "none" for gap in one.gaps_ms]
    lines = opened(
        "Decode first: gaps of an answer beside appends",
        f"Baseline: the same answers without appends, p99 {number(percentile(gaps, 99), 1)} ms. *Ratio* is p99 ÷ that; "
        "the target of our scheduler is a step ÷ a step without appends. *Rode*: append tokens computed beside the "
        f"answer. {source(found)}",
    )
    body = [
        [
            one.engine if one.target is None else f"decode first, target {one.target:g}",
            *(number(value, 1) for value in (one.p50_ms, one.p99_ms, one.max_ms)),
            number(one.ratio, 2),
            number(one.answer_ms),
            number(one.appends_ms),
            number(one.beside_tokens),
        ]
        for one in variants(measured)
    ]
    header = ["scheduler", "p50, ms", "p99", "max", "ratio", "answer, ms", "appends done, ms", "rode"]
    return lines + table(header, body)


def exactness_levels(results: Results) -> list[str]:
    """Random chains in series and read ahead at each level."""
    found = results.pairs
    if not found:
        return []
    lines = opened(
        "Levels of exactness",
        "Whole chains in series and read ahead at the same level, compared id by id, all caches empty. *Saved* is read "
        "ahead against series at that level.",
    )
    body = []
    for key, some in by_key(found, lambda one: (one.origin.file, *_level(one.row))).items():
        file, level, mode = key
        pairs = rows(some)
        agents = [agent for pair in pairs for agent in pair.certificate.agents]
        times = [(pair.certificate.serial_ms, pair.certificate.read_ahead_ms) for pair in pairs]
        known = [(serial, ahead) for serial, ahead in times if serial and ahead]
        serial_ms, ahead_ms = (sum(ms) for ms in zip(*known, strict=True)) if known else (0.0, 0.0)
        body.append(
            [
                level,
                mode,
                f"`{file.rpartition('/')[2]}`",
                counted(equal_chains(pairs), len(pairs)),
                counted(sum(agent.equal for agent in agents), len(agents)),
                number(serial_ms / 1e3, 1) if known else NOTHING,
                number(ahead_ms / 1e3, 1) if known else NOTHING,
                percent(100 * (1 - ahead_ms / serial_ms)) if known else NOTHING,
            ]
        )
    header = ["level", "placement", "file", "chains equal", "agents equal", "series, s", "read ahead, s", "saved"]
    return lines + table(header, body, left=3)


def _level(pair: ChainPair) -> tuple[str, str]:
    return f"{pair.exactness}{f' of {pair.grid:,}' if pair.grid else ''}", pair.mode
