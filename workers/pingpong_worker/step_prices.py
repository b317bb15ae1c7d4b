"""What a step of an engine costs, learnt from the steps that it has taken.

    seconds = g(rows) + b * work

`rows` are the tokens of the step, padded to the next size that the engine has a graph for; `work` is the sum over its
requests of tokens times context (`attention_work`). g is a table, since matrix products cost by tiles and graphs, not
by tokens; b is what a token pays for each token of its context.

There are three such models, by what a step holds (`StepKind`). Decodes alone read their contexts, run as one graph and
are cheap. Prompt tokens beside decodes compute as well, and run in pieces. Prompts alone have their own prices: where
the engine plans no step ahead of them, it launches kernels while the device waits, which the same number of rows beside
a decode does not pay. b is an order of magnitude larger for decodes, which are bound by memory. The models share
nothing.

Each size keeps decayed means of its steps; b is the slope that is left within all sizes together, and g is made to rise
with the rows by pooling neighbours that do not. Between known sizes g is a line, below the smallest one beside decodes
too, from the step of decodes alone; beyond the largest it goes on as steeply as it came. Where it is convex, as matrix
products are, such lines lie above it: what is unknown is rather too dear than too cheap.

Pure: seconds come from whoever has a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

StepKind = Literal["decodes", "beside", "prompts"]
"""What a step holds: decodes alone, prompt tokens beside decodes, or prompt tokens alone."""

_MEMORY = 16
"""Steps that a mean goes back; a size's first ones count alike."""
_OUTLIER = 3.0
"""No step counts for more than this many times its price: a machine may have slept in it."""
_FIRST = 4
"""Among so few steps of a size, one that took less than half their mean replaces them: first runs are slow."""
_STALE: Final[dict[StepKind, int]] = {"decodes": 4096, "beside": 256, "prompts": 4096}
"""A size that was not seen in so many steps of its kind is unknown again, so that nothing stays too dear for ever."""
_PASSED_OVER = 2
"""What was not taken for its price counts as so many steps of its kind: what nobody takes is never measured again, and
a price that was wrong would forbid it for ever."""
_EXACT_ROWS = 16
"""Without graphs: each number of rows has a mean of its own up to here, beyond that an eighth of an octave has."""
_TRUSTED_FROM_FILE = 4
"""Steps that a loaded mean counts for: a few new ones correct it."""
_UNKNOWN_TOKEN = 1 / 16
"""Of a step of decodes alone: what a prompt token beside it costs, until one was seen."""


def attention_work(computed: int, tokens: int) -> float:
    """Sum over `tokens` new tokens of the context of each, itself included, behind `computed` ones."""
    return tokens * computed + tokens * (tokens + 1) / 2


class _Size:
    """Decayed means and central moments of the steps of one size."""

    __slots__ = ("count", "rows", "rr", "rs", "rw", "seconds", "seen", "ss", "work", "ws", "ww")

    def __init__(self) -> None:
        self.seen = 0
        """The model's number of steps when it was last met."""
        self._forget()

    def _forget(self) -> None:
        self.count = 0
        self.rows = self.work = self.seconds = 0.0
        self.rr = self.rw = self.ww = self.rs = self.ws = self.ss = 0.0

    def learn(self, rows: float, work: float, seconds: float) -> None:
        if self.count < _FIRST and seconds < self.seconds / 2:
            self._forget()
        self.count = min(self.count + 1, _MEMORY)
        share = 1 / self.count
        dr, dw, ds = rows - self.rows, work - self.work, seconds - self.seconds
        self.rows += share * dr
        self.work += share * dw
        self.seconds += share * ds
        keep = 1 - share
        self.rr = keep * (self.rr + share * dr * dr)
        self.rw = keep * (self.rw + share * dr * dw)
        self.ww = keep * (self.ww + share * dw * dw)
        self.rs = keep * (self.rs + share * dr * ds)
        self.ws = keep * (self.ws + share * dw * ds)
        self.ss = keep * (self.ss + share * ds * ds)

    @property
    def numbers(self) -> list[float]:
        """What was learnt, for `from_numbers`."""
        return [getattr(self, name) for name in _NUMBERS]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> _Size:
        if len(numbers) != len(_NUMBERS) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"a size has {len(_NUMBERS)} finite numbers")
        size = cls()
        for name, value in zip(_NUMBERS, numbers, strict=True):
            setattr(size, name, value)
        if size.count < 1 or size.seconds <= 0 or size.rows <= 0:
            raise ValueError("a size's count, rows and seconds are positive")
        size.count = min(int(size.count), _TRUSTED_FROM_FILE)
        return size


_NUMBERS = tuple(name for name in _Size.__slots__ if name != "seen")


class _Model:
    """g and b of one kind of step.

    Args:
        stale: steps after which a size that was not seen is unknown again.
    """

    def __init__(self, stale: int) -> None:
        self._stale = stale
        self.sizes: dict[int, _Size] = {}
        self.steps = 0
        self._curve: tuple[list[float], list[float], float] | None = None

    def learn(self, key: int, rows: float, work: float, seconds: float) -> None:
        size = self.sizes.setdefault(key, _Size())
        size.learn(rows, work, seconds)
        size.seen = self.steps + 1
        self._curve = None
        self.age(1)

    def age(self, steps: int) -> None:
        """So many steps have passed; what is stale is forgotten now and then."""
        before, self.steps = self.steps, self.steps + steps
        if before // _MEMORY != self.steps // _MEMORY:
            kept = {key: one for key, one in self.sizes.items() if self.steps - one.seen < self._stale}
            if len(kept) < len(self.sizes):
                self.sizes, self._curve = kept, None

    @property
    def curve(self) -> tuple[list[float], list[float], float]:
        """Rows in rising order, g in seconds for each (rising too), and b in seconds."""
        if self._curve is None:
            slope = self._slope()
            sizes = sorted(self.sizes.values(), key=lambda size: size.rows)
            levels = _rising([(max(0.0, size.seconds - slope * size.work), size.count) for size in sizes])
            self._curve = [size.rows for size in sizes], levels, slope
        return self._curve

    def _slope(self) -> float:
        """Least squares within the sizes, in common, beside a slope over the rows where a size holds several.

        It is shrunk by what its standard error leaves of it, and never so large that a step would cost less than
        nothing without its work.
        """
        rr = rw = ww = rs = ws = ss = 0.0
        for size in self.sizes.values():
            count = size.count
            rr, rw, ww = rr + count * size.rr, rw + count * size.rw, ww + count * size.ww
            rs, ws, ss = rs + count * size.rs, ws + count * size.ws, ss + count * size.ss
        if rr > 0.0:  # what the rows explain is not the work's doing
            ww, ws, ss = ww - rw * rw / rr, ws - rw * rs / rr, ss - rs * rs / rr
        if ww <= 1e-9 or ws <= 0.0:
            return 0.0
        slope = ws / ww
        steps = sum(size.count - 1 for size in self.sizes.values())
        error = max(0.0, ss - slope * ws) / max(1, steps - 2) / ww
        slope *= max(0.0, 1 - error / slope**2)
        most = min((size.seconds / size.work for size in self.sizes.values() if size.work > 0), default=0.0)
        return min(slope, most)


class StepPrices:
    """Prices of an engine's steps.

    Args:
        sizes: rows that the engine has graphs for, in any order; a step is padded to the next one. Empty: none.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self._graphs = sorted(set(sizes))
        self._models = {kind: _Model(stale) for kind, stale in _STALE.items()}

    def reach(self, kind: StepKind) -> int:
        """The largest known size of such a step, in rows; 0 where none was seen."""
        rows, _, _ = self._models[kind].curve
        return math.floor(rows[-1]) if rows else 0

    def learn(self, rows: int, work: float, seconds: float, kind: StepKind) -> None:
        """A step was taken.

        Args:
            rows: its tokens.
            work: the sum of `attention_work` over its requests.
            seconds: how long it took; what is not positive is no measurement, and ignored.
            kind: what it held.
        """
        if seconds <= 0.0 or rows <= 0:
            return
        known = self.price(rows, work, kind)
        model = self._models[kind]
        key = self._key(rows)
        if key in model.sizes:
            seconds = min(seconds, _OUTLIER * known)
        model.learn(key, self._padded(rows), work, seconds)

    def pass_over(self, kind: StepKind) -> None:
        """A step of this kind was wanted, and not taken for its price."""
        self._models[kind].age(_PASSED_OVER)

    def price(self, rows: int, work: float, kind: StepKind) -> float:
        """Seconds that such a step should take; infinite where nothing is known that tells of it.

        It rises with the rows and with the work.
        """
        at = self._padded(rows)
        known, levels, slope = self._models[kind].curve
        if kind == "decodes":
            return _between(known, levels, at) + slope * work if known else math.inf
        alone, alone_levels, _ = self._models["decodes"].curve
        if kind == "beside" and alone:
            first, base = alone[0], alone_levels[0]
            if not known:
                return base * (1 + max(0.0, at - first) * _UNKNOWN_TOKEN)
            if first < known[0]:
                known, levels = [first, *known], [min(base, levels[0]), *levels]
        elif not known:
            return math.inf
        else:
            known, levels = [0.0, *known], [0.0, *levels]
        value = _between(known, levels, at)
        if at > known[-1] > known[0]:
            rise = (levels[-1] - levels[0]) / (known[-1] - known[0])
            rise = max(rise, (levels[-1] - levels[-2]) / max(1.0, known[-1] - known[-2]))
            value += rise * (at - known[-1])
        return value + slope * work

    def to_dict(self) -> dict[str, Any]:
        """What was learnt, as plain numbers, for `from_dict`."""
        steps: dict[str, Any] = {
            kind: [[key, *size.numbers] for key, size in sorted(model.sizes.items())]
            for kind, model in self._models.items()
        }
        return {"graphs": self._graphs, **steps}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], sizes: Sequence[int] = ()) -> StepPrices:
        """Prices from `to_dict`; fresh ones where they were learnt with other graphs.

        Raises:
            TypeError, ValueError: `data` is nothing that `to_dict` gave.
        """
        prices = cls(sizes)
        if data.get("graphs") != prices._graphs:
            return prices
        for kind in get_args(StepKind):
            rows = data.get(kind)
            if not isinstance(rows, list):
                raise TypeError(f'the prices lack a list "{kind}"')
            for key, *numbers in rows:
                prices._models[kind].sizes[int(key)] = _Size.from_numbers(numbers)
        return prices

    def _padded(self, rows: int) -> float:
        at = bisect_left(self._graphs, rows)
        return float(self._graphs[at] if at < len(self._graphs) else rows)

    def _key(self, rows: int) -> int:
        """Of the size that such a step belongs to."""
        if self._graphs and rows <= self._graphs[-1]:
            return int(self._padded(rows))
        if rows <= _EXACT_ROWS:
            return rows
        return -math.floor(8 * math.log2(rows))


def _rising(points: Sequence[tuple[float, int]]) -> list[float]:
    """Values made to rise by taking the mean of neighbours that do not (pool adjacent violators), by weight."""
    pools: list[tuple[float, int, int]] = []
    for value, weight in points:
        length = 1
        while pools and pools[-1][0] > value:
            before, other, more = pools.pop()
            value = (before * other + value * weight) / (other + weight)
            weight, length = weight + other, length + more
        pools.append((value, weight, length))
    return [value for value, _, length in pools for _ in range(length)]


def _between(known: Sequence[float], levels: Sequence[float], at: float) -> float:
    """The level at `at`, on lines between the known ones; level beyond both ends."""
    right = bisect_left(known, at)
    if right == 0:
        return levels[0]
    if right == len(known):
        return levels[-1]
    share = (at - known[right - 1]) / (known[right] - known[right - 1])
    return levels[right - 1] + share * (levels[right] - levels[right - 1])
