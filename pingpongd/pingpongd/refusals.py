"""Frames that were refused: counted all, logged as often as the log's limit for them lets through."""

from __future__ import annotations

import structlog

_log = structlog.get_logger()


class Refusals:
    """Counts what one socket refuses.

    Args:
        socket: its name, for the log.

    Attributes:
        count: frames and connections refused since the start.
    """

    def __init__(self, socket: str) -> None:
        self.count = 0
        self._socket = socket

    def add(self, why: str, *, peer: object = None) -> None:
        """One more, and why; `peer` is who sent it, as far as that is known."""
        self.count += 1
        _log.warning("frame_refused", socket=self._socket, why=why, peer=peer)
