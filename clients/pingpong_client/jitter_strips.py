"""A row of bars for each group: times between tokens over time, and under them where episodes were. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pingpong_client.jitter_report import Group, JitterReport, is_dated
from pingpong_client.log_times import date_and_time, long, time_of_day
from pingpong_client.sparkline import sparkline
from pingpong_client.table import clean, clip

_NAME_CELLS = 16
_FEWEST_CELLS, _MOST_CELLS = 10, 120


class _Scale:
    """Columns of equal time from the first point to the last."""

    def __init__(self, first: float, last: float, cells: int, finest_s: float) -> None:
        self.first, self.last = first, last
        self.each_s = max((last - first) / cells, finest_s)
        self.cells = max(1, math.ceil((last - first) / self.each_s - 1e-6))

    def columns(self, began: float, ended: float) -> range:
        """The columns that a time touches."""
        start = math.floor((began - self.first) / self.each_s + 1e-6)
        end = max(start + 1, math.ceil((ended - self.first) / self.each_s - 1e-6))
        return range(max(0, start), min(self.cells, end))


def strips(report: JitterReport, width: int) -> list[str]:
    """Lines that are at most `width` cells wide."""
    points = [point for group in report.groups for point in group.points if point.tokens]
    if not points:
        return ["no tokens while nothing but decodes ran"]
    names = [clip(clean(group.worker, lines=False), _NAME_CELLS) for group in report.groups]
    indent = max(map(len, names)) + 2
    scale = _Scale(
        min(point.at for point in points),
        max(point.at + point.seconds for point in points),
        max(_FEWEST_CELLS, min(width - indent, _MOST_CELLS)),
        min(point.seconds for point in points),
    )
    lines = [f"p99 ms over time, {long(scale.each_s)} a column; ^ an episode"]
    for name, group in zip(names, report.groups, strict=True):
        lines += [f"{name:{indent}}{row}" for name, row in _rows(name, group, report, scale)]
    when = date_and_time if is_dated(report) else time_of_day
    start, end = when(scale.first), when(scale.last)
    return [*lines, " " * indent + start + end.rjust(max(len(end) + 2, scale.cells - len(start)))]


def _rows(name: str, group: Group, report: JitterReport, scale: _Scale) -> Iterator[tuple[str, str]]:
    values = [0.0] * scale.cells
    for point in group.points:
        for column in scale.columns(point.at, point.at + point.seconds):
            values[column] = max(values[column], point.p99_ms if point.tokens else 0.0)
    if not any(values):
        return
    yield name, sparkline(values, scale.cells, usual=group.usual_ms).rstrip()
    marks = [" "] * scale.cells
    for episode in report.episodes:
        if episode.worker == group.worker and episode.devices in ([], group.devices):
            ended = episode.ended if episode.ended is not None else scale.last
            for column in scale.columns(episode.began, ended):
                marks[column] = "^"
    if "^" in marks:
        yield "", "".join(marks).rstrip()
