"""Placements beside their baselines: what they save, hide and cost. Pure: runs in, figures out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from figures import (
    Exactness,
    InterToken,
    Spread,
    decode_ms_by_group,
    decode_slowdown,
    downstream,
    exactness,
    hidden_share,
    inter_token,
    median_total_ms,
    median_ttft_ms,
    saved_percent,
)
from pages.chains import Measured, Placed
from runs import Run


class Compared(msgspec.Struct, frozen=True):
    """A placement beside its baseline."""

    placed: Placed
    spread: Spread
    baseline: Placed | None
    """None: it is one itself, or the file has none."""
    saved_percent: float | None
    iso: Placed | None
    """The fastest series on as many devices, where the baseline has fewer."""
    iso_saved_percent: float | None
    hidden: float | None
    """Hidden ÷ hideable TTFT of the downstream agents; None where nearly nothing can be hidden."""
    downstream_ttft_ms: float | None
    """Of one agent, mean of the agents' medians; None of a chain of one."""
    ttft_ms: list[float]
    """Of each agent; median."""
    total_ms: list[float]
    """Of each agent, from when it was ready to its last token; median."""
    slowdown: dict[str, float]
    """By group: a token's time ÷ that of the same agents in the baseline; empty of a baseline."""
    steps_by_group: dict[str, float]
    """Median over the runs."""
    gaps: dict[str, InterToken]
    """By group; empty where the runs do not have them."""
    exact: Exactness | None
    """Against the baseline; of a baseline, against its first run."""


def compared(measured: Measured) -> list[Compared]:
    """All placements of a cell beside their baselines."""
    found = []
    for one in measured.placed:
        baseline = baseline_of(one, measured.placed)
        found.append(compare(one, baseline, iso_of(one, baseline, measured.placed)))
    return found


def baseline_of(placed: Placed, others: Sequence[Placed]) -> Placed | None:
    """What a placement's runs say that they are compared with: at the same level of exactness, if it ran at that."""
    named = [one for one in others if one.row == placed.baseline and one.row != placed.row]
    alike = [one for one in named if one.level == placed.level and one.session == placed.session]
    return next(iter(alike or named), None)


def iso_of(placed: Placed, baseline: Placed | None, others: Sequence[Placed]) -> Placed | None:
    """The fastest series on as many devices as a placement has, where its baseline has fewer."""
    if baseline is None or baseline.devices >= placed.devices:
        return None
    series = [
        one
        for one in others
        if one.mode == "serial"
        and (one.devices, one.level, one.session) == (placed.devices, placed.level, placed.session)
    ]
    return min(series, key=lambda one: one.median_ms, default=None)


def compare(placed: Placed, baseline: Placed | None, iso: Placed | None = None) -> Compared:
    """One placement beside its baseline, and beside series on as many devices."""
    runs = placed.runs
    spread = Spread.of([run.e2e_ms for run in runs])
    medians = median_ttft_ms(runs)
    ttft = [medians[at] for at in downstream(runs[0])]
    exact = exactness(baseline.runs if baseline else runs, runs)
    return Compared(
        placed=placed,
        spread=spread,
        baseline=baseline,
        saved_percent=saved_percent(baseline.median_ms, spread.median) if baseline else None,
        iso=iso,
        iso_saved_percent=saved_percent(iso.median_ms, spread.median) if iso else None,
        hidden=hidden_share(baseline.runs, runs) if baseline and ttft else None,
        downstream_ttft_ms=statistics.fmean(ttft) if ttft else None,
        ttft_ms=medians,
        total_ms=median_total_ms(runs),
        slowdown=decode_slowdown(baseline.runs, runs) if baseline else {},
        steps_by_group=steps_by_group(runs),
        gaps=inter_token(runs),
        exact=exact if exact.compared else None,
    )


def steps_by_group(runs: Sequence[Run]) -> dict[str, float]:
    """Milliseconds a token by the group that decoded it: medians over the runs, groups in alphabetical order."""
    steps: dict[str, list[float]] = {}
    for run in runs:
        for group, ms in decode_ms_by_group(run).items():
            steps.setdefault(group, []).append(ms)
    return {group: statistics.median(steps[group]) for group in sorted(steps)}
