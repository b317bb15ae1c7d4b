"""What mixed steps take, by setup, context and appended tokens, beside their kernels timed alone. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from figures import percentile
from lone_kernels import LoneKernel
from mixed_rows import MixedStep, StepProfile


class StepTime(msgspec.Struct, frozen=True):
    """Steps of one size."""

    context: int
    tokens: int
    """Appended ones; the step has one row more."""
    median_ms: float
    p99_ms: float
    count: int


def setups(steps: Iterable[MixedStep]) -> dict[str, list[StepTime]]:
    """Of each setup, its sizes by context and tokens; gaps of all rounds together, those of several commits apart."""
    steps = list(steps)
    commits: dict[str, set[str]] = {}
    for step in steps:
        commits.setdefault(step.setup, set()).add(_commit(step))
    gaps: dict[tuple[str, int, int], list[float]] = {}
    for step in steps:
        name = step.setup if len(commits[step.setup]) == 1 else f"{step.setup}, commit {_commit(step)}"
        gaps.setdefault((name, step.context, step.tokens), []).extend(step.gaps_ms)
    found: dict[str, list[StepTime]] = {setup: [] for setup, _, _ in gaps}
    for (setup, context, tokens), some in sorted(gaps.items()):
        if some:
            found[setup].append(StepTime(context, tokens, statistics.median(some), percentile(some, 99), len(some)))
    return {setup: times for setup, times in found.items() if times}


def _commit(step: MixedStep) -> str:
    return str(step.provenance.get("commit") or "unknown")[:12]


def by_context(times: Sequence[StepTime]) -> dict[int, list[StepTime]]:
    """Sizes by context, tokens rising."""
    found: dict[int, list[StepTime]] = {}
    for time in times:
        found.setdefault(time.context, []).append(time)
    return found


def matrices(lone: Iterable[LoneKernel]) -> dict[int, float]:
    """Milliseconds of all matrix products by rows; medians of the timings."""
    return _medians((one.rows, one.ms) for one in lone if one.what == "matrices")


def attention(lone: Iterable[LoneKernel], context: int) -> dict[int, float]:
    """Milliseconds of all attention behind a context by rows, at the split of keys that takes least."""
    by_split: dict[tuple[int, int], list[float]] = {}
    for one in lone:
        if one.what == "attention" and one.context == context:
            by_split.setdefault((one.rows, one.splits), []).append(one.ms)
    best: dict[int, float] = {}
    for (rows, _), some in sorted(by_split.items()):
        ms = statistics.median(some)
        best[rows] = min(ms, best.get(rows, ms))
    return best


def kernels_alone(lone: Sequence[LoneKernel], context: int) -> dict[int, float]:
    """Matrices and attention, each timed alone, by rows; only rows of which both are known."""
    products, heads = matrices(lone), attention(lone, context)
    return {rows: products[rows] + heads[rows] for rows in products if rows in heads}


def over_decode(times: Sequence[StepTime]) -> dict[int, float]:
    """Step ÷ the one without appends at the same context, by tokens; empty where that was not measured."""
    alone = next((time.median_ms for time in times if time.tokens == 0), None)
    return {} if alone is None else {time.tokens: time.median_ms / alone for time in times if time.tokens}


class DeviceTime(msgspec.Struct, frozen=True):
    """Medians of a profile's steps with appends: those at least as long as the middle of shortest and longest."""

    setup: str
    context: int
    tokens: int
    steps: int
    wall_ms: float
    busy_ms: float
    kernels_ms: dict[str, float]
    launches: float


def device_times(profiles: Iterable[StepProfile]) -> list[DeviceTime]:
    """In the order of setup, context and tokens."""
    ordered = sorted(profiles, key=lambda one: (one.setup, one.context, one.tokens))
    return [_device_time(one) for one in ordered if one.steps]


def _device_time(profile: StepProfile) -> DeviceTime:
    walls = [step.wall for step in profile.steps]
    middle = (min(walls) + max(walls)) / 2 if profile.tokens else 0.0
    steps = [step for step in profile.steps if step.wall >= middle]
    kinds = sorted({kind for step in steps for kind in step.kernels})
    return DeviceTime(
        profile.setup,
        profile.context,
        profile.tokens,
        len(steps),
        statistics.median(step.wall for step in steps),
        statistics.median(step.busy for step in steps),
        {kind: statistics.median(step.kernels.get(kind, 0.0) for step in steps) for kind in kinds},
        statistics.median(step.launches for step in steps),
    )


def _medians(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for rows, ms in pairs:
        found.setdefault(rows, []).append(ms)
    return {rows: statistics.median(found[rows]) for rows in sorted(found)}
