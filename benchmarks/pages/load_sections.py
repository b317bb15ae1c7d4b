"""Many chains at once, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from load_report import Summary, comparable, limit_ms, summaries
from load_rows import Round
from pages.engine_sections import source
from pages.markdown import NOTHING, counted, number, opened, percent, series, table
from pages.rows import Results, rows

GOODPUT_TIMES = 2.0
"""A chain is good that ends within so many times what one takes alone in series."""


def many_chains(results: Results) -> list[str]:
    """Chains at once and chains that arrive by themselves."""
    found = results.rounds
    if not found:
        return []
    lines = opened(
        "Many chains at once",
        "Sides take turns with the same chains at the same moments. *Saved* is the mean end to end against that of the "
        "first side, which is the baseline: the median of the rounds, and their range. *Good* chains ended within "
        f"{GOODPUT_TIMES:g} times what one took alone in series. {source(found)}",
    )
    for some in comparable(rows(found)):
        lines += _load(some)
    return lines


def _load(rounds: Sequence[Round]) -> list[str]:
    first = rounds[0]
    limit = limit_ms(rounds, None, GOODPUT_TIMES)
    sides = summaries(rounds, None, limit)
    lines = [
        f"#### {title(first)}",
        "",
        f"One chain alone in series took {number(first.unloaded_ms)} ms. Times in ms.",
        "",
    ]
    header = ["side", "how", "rounds", "chains", "mean", "saved", "median", "p90", "max", "makespan", "tokens/s"]
    lines += table([*header, "good", "good/s"], [_side(side) for side in sides], left=2)
    header = ["side", "TTFT mean", "TTFT p99", "ITL p50", "ITL p99", "ITL max", "placed"]
    lines += table(header, [_tokens(side) for side in sides])
    if missed := sum(one.missed_tokens for one in rounds):
        lines += [f"{number(missed)} doorbells were dropped: some gaps are too long.", ""]
    return lines


def title(one: Round) -> str:
    """Load, chains and caches in words."""
    shape = one.shape
    level = f", exactness {one.exactness}" if one.exactness != "fast" else ""
    return (
        f"{one.load}: P {shape.prefix:,}, output {shape.output:,}, {shape.agents} agents, {one.cache} cache{level}, "
        f"{len(one.groups)} {'engine' if len(one.groups) == 1 else 'engines'}"
    )


def _side(side: Summary) -> list[str]:
    return [
        side.side,
        f"{side.how}, {'our scheduler' if side.decode_first else 'stock scheduler'}",
        str(side.rounds),
        counted(side.finished, side.chains),
        number(side.e2e_mean_ms),
        _saved(side.saved),
        *(number(value) for value in (side.e2e_median_ms, side.e2e_p90_ms, side.e2e_max_ms, side.makespan_ms)),
        number(side.tokens_per_s, 1),
        percent(100 * side.goodput_share, 0),
        number(side.goodput_per_s, 3),
    ]


def _tokens(side: Summary) -> list[str]:
    return [
        side.side,
        *(number(value, 1) for value in (side.ttft_mean_ms, side.ttft_p99_ms)),
        *(number(value, 1) for value in (side.itl_p50_ms, side.itl_p99_ms, side.itl_max_ms)),
        ", ".join(f"{count} {series(name)}" for name, count in sorted(side.placements.items())) or NOTHING,
    ]


def _saved(percents: Sequence[float]) -> str:
    if not percents:
        return NOTHING
    middle = percent(statistics.median(percents))
    return middle if len(percents) == 1 else f"{middle} ({number(min(percents), 1)} to {number(max(percents), 1)})"
