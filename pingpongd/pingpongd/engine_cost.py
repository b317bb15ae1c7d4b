"""What an engine takes for prompts and decodes, read from its measured figures. Pure.

Between measured points everything is interpolated linearly. Beyond them prefill goes on with the curvature of its last
three points, for attention grows with the square of the context, and decodes with the slope of their last two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pingpong_bus.messages import EngineFigures

_Point = tuple[float, float]
_SHORTEST_MS = 1e-6
_SLOWEST_RIDE = 0.01
"""Appends beside a decode are taken to go on at least at this part of a prefill's speed: no division by nothing."""


_STRIDES = 4
"""Into how many pieces of context a read is cut to look up what it costs beside decodes."""
_MOST_KNOWN = 4096


class Ride(NamedTuple):
    """Reading a part of a prompt beside decodes."""

    ms: float
    slowed: float
    """By what the decodes take longer meanwhile."""


class EngineCost:
    """Milliseconds of one engine; every result is 0 or more."""

    def __init__(self, figures: EngineFigures) -> None:
        """Args:
        figures: of the engine; they have a prefill and a decode at least.
        """
        self._prefill: list[_Point] = _rising([(float(tokens), ms) for tokens, ms in figures.prefill])
        self._finalize: dict[int, list[_Point]] = {}
        for cached, tokens, ms in figures.finalize:
            self._finalize.setdefault(cached, []).append((float(tokens), ms))
        self._finalize = {cached: _rising(points) for cached, points in sorted(self._finalize.items())}
        self._decode: list[_Point] = _rising([(float(context), ms) for context, ms in figures.decode])
        self._shortest_step = max(_SHORTEST_MS, self._decode[0][1])
        batch = [(float(rows), max(1.0, ms / self._shortest_step)) for rows, ms in figures.batch]
        self._batch: list[_Point] = _rising([(1.0, 1.0), *batch])
        self._known_rides: dict[tuple[int, int, bool], Ride] = {}
        self._rides: dict[float, list[_Point]] = {}
        self._slowed: dict[float, list[_Point]] = {}
        for figure in sorted(figures.beside, key=lambda figure: (figure.itl_ratio, figure.context)):
            alone = self.read_ms(figure.context, figure.context + figure.tokens)
            speed = min(1.0, max(_SLOWEST_RIDE, alone / figure.append_ms)) if figure.append_ms > 0 else 1.0
            slowed = max(1.0, figure.decode_ms / self._shortest_step)  # it was measured at the smallest context
            middle = figure.context + figure.tokens / 2
            self._rides.setdefault(figure.itl_ratio, []).append((middle, speed))
            self._slowed.setdefault(figure.itl_ratio, []).append((middle, slowed))

    def first_token_ms(self, cached: int, tokens: int) -> float:
        """From handing over the rest of a prompt until its first token.

        Args:
            cached: tokens that are computed already.
            tokens: that are not, at least 1.
        """
        if cached <= 0 or not self._finalize:
            alone = _on(self._prefill, tokens, bent=True)
            return alone if cached <= 0 else max(self.decode_ms(cached, 1), self.read_ms(cached, cached + tokens))
        contexts = list(self._finalize)
        at = min(len(contexts) - 1, bisect_left(contexts, cached))
        below = contexts[max(0, at - 1)] if contexts[at] > cached else contexts[at]
        low, high = self._rest_ms(below, cached, tokens), self._rest_ms(contexts[at], cached, tokens)
        if contexts[at] <= below:
            return low
        part = min(1.0, max(0.0, (cached - below) / (contexts[at] - below)))
        return low + part * (high - low)

    def read_ms(self, begin: int, end: int) -> float:
        """Prefill of a prompt's tokens from `begin` to `end` at full speed, without the fixed cost of a request."""
        if end <= begin:
            return 0.0
        return max(0.0, _on(self._prefill, end, bent=True) - _on(self._prefill, begin, bent=True))

    def decode_ms(self, context: float, rows: int) -> float:
        """A token of each of `rows` answers that are decoded at once, at their mean context in tokens.

        The model's weights are read once for all of them, each answer's context by itself: what a context takes beyond
        the smallest that was measured counts for every row.
        """
        least = self._shortest_step
        return least * _on(self._batch, rows) + rows * (_on(self._decode, context) - least)

    @property
    def rides(self) -> bool:
        """Whether it is known what appends beside decodes cost."""
        return bool(self._rides)

    def ride(self, begin: int, end: int, *, inner: bool) -> Ride:
        """Reading a prompt's tokens from `begin` to `end` beside decodes; as if alone where that is not known.

        Args:
            begin: in tokens from the prompt's beginning.
            end: likewise.
            inner: the decodes are all read by other agents, and may be slowed down more; see `BesideFigure.itl_ratio`.
        """
        if (known := self._known_rides.get((begin, end, inner))) is not None:
            return known
        found = self._ride(begin, end, inner)
        if len(self._known_rides) >= _MOST_KNOWN:
            self._known_rides.clear()
        self._known_rides[begin, end, inner] = found
        return found

    def _ride(self, begin: int, end: int, inner: bool) -> Ride:
        alone = self.read_ms(begin, end)
        if not self._rides or alone <= 0.0:
            return Ride(alone, 1.0)
        speeds, factors = self._at_pace(self._rides, inner), self._at_pace(self._slowed, inner)
        total = slowed = 0.0
        for at in range(_STRIDES):
            first, last = begin + (end - begin) * at // _STRIDES, begin + (end - begin) * (at + 1) // _STRIDES
            part = self.read_ms(first, last) / _within(speeds, (first + last) / 2)
            total += part
            slowed += part * _within(factors, (first + last) / 2)
        return Ride(total, slowed / total) if total > 0.0 else Ride(alone, 1.0)

    @staticmethod
    def _at_pace(figures: Mapping[float, list[_Point]], inner: bool) -> list[_Point]:
        return figures[max(figures) if inner else min(figures)]

    def _rest_ms(self, row: int, cached: int, tokens: int) -> float:
        """The first token by one row of the table: what goes beyond its tokens is prefill."""
        points = self._finalize[row]
        most = points[-1][0]
        if tokens <= most:
            return _within(points, tokens)
        return points[-1][1] + self.read_ms(cached + int(most), cached + tokens)


def _rising(points: Sequence[_Point]) -> list[_Point]:
    """In order, and never falling: what takes longer than something larger was disturbed; nothing goes too fast."""
    found: list[_Point] = []
    for x, y in sorted(dict(points).items(), reverse=True):
        found.append((x, max(0.0, min([y, *(after for _, after in found[-1:])]))))
    return found[::-1]


def _within(points: Sequence[_Point], x: float) -> float:
    """Interpolated; beyond the ends their values."""
    if x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0]:
        return points[-1][1]
    at = bisect_left(points, (x,))
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _on(points: Sequence[_Point], x: float, *, bent: bool = False) -> float:
    """The same, going on beyond the last point in a straight line, or `bent` as the last three points are."""
    last, y = points[-1]
    if x <= last or len(points) < 2:
        return _within(points, x)
    x0, y0 = points[-2]
    slope, beyond = (y - y0) / (last - x0), x - last
    if not bent or len(points) < 3:
        return y + slope * beyond
    x1, y1 = points[-3]
    bend = max(0.0, (slope - (y0 - y1) / (x0 - x1)) / (last - x1))
    return y + slope * beyond + bend * beyond * (beyond + last - x0)
