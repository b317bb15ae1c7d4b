"""Frames that were refused: counted all, logged at a limited rate."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

LOG_SECONDS = 10.0
_LONGEST_VALUE = 500


class LimitedLog:
    """Log lines that somebody else can cause without end.

    Args:
        event: of each line.
        lines: at most so many in `LOG_SECONDS`; the next one says how many were left out.
        clock: seconds, only ever forward.
    """

    def __init__(self, event: str, *, lines: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = structlog.get_logger()
        self._event = event
        self._lines = lines
        self._clock = clock
        self._since = 0.0
        self._written = 0
        self._suppressed = 0

    def warning(self, **fields: object) -> None:
        """Write a line, or count it as left out; long values are cut."""
        now = self._clock()
        if not self._written or now - self._since >= LOG_SECONDS:
            self._since, self._written = now, 0
        if self._written >= self._lines:
            self._suppressed += 1
            return
        self._written += 1
        short = {name: str(value)[:_LONGEST_VALUE] for name, value in fields.items()}
        self._log.warning(self._event, **short, suppressed=self._suppressed)
        self._suppressed = 0


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
        self._log = LimitedLog("frame_refused", clock=clock)

    def add(self, why: str, *, peer: object = None) -> None:
        """One more, and why; `peer` is who sent it, as far as that is known."""
        self.count += 1
        self._log.warning(socket=self._socket, why=why, peer=peer)
