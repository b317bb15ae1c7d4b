"""What `jitter_bound.py` measured, as a table."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

_BASELINE = "series"
_RESAMPLES = 2000


class BoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way under one load and one seed."""

    way: str
    burst_s: float
    every_s: float
    factor: float
    seed: int
    at_once: int
    agents: int
    prefix: int
    output: int
    e2e_ms: list[float]
    """Of each chain, in order; the first ones, which warm up, left out."""
    placements: list[str]
    moved: list[int]
    """Hops that were taken off the slow group, per chain."""
    on_wobbly: list[int]
    """Agents that ended on the group with bursts, per chain."""
    episodes: int
    """That the daemon noticed."""
    rerouted: int
    """Agents that were dispatched elsewhere than planned."""
    provenance: dict[str, Any] = {}


def render(rows: Sequence[BoundRow]) -> str:
    """A line per load and way: mean end to end of all seeds, against series, with a 95 % interval."""
    titles = ["bursts, s / between, s", "at once", "way", "chains", "mean, ms", "against series", "95 %", "worst, ms"]
    titles += ["episodes", "moved", "rerouted"]
    lines = [f"| {' | '.join(titles)} |", "|---|--:|---|--:|--:|--:|---|--:|--:|--:|--:|"]
    for load in dict.fromkeys((one.burst_s, one.every_s, one.at_once, one.prefix, one.output) for one in rows):
        some = [one for one in rows if (one.burst_s, one.every_s, one.at_once, one.prefix, one.output) == load]
        base = _times(some, _BASELINE)
        for way in dict.fromkeys(one.way for one in some):
            own, times = [one for one in some if one.way == way], _times(some, way)
            if not any(times.values()):
                continue
            mean = fmean(ms for chains in times.values() for ms in chains)
            against, interval = _against(times, base) if base and way != _BASELINE else ("", "")
            lines.append(
                f"| {load[0]:g} / {load[1]:g} | {load[2]} | {way} | {sum(map(len, times.values()))} | {mean:,.0f} "
                f"| {against} | {interval} | {max(ms for chains in times.values() for ms in chains):,.0f} "
                f"| {sum(one.episodes for one in own)} | {sum(sum(one.moved) for one in own)} "
                f"| {sum(one.rerouted for one in own)} |"
            )
    return "\n".join(lines)


def _times(rows: Sequence[BoundRow], way: str) -> dict[int, list[float]]:
    """End-to-end times by seed."""
    return {one.seed: one.e2e_ms for one in rows if one.way == way and one.e2e_ms}


def _against(times: dict[int, list[float]], base: dict[int, list[float]]) -> tuple[str, str]:
    """The mean over that of the baseline, and the interval that resampling chains gives it."""
    own, other = ([ms for chains in of.values() for ms in chains] for of in (times, base))
    draw = random.Random(0)
    ratios = sorted(
        fmean(draw.choices(own, k=len(own))) / fmean(draw.choices(other, k=len(other))) for _ in range(_RESAMPLES)
    )
    low, high = ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES)]
    return f"{fmean(own) / fmean(other) - 1:+.1%}", f"{low - 1:+.1%} to {high - 1:+.1%}"
