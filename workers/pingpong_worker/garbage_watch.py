"""Times Python's collections of garbage: they hold a process up, and nobody outside can see it."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable


class Collections:
    """Times Python's collections of garbage in this process.

    Attributes:
        total_ms: what they have taken so far.
        tell: called with it after each one; must not raise.
    """

    def __init__(self) -> None:
        self.total_ms = 0.0
        self.tell: Callable[[float], None] = lambda _: None
        self._begun = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """What `gc.callbacks` are called with, before and after each collection."""
        del info
        if phase == "start":
            self._begun = time.perf_counter()
        elif self._begun:  # else it was this one's beginning in the middle of a collection
            self.total_ms += (time.perf_counter() - self._begun) * 1e3
            self._begun = 0.0
            self.tell(self.total_ms)


@functools.cache
def collections_of_this_process() -> Collections:
    """One for the process; it counts from the first call on."""
    watch = Collections()
    gc.callbacks.append(watch)
    return watch
