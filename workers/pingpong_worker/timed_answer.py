"""An answer whose tokens nobody reads but the clock, and what its steps took."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from statistics import fmean
from types import TracebackType

from pingpong_bus.messages import Sampling
from pingpong_worker.engine import Session


class TokenTimes:
    """When the tokens of one answer came, in seconds, rising. An engine may hand over several at once."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._tokens: list[int] = []

    def add(self, at: float, tokens: int) -> None:
        """So many tokens have come."""
        if tokens > 0:
            self._times.append(at)
            self._tokens.append(tokens)

    @property
    def tokens(self) -> int:
        """How many have come."""
        return sum(self._tokens)

    @property
    def first(self) -> float:
        """When the first came; infinite before."""
        return self._times[0] if self._times else math.inf

    @property
    def last(self) -> float:
        """When the last came; minus infinity before the first."""
        return self._times[-1] if self._times else -math.inf

    def within(self, begin: float, end: float) -> TokenTimes:
        """Those that came from `begin` to `end`."""
        found = TokenTimes()
        for at, tokens in zip(self._times, self._tokens, strict=True):
            if begin <= at <= end:
                found.add(at, tokens)
        return found

    def after(self, dropped: int) -> TokenTimes:
        """All but the outputs that held the first `dropped` tokens."""
        before = 0
        for at, tokens in zip(self._times, self._tokens, strict=True):
            if before >= dropped:
                return self.within(at, math.inf)
            before += tokens
        return TokenTimes()

    def steps_ms(self) -> list[float]:
        """What each token has taken; the first only says when the second began."""
        steps: list[float] = []
        for before, at, tokens in zip(self._times, self._times[1:], self._tokens[1:], strict=False):
            steps += [(at - before) * 1e3 / tokens] * tokens
        return steps


class TimedAnswer:
    """A session's answer, read in a task of its own for as long as this is entered. Who opened the session ends it.

    Attributes:
        arrivals: of its tokens, so far.
        begun: when the rest of its prompt was handed over, in seconds.
    """

    def __init__(self, session: Session, ids: Sequence[int], tokens: int) -> None:
        """Args:
        session: where all but the end of the prompt may be computed already.
        ids: the rest of the prompt.
        tokens: the most that are decoded.
        """
        self.arrivals = TokenTimes()
        self.begun = math.inf
        self._session = session
        self._ids = ids
        self._sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TimedAnswer:
        self._task = asyncio.create_task(self._read(), name="timed answer")
        self._task.add_done_callback(lambda _: self._changed.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None  # noqa: S101  entered
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # seen by who waited for it, or moot

    async def until(self, enough: Callable[[TokenTimes], bool]) -> bool:
        """Wait until enough has come; False where the answer ended before.

        Raises:
            EngineError: the engine failed.
        """
        assert self._task is not None  # noqa: S101  entered
        while not enough(self.arrivals):
            if self._task.done():
                self._task.result()
                return enough(self.arrivals)
            self._changed.clear()
            await self._changed.wait()
        return True

    async def whole(self) -> None:
        """Wait for its end; raises as `until`."""
        await self.until(lambda _: False)

    async def _read(self) -> None:
        self.begun = time.monotonic()
        async with aclosing(self._session.finalize(self._ids, self._sampling)) as outputs:
            async for output in outputs:
                self.arrivals.add(time.monotonic(), len(output.ids))
                self._changed.set()


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of them do not exceed; 0 where there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def usual(values: Sequence[float]) -> float:
    """The mean of the middle half of some values, at least one: a machine may have done something else meanwhile."""
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])
