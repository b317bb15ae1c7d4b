"""The jitter report as a picture: times between tokens over time for each group, its episodes, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final

from pingpong_bus.messages import JitterCause
from pingpong_client.jitter_report import Episode, Group, JitterReport
from pingpong_client.jitter_series import Point
from pingpong_client.jitter_text import devices_text, seconds_of, words
from pingpong_client.plotting import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    dress,
    new_figure,
)
from pingpong_client.table import clean, clip

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and hatch together: ten causes are more than colours alone keep apart.
LOOKS: Final[dict[JitterCause, tuple[str, str]]] = {
    "thermal_throttle": (VERMILION, ""),
    "power_throttle": (ORANGE, ""),
    "foreign_process": (PURPLE, ""),
    "cpu_starvation": (SKY, ""),
    "memory_pressure": (GREEN, ""),
    "garbage_collection": (YELLOW, ""),
    "own_appends": (ORANGE, "///"),
    "engine_stall": (BLUE, "\\\\\\"),
    "device_fault": (VERMILION, "xxx"),
    "unknown": (GREY, ""),
}
_MOST_GROUPS: Final = 12
_LEGEND_COLUMNS: Final = 5
_GROUP_INCHES, _CAUSE_INCHES = 2.1, 0.3
# How ticks are written that are years, months, days, hours, minutes or seconds apart; how one is that begins the next
# larger; and what stands at the axis's end.
_TICKS: Final = ["%Y", "%Y-%m", "%m-%d", "%H:%M", "%H:%M", "%H:%M:%S"]
_DAYS: Final = ["%Y", "%Y", "%Y-%m", "%m-%d", "%H:%M", "%H:%M:%S"]
_OFFSETS: Final = ["", "", "", "%Y-%m-%d", "%Y-%m-%d", "%Y-%m-%d"]
_FAR: Final = 6.0
"""A worst that is so many times the usual is not drawn to scale on a linear axis."""


def draw(report: JitterReport) -> Figure:
    """Draw the report.

    Raises:
        UsageError: matplotlib is not installed.
    """
    groups = _shown(report)
    causes = report.causes
    heights = [_GROUP_INCHES] * max(1, len(groups))
    if causes:
        heights.append(0.75 + _CAUSE_INCHES * len(causes))
    figure = new_figure(sum(heights) + 0.6)
    rows = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    drawn = [point for group in groups for point in group.points if point.tokens]
    for axes, group in zip(rows, groups, strict=False):
        _group(axes, group, [one for one in report.episodes if _is_of(one, group)], _span(drawn), report)
    if not drawn:
        rows[0].set_axis_off()
        rows[0].text(0.5, 0.5, "no group has decoded in this time", ha="center", transform=rows[0].transAxes)
    for axes in rows[: max(0, len(groups) - 1)]:  # all have the same times
        axes.tick_params(labelbottom=False)
        axes.xaxis.get_offset_text().set_visible(False)
    if groups:
        rows[len(groups) - 1].set_xlabel("time, UTC", fontsize=9)
    if causes:
        _costs(rows[-1], report)
    if drawn:
        _legend(figure, report)
    return figure


def _shown(report: JitterReport) -> Sequence[Group]:
    """The groups that decoded; where there are many, those that lost most."""
    groups = [group for group in report.groups if any(point.tokens for point in group.points)]
    if len(groups) <= _MOST_GROUPS:
        return groups
    kept = sorted(groups, key=lambda group: (-group.lost_ms, -group.tokens))[:_MOST_GROUPS]
    return [group for group in groups if group in kept]


def _is_of(episode: Episode, group: Group) -> bool:
    return episode.worker == group.worker and episode.devices in ([], group.devices)


def _span(points: Sequence[Point]) -> tuple[float, float]:
    return min(point.at for point in points), max(point.at + point.seconds for point in points)


def _group(
    axes: Axes, group: Group, episodes: Sequence[Episode], span: tuple[float, float], report: JitterReport
) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    first, last = span
    for episode in episodes:
        ended = episode.ended if episode.ended is not None else max(last, report.ended or last)
        # An episode of seconds in a report of a day is still to be seen.
        ended = max(ended, episode.began + (last - first) / 400)
        axes.axvspan(
            _date(episode.began),
            _date(ended),
            **_band(episode.cause),
            linewidth=0,
            zorder=0.5,
        )
    for run in _runs(group.points):
        _lines(axes, run)
    if group.usual_ms:
        axes.axhline(group.usual_ms, color=INK, linewidth=0.8, linestyle=":", zorder=3)
    name = clip(clean(group.worker, lines=False), 24)
    title = f"{name}   {clip(devices_text(group.devices), 60)}   {group.tokens:,} tokens"
    if group.episodes:
        title += f"   {_counted(group.episodes)}"
        title += f", {seconds_of(group.lost_ms)} lost" if group.late_seconds else ""
        unfinished = _unfinished(episodes)
        title += f", {f'{unfinished} ' if unfinished < group.episodes else ''}not over" if unfinished else ""
    dress(axes, title, "", "ms between tokens" + (", log" if _scale(axes, group) == "log" else ""))
    axes.set_xlim(_date(first), _date(last))
    locator = AutoDateLocator(tz=UTC)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, UTC, _TICKS, _OFFSETS, _DAYS))


def _lines(axes: Axes, points: Sequence[Point]) -> None:
    """A stretch without a gap, as steps: a point is about its whole time."""
    at = [_date(point.at) for point in points] + [_date(points[-1].at + points[-1].seconds)]
    for values, colour, width in (
        ([point.worst_ms for point in points], GREY, 0.7),
        ([point.p99_ms for point in points], VERMILION, 1.2),
        ([point.p50_ms for point in points], BLUE, 1.4),
    ):
        axes.step(at, [*values, values[-1]], where="post", color=colour, linewidth=width)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Stretches in which the group decoded without a pause."""
    runs: list[list[Point]] = []
    for point in points:
        if not point.tokens:
            continue
        if runs and point.at - (runs[-1][-1].at + runs[-1][-1].seconds) < 1e-6:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _band(cause: JitterCause) -> dict[str, Any]:
    """How an episode's time is shaded; lines and their hatch stay readable on it."""
    colour, hatch = LOOKS[cause]
    return {"facecolor": (colour, 0.4), "edgecolor": (colour, 0.8) if hatch else "none", "hatch": hatch}


def _unfinished(episodes: Sequence[Episode]) -> int:
    """Those of which nobody knows what they cost."""
    return sum(episode.state != "over" for episode in episodes)


def _counted(episodes: int) -> str:
    return f"{episodes:,} episode{'s' if episodes != 1 else ''}"


def _scale(axes: Axes, group: Group) -> str:
    """Linear, as differences of a third are what matters; logarithmic where stalls would leave them no room."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    used = [point for point in group.points if point.tokens]
    low = min(point.p50_ms for point in used)
    high = max(point.worst_ms for point in used)
    if low > 0 and high > _FAR * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")
        )
        axes.set_ylim(low / 1.5, high * 1.5)
    else:
        axes.set_ylim(0, 1.1 * high)
    return axes.get_yscale()


def _costs(axes: Axes, report: JitterReport) -> None:
    from matplotlib.ticker import FuncFormatter

    at = range(len(report.causes))
    most = max(one.lost_ms for one in report.causes) / 1e3
    for place, one in zip(at, report.causes, strict=True):
        colour, hatch = LOOKS[one.cause]
        axes.barh(place, one.lost_ms / 1e3, height=0.7, color=colour, hatch=hatch, edgecolor="white", alpha=0.85)
        text = f"{seconds_of(one.lost_ms)}: {_counted(one.episodes)}, "
        text += f"{one.chains} chain{'s' if one.chains != 1 else ''}"
        axes.annotate(
            text, (one.lost_ms / 1e3, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8
        )
    title = "Seconds lost by cause, all answers together"
    if unfinished := _unfinished(report.episodes):
        title += f"; what is not over ({_counted(unfinished)}) is not counted"
    dress(axes, title, "", "", grid="x")
    axes.set_yticks(list(at), [words(one.cause) for one in report.causes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(report.causes) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}"))
    axes.set_xlim(0, 1.35 * most or 1.0)  # room for the words behind the longest bar


def _legend(figure: Figure, report: JitterReport) -> None:
    """The lines in a row, and rows of causes below; a legend fills its columns one after the other."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows: list[list[Artist]] = [
        [
            Line2D([], [], color=BLUE, linewidth=1.4, label="median"),
            Line2D([], [], color=VERMILION, linewidth=1.2, label="p99"),
            Line2D([], [], color=GREY, linewidth=0.7, label="worst"),
            Line2D([], [], color=INK, linewidth=0.8, linestyle=":", label="usual median"),
        ]
    ]
    causes = [cause for cause in LOOKS if any(episode.cause == cause for episode in report.episodes)]
    patches: list[Artist] = [Patch(**_band(cause), linewidth=0, label=f"episode: {words(cause)}") for cause in causes]
    rows += [patches[at : at + _LEGEND_COLUMNS] for at in range(0, len(patches), _LEGEND_COLUMNS)]
    empty = Patch(visible=False, label=" ")
    wide = max(map(len, rows))
    handles = [(row + [empty] * wide)[at] for at in range(wide) for row in rows]
    figure.legend(handles=handles, loc="outside lower center", ncols=wide, frameon=False, fontsize=8)


def _date(at: float) -> float:
    """matplotlib's dates are days since 1970."""
    return at / 86400
