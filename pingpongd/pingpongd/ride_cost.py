"""What it costs to read prompts ahead beside decodes in one engine, from measured figures. Pure.

Our scheduler (`decode_first.py` of the worker) spreads what is read over the steps that there are, and takes more of it
with each step where there are few. So what was measured is not how fast it can go but what it costs: by how many ms the
decodes come later for each ms that the same tokens would take alone, the **price**. A read is taken to go as fast as
its pace allows at this price; were it spread over more steps, the decodes would lose the same in sum.

Stock vLLM takes as many tokens with each step as its `long_prefill_token_threshold` says: it goes as it was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from pingpong_bus.messages import BesideFigure

LEAST_PRICE, MOST_PRICE = 0.2, 2.0
"""Bounds of the price. What rides has its attention computed in any case, and shares the weights at best; from twice
the time on our scheduler lets nothing ride."""
CHEAP = 1.3
"""Up to this multiple of a step, what rides costs in proportion; beyond it the matrices' next tile makes it dear, where
a pace allows it. 149 tokens at 4k of context made a step 1.3 times as long on an H200, 257 twice."""
_SLOWEST = 0.01
"""Of the speed alone: no division by nothing."""
_STRIDES = 4
"""Into how many pieces of context a read is cut to look up its price."""
_MOST_KNOWN = 4096

Point = tuple[float, float]


class Ride(NamedTuple):
    """Reading a part of a prompt beside decodes."""

    ms: float
    slowed: float
    """By what the decodes take longer meanwhile."""


class RideCost:
    """Of one engine."""

    def __init__(
        self, figures: Sequence[BesideFigure], read_ms: Callable[[int, int], float], step_ms: float, *, paced: bool
    ) -> None:
        """Args:
        figures: what was measured.
        read_ms: what the tokens of a prompt from one to another take alone.
        step_ms: of the decodes that were measured, alone.
        paced: its scheduler is ours.

        Of several prices at one context the least counts: nothing goes too fast, and much can disturb.
        """
        self._read_ms = read_ms
        self._paced = paced
        self._paces = sorted({figure.itl_ratio for figure in figures})
        self._known: dict[tuple[int, int, bool], Ride] = {}
        prices: dict[float, list[float]] = {}
        speeds: dict[float, list[float]] = {}
        slowed: dict[float, list[float]] = {}
        for figure in figures:
            alone = read_ms(figure.context, figure.context + figure.tokens)
            if alone <= 0.0 or figure.append_ms <= 0.0:
                continue
            middle, factor = figure.context + figure.tokens / 2, max(1.0, figure.decode_ms / step_ms)
            price = figure.append_ms * (1.0 - 1.0 / factor) / alone
            prices.setdefault(middle, []).append(min(MOST_PRICE, max(LEAST_PRICE, price)))
            speeds.setdefault(middle, []).append(min(1.0, max(_SLOWEST, alone / figure.append_ms)))
            slowed.setdefault(middle, []).append(factor)
        self._prices = [(context, min(found)) for context, found in sorted(prices.items())]
        self._speeds, self._slowed = _means(speeds), _means(slowed)

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._prices)

    def ride(self, begin: int, end: int, *, inner: bool) -> Ride:
        """Reading a prompt's tokens from `begin` to `end` beside decodes; as if alone where that is not known.

        Args:
            begin: in tokens from the prompt's beginning.
            end: likewise.
            inner: the decodes are all read by other agents, and may be slowed down more; see `BesideFigure.itl_ratio`.
        """
        if (known := self._known.get((begin, end, inner))) is not None:
            return known
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        found = self._known[begin, end, inner] = self._ride(begin, end, inner)
        return found

    def _ride(self, begin: int, end: int, inner: bool) -> Ride:
        total = lost = 0.0
        for at in range(_STRIDES):
            first, last = begin + (end - begin) * at // _STRIDES, begin + (end - begin) * (at + 1) // _STRIDES
            alone, middle = self._read_ms(first, last), (first + last) / 2
            speed, slowed = self._pace(middle, inner) if self.known else (1.0, 1.0)
            total += alone / speed
            lost += alone / speed * (1.0 - 1.0 / slowed)
        return Ride(total, total / (total - lost) if total > 0.0 else 1.0)

    def _pace(self, context: float, inner: bool) -> tuple[float, float]:
        """Speed as a part of that alone, and by what decodes are slowed down."""
        if not self._paced:
            return within(self._speeds, context), within(self._slowed, context)
        slowed = max(1.01, min(CHEAP, self._paces[-1] if inner else self._paces[0]))
        speed = (1.0 - 1.0 / slowed) / within(self._prices, context)
        if speed <= 1.0:
            return speed, slowed
        return 1.0, 1.0 / (1.0 - within(self._prices, context))  # all of it, and no slower for that


def _means(found: dict[float, list[float]]) -> list[Point]:
    return [(context, fmean(values)) for context, values in sorted(found.items())]


def within(points: Sequence[Point], x: float) -> float:
    """Interpolated between points that rise in x; beyond the ends their values."""
    if x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0]:
        return points[-1][1]
    at = bisect_left(points, (x,))
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
