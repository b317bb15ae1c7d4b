"""How many tokens to guess for the next step, if any: where it makes the engine's decodes faster, by what was measured.

A step in which guesses are checked has more rows, and so takes longer; and an engine that plans a step ahead cannot do
so while it guesses, since a guess has to know the token before it. Both together are the *price* of a step with so many
guessed tokens, as a multiple of a plain step: learnt from the time between results, so that all that the host does is
in it. What it brings is the expected number of tokens. Guessing has to bring `MARGIN` more than it costs.

Pure: seconds come from whoever has a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

MARGIN: Final = 1.05
"""Expected tokens over the price, from which on guessing is worth it."""
_LEAST_CHANCE: Final = 0.15
"""What is less likely to be accepted than this is not guessed."""
_MEMORY: Final = 16
"""Steps that a mean goes back."""
_OUTLIER: Final = 3.0
"""No step counts for more than this many times what was expected: a machine may have slept in it."""
_STALE: Final = 512
"""A price that was not seen in so many steps is unknown again, so that nothing is too dear for ever."""
_LOOK_AGAIN: Final = 256
"""Steps with guesses, after which a plain one is taken, to see what it costs now."""
_SURE: Final = 1.5
"""Where guessing brings more than this many times its price no plain step is needed to know."""
_PLANNED_AHEAD: Final = 1.15
"""What planning a step ahead is worth, until it was measured: 9.9 ms in place of 8.6 on an H200."""
_ROW_OF_GRAPHS: Final = 0.004
"""What a row more costs where matrix products are bound by memory, of a plain step."""
_ROW_OF_CORES: Final = 0.05
"""The same on CPU cores."""
_CHOICES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class StepTimes:
    """Prices of steps with guesses, as multiples of plain ones.

    Args:
        ahead: whether the engine plans a step ahead while it does not guess.
        on_cores: whether it computes on CPU cores.
    """

    def __init__(self, *, ahead: bool, on_cores: bool) -> None:
        self._base = _PLANNED_AHEAD if ahead else 1.0
        self._row = _ROW_OF_CORES if on_cores else _ROW_OF_GRAPHS
        self._plain: dict[int, tuple[float, int]] = {}
        """Mean seconds and steps that are in it, by the number of decodes."""
        self._ratios: dict[int, tuple[float, int, int]] = {}
        """Mean multiple, steps in it, and the step when it was last seen, by guessed tokens of the step."""
        self._steps = 0
        self.since_plain = 0
        """Steps with guesses since the last plain one."""

    def learn(self, seconds: float, decodes: int, guessed: int) -> None:
        """A step of decodes alone was taken.

        Args:
            seconds: from the result before to its own.
            decodes: requests in it.
            guessed: tokens that were guessed for it; 0: a plain step.
        """
        if seconds <= 0 or decodes <= 0:
            return
        self._steps += 1
        if guessed == 0:
            self.since_plain = 0
            mean, count = self._plain.get(decodes, (seconds, 0))
            count = min(count + 1, _MEMORY)
            self._plain[decodes] = mean + (min(seconds, _OUTLIER * mean) - mean) / count, count
            return
        self.since_plain += 1
        if (plain := self._plain_seconds(decodes)) is None:
            return
        key = _size(guessed)
        self._ratios = {size: one for size, one in self._ratios.items() if self._is_fresh(one)}
        before, count, _ = self._ratios.get(key, (self._guess(guessed), 0, 0))
        count = min(count + 1, _MEMORY)
        ratio = min(seconds / plain, _OUTLIER * before)
        self._ratios[key] = before + (ratio - before) / count, count, self._steps

    def price(self, guessed: int) -> float:
        """A step with so many guessed tokens, as a multiple of a plain one."""
        known = self._ratios.get(_size(guessed))
        return known[0] if known is not None and self._is_fresh(known) else self._guess(guessed)

    def _guess(self, guessed: int) -> float:
        """For sizes that were not seen: by the nearest that was, and what a row should cost."""
        fresh = [size for size, one in self._ratios.items() if self._is_fresh(one)]
        if not fresh:
            return self._base + self._row * guessed
        nearest = min(fresh, key=lambda size: abs(size - _size(guessed)))
        return max(1.0, self._ratios[nearest][0] + self._row * (guessed - 2.0**nearest))

    def _is_fresh(self, ratio: tuple[float, int, int]) -> bool:
        return self._steps - ratio[2] <= _STALE

    def _plain_seconds(self, decodes: int) -> float | None:
        if not self._plain:
            return None
        return self._plain[min(self._plain, key=lambda known: abs(known - decodes))][0]


def _size(guessed: int) -> int:
    """Guessed tokens of a step by octaves: 1, 2, 3 to 4, 5 to 8 ..."""
    return max(0, math.ceil(math.log2(guessed))) if guessed > 0 else 0


def lengths(times: StepTimes, chances: Sequence[Sequence[float]], decodes: int, most_ratio: float) -> list[int]:
    """How many tokens to guess for each request.

    Args:
        times: what steps cost.
        chances: for each request that may be guessed for, the chance of each guessed token that all up to it are right.
        decodes: requests that decode in the step, these among them.
        most_ratio: how long the step may take, as a multiple of a plain one, for the sake of those that nothing is
            guessed for; infinite where there are none.

    Returns:
        As many numbers as there are requests; all 0 where guessing does not pay now.
    """
    nothing = [0] * len(chances)
    likely = [sum(chance >= _LEAST_CHANCE for chance in one) for one in chances]
    longest = max(likely, default=0)
    if longest == 0:
        return nothing
    best, best_gain = nothing, MARGIN
    for most in (*(choice for choice in _CHOICES if choice < longest), longest):
        taken = [min(most, one) for one in likely]
        price = times.price(sum(taken))
        if price > most_ratio:
            continue
        tokens = decodes + sum(sum(one[:number]) for one, number in zip(chances, taken, strict=True))
        gain = tokens / decodes / price
        if gain > best_gain:
            best, best_gain = taken, gain
    if times.since_plain >= _LOOK_AGAIN and best_gain < _SURE:
        return nothing
    return best
