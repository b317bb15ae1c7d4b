"""Frames that were refused: counted all, logged at a limited rate."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

_log = structlog.get_logger()
LOG_SECONDS = 10.0
"""At most one line in this time; it says how many went without one."""
_LONGEST_WHY = 500


class Refusals:
    """Counts what one socket refuses.

    Args:
        socket: its name, for the log.
        clock: seconds, only ever forward.

    Attributes:
        count: frames and connections refused since the start.
    """

    def __init__(self, socket: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._socket = socket
        self._clock = clock
        self._logged_at: float | None = None
        self._unlogged = 0

    def add(self, why: str, *, peer: object = None) -> None:
        """One more, and why; `peer` is who sent it, as far as that is known."""
        self.count += 1
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < LOG_SECONDS:
            self._unlogged += 1
            return
        _log.warning(
            "frame_refused", socket=self._socket, why=why[:_LONGEST_WHY], peer=str(peer), suppressed=self._unlogged
        )
        self._logged_at, self._unlogged = now, 0
