"""Measures the steps of a vLLM scheduler, teaches their prices, and shows them on the board.

How long a step took is known when its result is in: from the moment it was scheduled, or from the result of the step
before it where that came later, since an engine that plans ahead schedules a step while another one runs.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pingpong_bus.messages import SchedulerState
from pingpong_worker.decode_first import DecodeFirst, Grant, Reason, StepView
from pingpong_worker.step_board import BoardWriter
from pingpong_worker.step_prices import StepKind, StepPrices

_log = logging.getLogger("pingpong_worker")


@dataclass(frozen=True)
class PlannedStep:
    """A step that was scheduled and has not ended."""

    output: Any
    """vLLM's `SchedulerOutput`; it comes back with the result."""
    begun: float
    """Seconds, by a monotonic clock."""
    rows: int
    """Its tokens."""
    work: float
    """The sum of `attention_work` over its requests."""
    kind: StepKind
    append_tokens: int
    """Those of appends among them."""
    admits: bool
    """Whether a request is in a step for the first time."""
    view: StepView
    grant: Grant


_FOR_ITS_PRICE: Final[frozenset[Reason]] = frozenset({"target", "dear"})
"""Why nothing is granted where what rides costs too much."""


class StepLedger:
    """Steps that are under way, and the prices of those that have ended.

    Args:
        sizes: rows that the engine has graphs for; empty: none.
        max_tokens: the most tokens that a step can have.
        board: where to show it; its prices are the first ones. None: nowhere.
    """

    def __init__(self, sizes: Sequence[int], max_tokens: int, board: BoardWriter | None) -> None:
        self._board = board
        self._prices = _first_prices(board, sizes)
        self.policy = DecodeFirst(self._prices, sizes, max_tokens)
        self._planned: deque[PlannedStep] = deque()
        self._ended = -math.inf
        self._steps = self._append_tokens = self._withheld = 0
        self._state: SchedulerState | None = None
        """What the board shows."""

    def prompt_seconds(self, rows: int, work: float) -> float:
        """What a step of so many prompt tokens takes that has nothing beside it; infinite where nothing is known."""
        return self._prices.price(rows, work, "prompts")

    def plan(self, step: PlannedStep) -> None:
        """A step was scheduled."""
        self._planned.append(step)

    def end(self, output: Any, now: float, kv_usage: float = 0.0, kv_kept: float = 0.0) -> None:
        """The result of a step is in.

        Args:
            output: its `SchedulerOutput`; one that was not planned is empty.
            now: when it came, in seconds.
            kv_usage: the part of the KV cache that requests hold from now on, 0 to 1.
            kv_kept: the part that is kept for beginnings of prompts.
        """
        if any(step.output is output for step in self._planned):
            while (step := self._planned.popleft()).output is not output:
                pass  # its result never came
            seconds = now - max(self._ended, step.begun)
            self._show(step, seconds, kv_usage, kv_kept)
            # To take a request in costs the host some milliseconds, once, however much of it the step computes: as
            # much as doubles a small step beside decodes on a GPU. As the price of its size it would forbid that size.
            if step.kind != "beside" or not step.admits:
                self._prices.learn(step.rows, step.work, seconds, step.kind)
            if step.grant.reason in _FOR_ITS_PRICE and step.append_tokens == 0:
                self._prices.pass_over("beside")
        self._ended = now
        before = self._state
        if before is not None and (before.kv_usage, before.kv_kept) != (kv_usage, kv_kept):  # by prompts alone, or none
            self._post(msgspec.structs.replace(before, kv_usage=kv_usage, kv_kept=kv_kept))

    def _show(self, step: PlannedStep, seconds: float, kv_usage: float, kv_kept: float) -> None:
        if step.view.decodes == 0:
            return
        self._steps += 1
        self._append_tokens += step.append_tokens
        self._withheld += step.append_tokens == 0 and step.view.append_tokens > 0
        if self._board is None:
            return
        self._post(
            SchedulerState(
                steps=self._steps,
                step_ms=seconds * 1e3,
                decode_ms=_milliseconds(self.policy.decode_seconds(step.view)),
                target_ms=_milliseconds(self.policy.target_seconds(step.view)),
                budget_tokens=step.grant.tokens,
                reason=step.grant.reason,
                append_tokens=self._append_tokens,
                withheld_steps=self._withheld,
                kv_usage=kv_usage,
                kv_kept=kv_kept,
            )
        )

    def _post(self, state: SchedulerState) -> None:
        self._state = state
        if self._board is not None:
            self._board.post(state, self._prices)


def _milliseconds(seconds: float) -> float:
    """0 where it is not known yet."""
    return seconds * 1e3 if math.isfinite(seconds) else 0.0


def _first_prices(board: BoardWriter | None, sizes: Sequence[int]) -> StepPrices:
    known = board.prices() if board is not None else None
    if known is None:
        return StepPrices(sizes)
    try:
        return StepPrices.from_dict(known, sizes)
    except (TypeError, ValueError) as error:
        _log.warning("the step prices on file make no sense, and are learnt anew: %s", error)
        return StepPrices(sizes)
