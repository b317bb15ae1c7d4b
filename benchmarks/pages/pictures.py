"""The page's pictures of chains. Each function gives what draws one; None where there is nothing to draw."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from load_report import comparable, limit_ms, summaries
from load_rows import Round
from pages.auto import Prediction, predictions
from pages.chain_sections import title
from pages.chains import Measured, cells, latest
from pages.compared import Compared, compared
from pages.load_sections import GOODPUT_TIMES
from pages.machines import is_simulated
from pages.markdown import number, percent, series
from pages.rows import Results, by_key, rows
from pages.style import CYCLE, HATCHES, INK, MARKERS, MODES, STOCK_HATCH, dress, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Drawing = Callable[[], "Figure"]
"""Draws it; ImportError where matplotlib is not installed."""
_BAR_INCHES = 0.23
_HEADING: dict[str, Any] = {
    "fontsize": 9,
    "fontweight": "bold",
    "va": "center",
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5},
}


def saved(results: Results) -> Drawing | None:
    """Bars of what each placement saves against its baseline, by cell."""
    shown = [(one, bars) for one in latest(cells(results.runs)) if (bars := _bars(one))]
    return partial(_draw_saved, shown) if shown else None


def _draw_saved(shown: Sequence[tuple[Measured, list[Compared]]]) -> Figure:
    figure = new_figure(sum(len(bars) + 1.3 for _, bars in shown) * _BAR_INCHES + 0.9)
    axes = figure.subplots()
    at, ticks, names = 0.0, [], []
    for measured, bars in shown:
        _heading(axes, title(measured.cell), at)
        for bar in bars:
            at += 1
            _bar(axes, bar, at)
            ticks.append(at)
            names.append(f"{bar.placed.name} against {bar.baseline.name if bar.baseline else '?'}")
        at += 1.3
    simulated = ", simulated" if any(one.cell.simulated for one, _ in shown) else ""
    heading = f"Saved end to end against each row's baseline, %{simulated} (dots: vLLM's own scheduler)"
    dress(axes, heading, "", "", grid="x")
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(at - 0.4, -0.8)
    axes.margins(x=0.12)
    return figure


def _heading(axes: Axes, text: str, at: float) -> None:
    """A line of text across the bars, which does not count when room is shared out."""
    axes.text(0.0, at, text, transform=axes.get_yaxis_transform(), **_HEADING).set_in_layout(False)


def _bars(measured: Measured) -> list[Compared]:
    return [one for one in compared(measured) if one.saved_percent is not None]


def _bar(axes: Axes, one: Compared, at: float) -> None:
    value = one.saved_percent or 0.0
    mode = one.placed.mode
    hatch = STOCK_HATCH if one.placed.decode_first is False else HATCHES.get(mode)
    axes.barh(at, value, height=0.78, color=MODES.get(mode, INK), hatch=hatch, edgecolor="white")
    axes.annotate(
        number(value, 1),
        (value, at),
        xytext=(4 if value >= 0 else -4, 0),
        textcoords="offset points",
        va="center",
        ha="left" if value >= 0 else "right",
        fontsize=8,
    )


def predicted(results: Results) -> Drawing | None:
    """Predicted against actual end-to-end times, a mark a run."""
    found = predictions(rows(results.runs))
    return partial(_draw_predicted, found) if found else None


def _draw_predicted(found: Sequence[Prediction]) -> Figure:
    figure = new_figure(4.6)
    left, right = figure.subplots(1, 2)
    groups = sorted(by_key(found, lambda one: one.placement).items())
    for at, (placement, some) in enumerate(groups):
        look = {"color": MODES.get(placement, CYCLE[at]), "marker": MARKERS[at], "s": 26, "linewidths": 0, "alpha": 0.8}
        left.scatter(
            [one.actual_ms / 1e3 for one in some],
            [one.predicted_ms / 1e3 for one in some],
            label=series(placement),
            **look,
        )
        right.scatter([one.actual_ms / 1e3 for one in some], [one.error_percent for one in some], **look)
    most = 1.05 * max(max(one.actual_ms, one.predicted_ms) for one in found) / 1e3
    left.plot([0, most], [0, most], color=INK, linewidth=0.8, linestyle=":")
    left.set_xlim(0, most)
    left.set_ylim(0, most)
    dress(left, "Predicted against actual, end to end", "actual, s", "predicted, s")
    right.axhspan(-5, 5, color="#eeeeee", zorder=0)
    right.axhline(0, color=INK, linewidth=0.8, linestyle=":")
    right.set_xlim(0, most)
    far = max(10.0, 1.15 * max(abs(one.error_percent) for one in found))
    right.set_ylim(-far, far)
    dress(right, "How far off, % of actual (band: 5 %)", "actual, s", "predicted is more, %")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(groups), frameon=False)
    return figure


def many_chains(results: Results) -> Drawing | None:
    """Mean end to end by side of each load, as bars; the baseline first."""
    loads = comparable(rows(results.rounds))
    return partial(_draw_many_chains, loads) if loads else None


def _draw_many_chains(loads: Sequence[list[Round]]) -> Figure:
    figure = new_figure(sum(len({one.side for one in some}) + 1.3 for some in loads) * _BAR_INCHES * 1.1 + 0.9)
    axes = figure.subplots()
    at = 0.0
    ticks: list[float] = []
    names: list[str] = []
    for some in loads:
        at = _load_bars(axes, some, at, ticks, names)
    simulated = ", simulated" if any(is_simulated(one.provenance) for some in loads for one in some) else ""
    dress(axes, f"Mean end to end of many chains, s{simulated} (black: range of the rounds' means)", "", "", grid="x")
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(at - 0.4, -0.8)
    axes.margins(x=0.12)
    return figure


def _load_bars(axes: Axes, rounds: list[Round], at: float, ticks: list[float], names: list[str]) -> float:
    shape, load = rounds[0].shape, rounds[0].load
    heading = f"{load}: P {shape.prefix:,}, output {shape.output:,}, {rounds[0].cache} cache"
    _heading(axes, heading, at)
    for side in summaries(rounds, None, limit_ms(rounds, None, GOODPUT_TIMES)):
        at += 1
        means = [
            statistics.fmean(chain.e2e_ms or 0.0 for chain in one.finished) / 1e3
            for one in rounds
            if one.side == side.side and one.finished
        ]
        if not means:
            continue
        value = side.e2e_mean_ms / 1e3
        axes.barh(
            at, value, height=0.78, color=MODES.get(side.how, INK), hatch=HATCHES.get(side.how), edgecolor="white"
        )
        axes.plot([min(means), max(means)], [at, at], color="black", linewidth=1.2)
        text = number(value, 1 if value >= 10 else 2)
        text += f", {percent(statistics.median(side.saved))} saved" if side.saved else ""
        text += f", {percent(100 * side.goodput_share, 0)} good" if load.rate is not None else ""
        axes.annotate(
            text,
            (max(value, *means), at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        ticks.append(at)
        names.append(f"{side.side} ({side.how}, {'our' if side.decode_first else 'stock'} scheduler)")
    return at + 1.3
