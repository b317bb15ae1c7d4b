"""What a run of a suite says, in short tables. Pure: runs in, text out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from figures import (
    baseline,
    comparable,
    decode_ms_by_group,
    decode_slowdown,
    devices_used,
    exactness,
    hidden_share,
    inter_token,
    measured,
    saved_percent,
)
from load_report import comparable as comparable_rounds
from load_report import summaries
from load_rows import Round
from runs import Run

COLUMNS = (
    *("row", "devices", "runs", "E2E, ms", "min", "max", "saved", "against"),
    *("hidden", "decode, ms", "p99", "exact", "predicted"),
)


def render(runs: Sequence[Run], load: Sequence[Round]) -> str:
    """All cells, those of one chain first.

    Times are medians. hidden: of the TTFT that could be. decode: by group, of a token, and as a multiple of one of the
    same agents in the row compared with. p99: by group, the slowest step in a hundred as a multiple of its.
    """
    return "\n".join([*map(_chains, comparable(runs)), *_loads(load)])


def _chains(runs: Sequence[Run]) -> str:
    rows = measured(runs)
    lines = [
        f"## {runs[0].profile}, {runs[0].cache} cache, exactness {runs[0].exactness}",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|--:|--:|--:|--:|--:|--:|---|--:|---|---|--:|--:|",
    ]
    for row, found in rows.items():
        times = [run.e2e_ms for run in found]
        cells = [row, str(devices_used(found)), str(len(found))]
        cells += [f"{ms:,.0f}" for ms in (statistics.median(times), min(times), max(times))]
        reference = baseline(rows, row)
        if reference and reference is not found:
            before = statistics.median(run.e2e_ms for run in reference)
            share = hidden_share(reference, found)
            cells += [f"{saved_percent(before, statistics.median(times)):.1f} %", found[0].baseline]
            cells.append("-" if share is None else f"{share:.3f}")
            cells.append(_decode(found, decode_slowdown(reference, found)))
            cells.append(_tails(reference, found))
            equal = exactness(reference, found)
            cells.append(f"{equal.exact} of {equal.compared}")
        else:
            cells += ["-", "-", "-", _decode(found, {}), "-", "-"]
        off = [100 * (run.result.predicted_ms / run.e2e_ms - 1) for run in found if run.result.predicted_ms]
        cells.append(f"{statistics.median(off):+.1f} %" if off else "-")
        lines.append(f"| {' | '.join(cells)} |")
    chosen = [f"{run.result.placement}@{run.result.agents[0].worker}" for run in runs if run.mode == "auto"]
    if chosen:
        lines += ["", f"auto took {', '.join(chosen)}."]
    return "\n".join(lines) + "\n"


def _decode(runs: Sequence[Run], slower: Mapping[str, float]) -> str:
    """By group, ms a token; behind it the multiple, where it is known."""
    by_run = [decode_ms_by_group(run) for run in runs]
    groups = sorted({group for one in by_run for group in one})
    medians = {group: statistics.median(one[group] for one in by_run if group in one) for group in groups}
    return ", ".join(
        f"{group} {ms:.2f}" + (f" ({slower[group]:.3f})" if group in slower else "") for group, ms in medians.items()
    )


def _tails(reference: Sequence[Run], runs: Sequence[Run]) -> str:
    """The slowest step in a hundred, over that of the same group in the reference, or of the reference's first."""
    before, after = inter_token(reference), inter_token(runs)
    if not before:
        return "-"
    first = next(iter(before.values()))
    return ", ".join(f"{group} {gaps.p99 / before.get(group, first).p99:.2f}" for group, gaps in after.items())


def _loads(rounds: Sequence[Round]) -> list[str]:
    tables = []
    for some in comparable_rounds(rounds):
        first = some[0]
        lines = [
            f"## {first.load}, {first.shape}, {first.cache} cache",
            "",
            "| side | rounds | mean E2E, ms | saved | all within, ms | ITL p50 | p99 | chains finished |",
            "|---|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for side in summaries(some, None, math.inf):
            saved = f"{statistics.median(side.saved):.1f} %" if side.saved else "-"
            lines.append(
                f"| {side.side} | {side.rounds} | {side.e2e_mean_ms:,.0f} | {saved} | {side.makespan_ms:,.0f} "
                f"| {side.itl_p50_ms:.2f} | {side.itl_p99_ms:.2f} | {side.finished} of {side.chains} |"
            )
        tables.append("\n".join(lines) + "\n")
    return tables
