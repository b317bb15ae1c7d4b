"""Draws timelines of chains: a lane per device group, a bar per stretch of work, arrows where tokens were read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

import msgspec

from pingpong_bus.messages import ChainResult
from pingpong_client import plotting
from pingpong_client.table import clean, clip, clip_middle
from pingpong_client.timeline_account import account
from pingpong_client.timeline_legend import EDGE, MARKS, PATH, PATH_LABELS, handles
from pingpong_client.timeline_names import NamedBar, name_bar
from pingpong_client.timeline_spans import Flow, HopSpans, Lane, Span, chain_end_ms, flows, handovers, lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARK_POINTS = 7
_TOLD_SHARE = 0.005
"""Of a chain's time: what is shorter on its path needs no legend."""
_ROW_INCHES, _FRAME_INCHES, _LEGEND_INCHES, _REASON_INCHES = 0.5, 0.42, 0.85, 0.18
_REASON_POINTS, _REASON_CHARACTERS, _NAME_CHARACTERS = 8, 125, 60
_BAR, _THIN = 0.7, 0.06
_PATH_HEIGHT = 0.3
_ARROWS_EACH = 16
"""Of the tokens that one hop reads from another: evenly chosen among more, and always the last."""
_DEVICE_CHARACTERS = 16


class _Row(msgspec.Struct, frozen=True):
    hops: tuple[HopSpans, ...]
    y: float


def figure(results: Sequence[ChainResult], titles: Sequence[str] = (), *, path: bool = True) -> Figure:
    """Chains one beneath the other, on one axis of time and with the same lanes.

    Args:
        results: at least one.
        titles: one for each; otherwise a chain's name and placement, and beneath why it was placed like that.
        path: whether to draw the critical path above the lanes, where one of the chains has finished.

    Raises:
        UsageError: matplotlib is not installed.
    """
    path = path and any(result.state == "finished" for result in results)
    names = _workers(results)
    devices = {name: found for result in results for name, found in result.devices.items()}
    tables = [lanes(msgspec.structs.replace(result, devices=devices), names) for result in results]
    rows = [sum(max(1, len(lane.rows)) for lane in table) for table in tables]
    reasons = ["" if titles else result.why for result in results]
    heights = [
        _ROW_INCHES * count + (_PATH_HEIGHT if path else 0) + _FRAME_INCHES + (_REASON_INCHES if why else 0)
        for count, why in zip(rows, reasons, strict=True)
    ]
    drawn = plotting.new_figure(sum(heights) + _LEGEND_INCHES)
    panels = drawn.subplots(len(results), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end_s = max(chain_end_ms(result) for result in results) / 1e3 or 1.0
    seen: set[str] = set()
    named: list[tuple[Axes, list[_Row], ChainResult]] = []
    titles = titles or [_title(result) for result in results]
    for axes, result, table, title, why in zip(panels, results, tables, titles, reasons, strict=True):
        found = _place(table)
        _draw_lanes(axes, table, found, seen)
        _draw_flows(axes, result, found, seen)
        _draw_handovers(axes, result, found)
        if path:
            _draw_path(axes, result, seen)
        _dress(axes, _compared(title, result, results[0]), why, table, path=path)
        named.append((axes, [row for lane in found for row in lane], result))
    panels[-1].set_xlim(0, end_s * 1.08)  # room for the last name
    panels[-1].set_xlabel("seconds since the chain was submitted", fontsize=9)
    drawn.legend(handles=handles(seen), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    drawn.draw_without_rendering()  # settles the layout, and so the scale
    for axes, placed, result in named:
        _name_bars(axes, placed, result)
    return drawn


def _workers(results: Sequence[ChainResult]) -> list[str]:
    """Every group of any of the chains: as the last of them, which is to be read best, came to them."""
    found: list[str] = []
    for result in reversed(results):
        found += [lane.worker for lane in lanes(result) if lane.worker not in found]
    return found


def _title(result: ChainResult) -> str:
    name = clip(clean(result.name, lines=False), _NAME_CHARACTERS)
    what = f"{name} ({result.placement or 'not placed'})"
    if result.e2e_ms is None:
        return f"{what}: {result.state}"
    return f"{what}: {result.e2e_ms / 1e3:.1f} s" if result.e2e_ms >= 1000 else f"{what}: {result.e2e_ms:.0f} ms"


def _place(table: Sequence[Lane]) -> list[list[_Row]]:
    """Rows from top to bottom, by lane; an idle lane has an empty one."""
    y = 0
    found: list[list[_Row]] = []
    for lane in table:
        rows = lane.rows or ((),)
        found.append([_Row(hops, float(y + at)) for at, hops in enumerate(rows)])
        y += len(rows)
    return found


def _draw_lanes(axes: Axes, table: Sequence[Lane], placed: Sequence[Sequence[_Row]], seen: set[str]) -> None:
    for number, (lane, rows) in enumerate(zip(table, placed, strict=True)):
        if number % 2:
            axes.axhspan(rows[0].y - 0.5, rows[-1].y + 0.5, color="#f5f5f5", zorder=0)
        if not lane.rows:
            middle = axes.get_yaxis_transform()
            axes.text(0.5, rows[0].y, "idle", transform=middle, ha="center", va="center", color="#777777", fontsize=9)
        for row in rows:
            for hop in row.hops:
                _draw_hop(axes, hop, row.y, seen)


def _draw_hop(axes: Axes, hop: HopSpans, y: float, seen: set[str]) -> None:
    covered = sum(span.end_ms - span.start_ms for span in hop.spans)
    if hop.end_ms - hop.entry.started_ms > covered + 1:
        seen.add("wait")
        _bar(axes, hop.entry.started_ms, hop.end_ms, y, plotting.GREY, height=_THIN, zorder=2)
    for span in hop.spans:
        colour = _colour(span)
        seen.add(colour)
        edge = plotting.WORK["append"] if colour == "append" else EDGE  # short ones are to be seen, too
        _bar(axes, span.start_ms, span.end_ms, y, plotting.WORK[colour], edge=edge, zorder=3)
    if hop.entry.state in MARKS:
        seen.add(hop.entry.state)
        marker, _ = MARKS[hop.entry.state]
        axes.plot(hop.end_ms / 1e3, y, marker=marker, color=plotting.INK, markersize=_MARK_POINTS, zorder=6)


def _colour(span: Span) -> str:
    return "wasted" if span.again else span.kind


def _bar(
    axes: Axes,
    start_ms: float,
    end_ms: float,
    y: float,
    colour: str,
    *,
    height: float = _BAR,
    edge: str = "none",
    zorder: int = 3,
) -> None:
    axes.barh(
        y,
        (end_ms - start_ms) / 1e3,
        left=start_ms / 1e3,
        height=height,
        color=colour,
        edgecolor=edge,
        linewidth=0.4,
        zorder=zorder,
    )


def _draw_flows(axes: Axes, result: ChainResult, placed: Sequence[Sequence[_Row]], seen: set[str]) -> None:
    """Arrows from the row that wrote to the one that read; none within a row, where the order shows it."""
    at = {(hop.agent, hop.number): row.y for rows in placed for row in rows for hop in row.hops}
    pairs: dict[tuple[tuple[int, int], tuple[int, int]], list[Flow]] = {}
    for flow in flows(result):
        ends = (flow.writer.agent, flow.writer.number), (flow.reader.agent, flow.reader.number)
        pairs.setdefault(ends, []).append(flow)
    for (writer, reader), found in pairs.items():
        if at[writer] == at[reader]:
            continue
        seen.add("tokens")
        for flow in _some(found):
            down = at[reader] > at[writer]
            tail, head = at[writer] + (0.35 if down else -0.35), at[reader] - (0.35 if down else -0.35)
            axes.annotate(
                "",
                xy=(flow.at_ms / 1e3, head),
                xytext=(flow.at_ms / 1e3, tail),
                arrowprops={
                    "arrowstyle": "-|>,head_length=0.28,head_width=0.12",
                    "color": plotting.INK,
                    "linewidth": 0.6,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
                zorder=5,
            )


def _draw_handovers(axes: Axes, result: ChainResult, placed: Sequence[Sequence[_Row]]) -> None:
    """A dashed line from where a hop was lost or moved to where its agent went on, if in another row."""
    at = {(hop.agent, hop.number): row.y for rows in placed for row in rows for hop in row.hops}
    for hop, following in handovers(result):
        x = [hop.end_ms / 1e3, following.entry.started_ms / 1e3]
        y = [at[hop.agent, hop.number], at[following.agent, following.number]]
        if y[0] == y[1]:
            continue
        axes.plot(x, y, color=plotting.INK, linewidth=1, linestyle=(0, (3, 2)), zorder=4)


def _some(found: Sequence[Flow]) -> Iterable[Flow]:
    if len(found) <= _ARROWS_EACH:
        return found
    step = (len(found) - 1) / (_ARROWS_EACH - 1)
    return [found[round(step * at)] for at in range(_ARROWS_EACH)]


def _draw_path(axes: Axes, result: ChainResult, seen: set[str]) -> None:
    for step in account(result).path:
        if step.kind == "recovery":
            seen.add("wasted")
        if step.kind in PATH_LABELS and step.ms > _TOLD_SHARE * chain_end_ms(result):
            seen.add(f"path {step.kind}")
        _bar(axes, step.start_ms, step.end_ms, -0.5 - _PATH_HEIGHT, PATH[step.kind], height=_PATH_HEIGHT, edge=EDGE)


def _dress(axes: Axes, title: str, why: str, table: Sequence[Lane], *, path: bool) -> None:
    plotting.dress(axes, title, "", "", grid="x", pad=_REASON_POINTS + 9 if why else None)
    if why:
        shown = clip(clean(f"placement: {why}", lines=False), _REASON_CHARACTERS)
        axes.annotate(
            shown,
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=_REASON_POINTS,
            parse_math=False,
        )
    ticks: list[float] = [-0.5 - _PATH_HEIGHT] if path else []
    labels = ["critical path"] if path else []
    y = 0
    for lane in table:
        count = max(1, len(lane.rows))
        ticks.append(y + (count - 1) / 2)
        labels.append(_label(lane))
        y += count
    axes.set_yticks(ticks, labels)
    axes.set_ylim(y - 0.5, -0.5 - (1.6 * _PATH_HEIGHT if path else 0))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _label(lane: Lane) -> str:
    """A group with its devices; UUIDs are cut in their middle."""
    shown = [clip_middle(device, _DEVICE_CHARACTERS) for device in lane.devices if device != lane.worker]
    if not shown:
        return lane.title
    more = f" + {len(shown) - 1}" if len(shown) > 1 else ""
    return f"{lane.worker}\n{shown[0]}{more}"


def _compared(title: str, result: ChainResult, first: ChainResult) -> str:
    """A title, with how much less or more time the chain took than the first, where both are runs of one chain."""
    same = [agent.name for agent in result.agents] == [agent.name for agent in first.agents]
    if result is first or not same or result.name != first.name or not result.e2e_ms or not first.e2e_ms:
        return title
    percent = 100 * (result.e2e_ms / first.e2e_ms - 1)
    return f"{title}, {abs(percent):.1f} % {'less' if percent <= 0 else 'more'}"


def _name_bars(axes: Axes, rows: Sequence[_Row], result: ChainResult) -> None:
    """Write agents' names into their decoding, or into the longest of what they did."""
    for row in rows:
        starts = [hop.entry.started_ms / 1e3 for hop in row.hops]
        starts += [span.start_ms / 1e3 for hop in row.hops for span in hop.spans]
        for hop in row.hops:
            span = max(
                hop.spans, key=lambda span: (span.kind in ("decode", "step"), span.end_ms - span.start_ms), default=None
            )
            if span is None:
                continue
            end = span.end_ms / 1e3
            bar = NamedBar(
                name=result.agents[hop.agent].name,
                y=row.y,
                start=span.start_ms / 1e3,
                end=end,
                height=_BAR,
                fill=plotting.WORK[_colour(span)],
                free_until=min((other for other in starts if other >= end - 1e-9), default=inf),
                mark_points=0.6 * _MARK_POINTS if hop.entry.state in MARKS else 0.0,
            )
            name_bar(axes, bar)
