"""What an engine takes for prompts and decodes, read from its measured figures. Pure.

Between measured points and beyond them figures go on in straight lines, but for prefill: attention grows with the
square of the context, so those lines are bent as their neighbours are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from pingpong_bus.messages import EngineFigures
from pingpongd.ride_cost import Point, RideCost, within

_SHORTEST_MS = 1e-6
_MOST_KNOWN = 8192


class EngineCost:
    """Milliseconds of one engine; every result is 0 or more."""

    def __init__(self, figures: EngineFigures, *, paced: bool = True) -> None:
        """Args:
        figures: of the engine; they have a prefill and a decode at least.
        paced: its scheduler is ours, and holds what is read ahead to a pace.
        """
        self._prefill: list[Point] = _rising([(float(tokens), ms) for tokens, ms in figures.prefill])
        self._known: dict[int, float] = {}
        self._finalize: dict[int, list[Point]] = {}
        for cached, tokens, ms in figures.finalize:
            self._finalize.setdefault(cached, []).append((float(tokens), ms))
        self._finalize = {cached: _rising(points) for cached, points in sorted(self._finalize.items())}
        self._decode: list[Point] = _rising([(float(context), ms) for context, ms in figures.decode])
        self._shortest_step = max(_SHORTEST_MS, self._decode[0][1])
        batch = [(float(rows), max(1.0, ms / self._shortest_step)) for rows, ms in figures.batch]
        self._batch: list[Point] = _rising([(1.0, 1.0), *batch])
        self.riding = RideCost(figures.beside, self.read_ms, self._shortest_step, paced=paced)
        """What is read ahead beside decodes."""

    def first_token_ms(self, cached: int, tokens: int) -> float:
        """From handing over the rest of a prompt until its first token.

        Args:
            cached: tokens that are computed already.
            tokens: that are not, at least 1.
        """
        if cached <= 0 or not self._finalize:
            alone = self._prefill_ms(tokens)
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
        return max(0.0, self._prefill_ms(end) - self._prefill_ms(begin))

    def _prefill_ms(self, tokens: int) -> float:
        """A prompt of which nothing is cached; kept, for chains of a kind ask for the same lengths."""
        if (known := self._known.get(tokens)) is not None:
            return known
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        found = self._known[tokens] = _bent(self._prefill, tokens)
        return found

    def reached(self, begin: int, end: int, ms: float) -> int:
        """Up to which token a prompt is read that is read from `begin` towards `end` for so many ms at full speed."""
        low, high = begin, end
        while low < high:
            middle = (low + high + 1) // 2
            if self.read_ms(begin, middle) <= ms:
                low = middle
            else:
                high = middle - 1
        return low

    def decode_ms(self, context: float, rows: float) -> float:
        """A token of each of `rows` answers that are decoded at once, at their mean context in tokens.

        The model's weights are read once for all of them, each answer's context by itself: what a context takes beyond
        the smallest that was measured counts for every row. Guessed tokens are rows, too.
        """
        least = self._shortest_step
        return least * _on(self._batch, rows) + rows * (_on(self._decode, context) - least)

    def _rest_ms(self, row: int, cached: int, tokens: int) -> float:
        """The first token by one row of the table: what goes beyond its tokens is prefill."""
        points = self._finalize[row]
        most = points[-1][0]
        if tokens <= most:
            return within(points, tokens)
        return points[-1][1] + self.read_ms(cached + int(most), cached + tokens)


def slowed(figures: EngineFigures, factor: float) -> EngineFigures:
    """What an engine takes whose every step takes `factor` times as long as when it was measured."""
    return msgspec.structs.replace(
        figures,
        prefill=[(tokens, ms * factor) for tokens, ms in figures.prefill],
        finalize=[(cached, tokens, ms * factor) for cached, tokens, ms in figures.finalize],
        decode=[(context, ms * factor) for context, ms in figures.decode],
        batch=[(rows, ms * factor) for rows, ms in figures.batch],
        beside=[
            msgspec.structs.replace(one, append_ms=one.append_ms * factor, decode_ms=one.decode_ms * factor)
            for one in figures.beside
        ],
        step_p50_ms=figures.step_p50_ms * factor,
        step_p99_ms=figures.step_p99_ms * factor,
    )


def _rising(points: Sequence[Point]) -> list[Point]:
    """In order, and never falling: what takes longer than something larger was disturbed; nothing goes too fast."""
    found: list[Point] = []
    for x, y in sorted(dict(points).items(), reverse=True):
        found.append((x, max(0.0, min([y, *(after for _, after in found[-1:])]))))
    return found[::-1]


def _on(points: Sequence[Point], x: float) -> float:
    """Interpolated in straight lines; below the first point its value, beyond the last one in the last line."""
    if x <= points[-1][0] or len(points) < 2:
        return within(points, x)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + (y1 - y0) / (x1 - x0) * (x - x1)


def _bent(points: Sequence[Point], x: float) -> float:
    """The same, in lines that are bent as their neighbours are, and never fall."""
    straight = _on(points, x)
    if len(points) < 3 or x <= points[0][0]:
        return straight
    at = min(len(points) - 1, bisect_left(points, (x,)))
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    bends = [_bend(points, first) for first in (at - 2, at - 1) if 0 <= first <= len(points) - 3]
    steepest = (y1 - y0) / (x1 - x0) ** 2  # with more than that it would fall at first
    return straight + min(*bends, steepest) * (x - x0) * (x - x1)


def _bend(points: Sequence[Point], first: int) -> float:
    """The second divided difference of three points, at least 0: half of how the slope changes."""
    (x0, y0), (x1, y1), (x2, y2) = points[first : first + 3]
    return max(0.0, ((y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)) / (x2 - x0))
