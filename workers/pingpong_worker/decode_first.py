"""How many tokens of appends a step may carry beside decodes.

An append is prefilled ahead for an answer that is not asked for yet; a decode is somebody's next token. So a step with
decodes takes the most append tokens with which its price stays within the target of what decodes: the ratio to the same
step without appends, or the time, whichever is tighter. Sizes are those that the engine has graphs for, since a step of
any other size costs as much as the next larger one.

Rules, the first that holds:

1. Nothing is waiting to be appended: nothing is granted ("no appends").
2. Appends have been granted nothing for `PATIENCE` steps in a row: they get what the target allows, and where that is
   nothing, `LEAST_TOKENS` ("starved"). So of any PATIENCE + 1 steps with appends waiting one computes some, whatever
   else is wanted, and a step costs at most its target, or what LEAST_TOKENS cost (on a grid, or with Mamba layers, a
   whole cell or block).
3. A prompt is wanted for its answer now: nothing beside it ("finalize").
4. Nothing decodes: all that fits the engine's budget ("full speed").
5. The step without appends has no price yet: nothing ("unpriced"). After `MEASURE` steps with appends beside decodes
   one goes without them, to see what that price is now ("measuring").
6. Prices of what was never tried are guesses, so a step goes only a little beyond the largest size that was seen beside
   decodes; but while the target bears more than that, it does go beyond ("exploring").
7. Of the sizes that are known and within the target the one with which the appends as a whole cost the decodes least
   ("target"; "all" where that is everything): by the steps that carry them, and by the prefill at full speed of what is
   not through when the first of what decodes ends. The matrices of a step cost by tiles, so that a tile that is full is
   cheap and the first token of the next one dear.
8. No size whose tokens delay the decodes by clearly more than a prefill at full speed would take for them: that is
   cheaper later ("dear", where no size is left). Nor any beyond the target ("target").

Pure but for two counts; knows neither the engine nor a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, Literal, Protocol

import msgspec

from pingpong_worker.step_prices import StepKind, attention_work

PATIENCE: Final = 128
"""Steps in which waiting appends may be granted nothing: less than one in a hundred passes its target for them."""
LEAST_TOKENS: Final = 16
"""What they are granted then."""
MEASURE: Final = 32
"""Steps with appends beside decodes, between two without."""
_FURTHER = 1.25
"""How far beyond the largest known size a step may go, in rows; to the next graph in any case."""
_NEW = 1.1
"""Beyond the largest known size by more than this, a step teaches something."""
_FIRST_TOKENS = 16
"""The same, where nothing was seen beside decodes yet."""
_DEAR = 2.0
"""Of a prefill's own price: what is clearly more. A token that rides is one less to wait for when the upstream ends, so
that somewhat more than its price is well spent."""
_NOTABLY = 0.8
"""Of a size, the next smaller one that is looked at, where any size goes: no graphs, or more decodes than they hold."""
_ALIKE = 1.02
"""Costs that differ by no more than this are alike: the larger size is taken."""
_USUAL_STEPS = 128
"""Decodes are taken to go on for so many steps where their end is not known."""

Reason = Literal[
    "no appends", "starved", "finalize", "full speed", "unpriced", "measuring", "all", "target", "exploring", "dear"
]


class StepView(msgspec.Struct, frozen=True):
    """What the next step could hold."""

    decodes: int
    """Rows of requests that decode."""
    decode_work: float
    """The sum of `attention_work` over them, which is near that of their contexts."""
    target_ratio: float
    """How long the step may take, as a multiple of the one without appends: the least of those that decode."""
    target_ms: float | None
    """The same as a time: the least that is given."""
    append_tokens: int
    """Prompt tokens of all appends that are not computed."""
    append_context: int
    """Tokens already computed of the first append."""
    finalizes_wait: bool
    """Whether a prompt that is no append waits to be computed, or is being computed."""
    starved_steps: int
    """Steps in a row, up to now, in which appends waited and were granted nothing."""
    steps_left: int | None = None
    """Steps after which the first of what decodes has written all that it may; None where that is not known."""


class Grant(msgspec.Struct, frozen=True):
    """How many append tokens a step may carry, and why so many."""

    tokens: int
    reason: Reason


class Prices(Protocol):
    """What steps cost: `StepPrices`, or a model that knows."""

    def reach(self, kind: StepKind) -> int:
        """The largest known size of such a step, in rows; 0 where none is."""
        ...

    def price(self, rows: int, work: float, kind: StepKind) -> float:
        """Seconds; see `StepPrices.price`."""
        ...


class DecodeFirst:
    """The policy of one engine.

    Args:
        prices: what its steps cost; whoever measures them teaches it.
        sizes: rows that the engine has graphs for; empty: none.
        max_tokens: the most tokens that a step can have.
    """

    def __init__(self, prices: Prices, sizes: Sequence[int], max_tokens: int) -> None:
        self._prices = prices
        self._sizes = sorted(set(sizes))
        self._max_tokens = max_tokens
        self._unmeasured = 0

    def decode_seconds(self, view: StepView) -> float:
        """The price of the step without appends; infinite where it is unknown."""
        return self._prices.price(view.decodes, view.decode_work, "decodes")

    def target_seconds(self, view: StepView) -> float:
        """How long the step may take; infinite where the price of its decodes is unknown and no time is given."""
        target = view.target_ratio * self.decode_seconds(view)
        return target if view.target_ms is None else min(target, view.target_ms / 1e3)

    def grant(self, view: StepView) -> Grant:
        """What the step may carry; at most its `append_tokens`, and at most `max_tokens` with its decodes."""
        grant = self._grant(view)
        if view.decodes and view.append_tokens > 0:
            self._unmeasured = self._unmeasured + 1 if grant.tokens else 0
        return grant

    def _grant(self, view: StepView) -> Grant:
        wanted = min(view.append_tokens, self._max_tokens - view.decodes)
        if wanted <= 0:
            return Grant(0, "no appends")
        if view.starved_steps >= PATIENCE:
            allowed = self._within_target(view, wanted)[0] if view.decodes else 0
            return Grant(allowed or min(LEAST_TOKENS, wanted), "starved")
        if view.finalizes_wait:
            return Grant(0, "finalize")
        if view.decodes == 0:
            return Grant(wanted, "full speed")
        if math.isinf(self.decode_seconds(view)):
            return Grant(0, "unpriced")
        if self._unmeasured >= MEASURE:
            return Grant(0, "measuring")
        return Grant(*self._within_target(view, wanted))

    def _within_target(self, view: StepView, wanted: int) -> tuple[int, Reason]:
        """The most tokens that may ride: within the target, not too far from what was tried, and not dear."""
        target = self.target_seconds(view)
        if math.isinf(target):
            return 0, "unpriced"
        choices = self._choices(view.decodes, wanted)
        low, high = 0, len(choices)  # choices[:low] are within the target, choices[high:] are not
        while low < high:
            middle = (low + high) // 2
            if self._seconds_beside(view, choices[middle]) <= target:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return 0, "target"
        most = self._reach(view.decodes)
        tokens = choices[max(0, min(low, bisect_right(choices, most)) - 1)]
        if view.decodes + tokens > _NEW * self._prices.reach("beside"):
            return tokens, "exploring"
        return self._cheapest(view, choices[:low])

    def _cheapest(self, view: StepView, choices: Sequence[int]) -> tuple[int, Reason]:
        """The size within the target with which the appends cost least, in all the steps that they take."""
        alone, own = self.decode_seconds(view), self._own_seconds(view)
        looked_at = _falling(choices[-1]) if isinstance(choices, range) else reversed(choices)
        extras = [(tokens, max(0.0, self._seconds_beside(view, tokens) - alone)) for tokens in looked_at]
        extras = [(tokens, extra) for tokens, extra in extras if extra <= _DEAR * own * tokens]
        if not extras:
            return 0, "dear"
        steps = _USUAL_STEPS if view.steps_left is None else max(1, view.steps_left)

        def cost(tokens: int, extra: float) -> float:
            left = view.append_tokens - steps * tokens
            return steps * extra + left * own if left > 0 else view.append_tokens / tokens * extra

        costs = [(tokens, cost(tokens, extra)) for tokens, extra in extras]
        least = min(costs, key=lambda pair: pair[1])[1]
        best = next(tokens for tokens, all_of_it in costs if all_of_it <= _ALIKE * least)
        return best, "all" if best == view.append_tokens else "target"

    def _choices(self, decodes: int, wanted: int) -> Sequence[int]:
        """Numbers of append tokens that make good use of a step, rising; the last one need not fill its graph."""
        if not self._sizes or decodes >= self._sizes[-1]:
            return range(1, wanted + 1)
        wanted = min(wanted, self._sizes[-1] - decodes)
        return [*(size - decodes for size in self._sizes if decodes < size < decodes + wanted), wanted]

    def _reach(self, decodes: int) -> int:
        """The most append tokens that may be tried, by what was tried."""
        known = self._prices.reach("beside")
        if known == 0:
            return _FIRST_TOKENS
        further = max(known + 1, int(known * _FURTHER))
        further = max(further, next((size for size in self._sizes if size > known), 0))
        return max(further - decodes, 1)

    def _seconds_beside(self, view: StepView, tokens: int) -> float:
        work = view.decode_work + attention_work(view.append_context, tokens)
        return self._prices.price(view.decodes + tokens, work, "beside")

    def _own_seconds(self, view: StepView) -> float:
        """What a token takes in a prefill at full speed, by the largest one that was seen; infinite where none was."""
        full = min(self._prices.reach("prompts"), self._max_tokens)
        if full == 0:
            return math.inf
        return self._prices.price(full, attention_work(view.append_context, full), "prompts") / full


def _falling(tokens: int) -> Iterator[int]:
    """Sizes from `tokens` down to 1, each notably smaller than the one before."""
    while tokens > 0:
        yield tokens
        tokens = int(_NOTABLY * tokens)
