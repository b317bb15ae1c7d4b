"""How late an event loop comes to what is due: what holds it up holds every token up."""

from __future__ import annotations

import asyncio
from typing import Final

_TICK_S: Final = 0.1
"""Between two looks. Ten a second cost it 0.03 % of a core; what holds it up for less than this is seen in part, or not
at all."""


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
