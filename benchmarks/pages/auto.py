"""What `auto` chose in each cell, what would have been best, and what was predicted. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

import msgspec

from pages.chains import Measured, Placed
from pages.rows import Origin, origins
from runs import Run


class Choice(msgspec.Struct, frozen=True):
    """One cell's runs of `auto` on one daemon."""

    measured: Measured
    auto: Placed
    chosen: str
    """The placement that it took most often."""
    times: int
    """How often, of all its runs."""
    best: Placed | None
    """The fastest of those that ran by name on the same daemon at the same level; None where none did."""
    over_best_percent: float | None
    """How much longer the chosen placement took than the best one, both asked for by name; the median over the runs of
    auto, each by the groups that it took. None where only one mode ran by name."""
    over_series_percent: float | None
    """How much longer auto took than the fastest series on that daemon."""
    origins: list[Origin]

    @property
    def predicted(self) -> bool:
        """Whether the cost model chose, in all runs; before there was one, a rule of thumb did."""
        return all(run.result.predicted_ms is not None for run in self.auto.runs)

    @property
    def cache(self) -> str:
        """Of the cell."""
        return self.measured.cell.cache


class Prediction(msgspec.Struct, frozen=True):
    """Predicted and actual of one run."""

    placement: str
    predicted_ms: float
    actual_ms: float

    @property
    def error_percent(self) -> float:
        """Predicted over actual, in percent more."""
        return 100 * (self.predicted_ms / self.actual_ms - 1)


def choices(measured: Iterable[Measured]) -> list[Choice]:
    """All cells in which `auto` ran."""
    return [
        _choice(one, placed) for one in measured for placed in one.placed if placed.mode == "auto" and _decided(placed)
    ]


def _decided(placed: Placed) -> list[str]:
    return [run.result.placement for run in placed.runs if run.result.placement]


def _choice(measured: Measured, auto: Placed) -> Choice:
    chosen, times = Counter(_decided(auto)).most_common(1)[0]
    named = [
        one
        for one in measured.placed
        if one.mode not in ("auto", "presend") and (one.daemon, one.asked) == (auto.daemon, auto.asked)
    ]
    choice = len({one.mode for one in named}) > 1
    best = min(named, key=lambda one: one.median_ms, default=None)
    taken = [found.median_ms for run in auto.runs if (found := _by_name(run, chosen, named))]
    series = [one for one in named if one.mode == "serial"]
    fastest = min(series, key=lambda one: one.median_ms, default=None)
    used = [*auto.found, *(found for one in named for found in one.found)]
    return Choice(
        measured=measured,
        auto=auto,
        chosen=chosen,
        times=times,
        best=best,
        over_best_percent=100 * (statistics.median(taken) / best.median_ms - 1) if best and taken and choice else None,
        over_series_percent=100 * (auto.median_ms / fastest.median_ms - 1) if fastest else None,
        origins=origins(used),
    )


def _by_name(run: Run, mode: str, named: Iterable[Placed]) -> Placed | None:
    """The placement asked for by name that a run of auto took: of this mode, on its group if it was held to one.

    Where that group was not named another one stands for it. None: the run took another mode, or that was not named.
    """
    if run.result.placement != mode:
        return None
    workers = {agent.worker for agent in run.result.agents}
    alike = [one for one in named if one.mode == mode]
    return min(alike, key=lambda one: ({one.group} != workers, one.group != ""), default=None)


def predictions(runs: Iterable[Run]) -> list[Prediction]:
    """Of every run that the cost model predicted, whoever chose its placement."""
    return [
        Prediction(run.result.placement, run.result.predicted_ms, run.e2e_ms)
        for run in runs
        if run.result.placement is not None and run.result.predicted_ms is not None and run.mode != "presend"
    ]


def median_error_percent(predicted: Iterable[Prediction]) -> float:
    """The median of how far predictions were off, either way, in percent of what it took."""
    return statistics.median(abs(one.error_percent) for one in predicted)
