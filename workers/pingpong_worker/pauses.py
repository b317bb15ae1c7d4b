"""What may hold a process up that nobody outside can see: collections of garbage, and an event loop that is busy."""

from __future__ import annotations

import asyncio
import functools
import gc
import time

_TICK_S = 0.1
"""Between two looks at whether the loop is in time. Ten a second cost it 0.03 % of a core; what holds it up for less
than this is seen in part, or not at all."""


class Collections:
    """Times Python's collections of garbage in this process.

    Attributes:
        total_ms: what they have taken so far.
    """

    def __init__(self) -> None:
        self.total_ms = 0.0
        self._begun = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """What `gc.callbacks` are called with, before and after each collection."""
        del info
        if phase == "start":
            self._begun = time.perf_counter()
        elif self._begun:  # else it was this one's beginning in the middle of a collection
            self.total_ms += (time.perf_counter() - self._begun) * 1e3
            self._begun = 0.0


@functools.cache
def collections_of_this_process() -> Collections:
    """One for the process; it counts from the first call on."""
    watch = Collections()
    gc.callbacks.append(watch)
    return watch


class LoopWatch:
    """How late an event loop comes to what is due; begins at once, in the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worst_s = 0.0
        self._timer = self._begin()

    def take_ms(self) -> float:
        """The latest that it was since the last call, what is late now included."""
        late_s = max(self._worst_s, self._loop.time() - self._timer.when())
        self._worst_s = 0.0
        return max(0.0, late_s) * 1e3

    def stop(self) -> None:
        """End it."""
        self._timer.cancel()

    def _begin(self) -> asyncio.TimerHandle:
        return self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._worst_s = max(self._worst_s, self._loop.time() - self._timer.when())
        self._timer = self._begin()
