"""How late an event loop comes to what is due: what holds it up holds every token up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_TICK_S: Final = 0.1
"""Between two looks while tokens are waited for: of what holds the loop up, at most so much is missed. Ten a second
took 0.1 % of a core, on a machine that had three times as much to do as it has cores."""
_IDLE_TICK_S: Final = 1.0


class LoopWatch:
    """How late an event loop comes to what is due; begins at once, in the running loop.

    Args:
        is_busy: whether anybody waits for what the loop brings.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
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
        return self._loop.call_later(_TICK_S if self._is_busy() else _IDLE_TICK_S, self._tick)

    def _tick(self) -> None:
        self._worst_s = max(self._worst_s, self._loop.time() - self._timer.when())
        self._timer = self._begin()
