"""Requests on their way through the simulated engine's host: they have come, and no step can have them yet.

Pure: the caller says what time it is, in seconds.
"""

from __future__ import annotations

import heapq

from pingpong_worker.simulated_messages import Chunk
from pingpong_worker.simulated_timing import TimingModel


class Arrivals:
    """Chunks that have come and that no step can take yet."""

    def __init__(self, timing: TimingModel) -> None:
        self._timing = timing
        self._chunks: list[tuple[float, int, Chunk]] = []
        self._count = 0
        self._latest: dict[str, float] = {}
        """When the last chunk on its way of each request is due: those of one request keep their order."""

    def add(self, chunk: Chunk, now: float) -> None:
        """A chunk has come."""
        due = max(now + self._timing.admission_s(len(chunk.ids)), self._latest.get(chunk.request, 0.0))
        self._latest[chunk.request] = due
        self._count += 1
        heapq.heappush(self._chunks, (due, self._count, chunk))

    def take(self, now: float) -> list[Chunk]:
        """Those that are through by now, in the order in which they got through."""
        found = []
        while self._chunks and self._chunks[0][0] <= now:
            due, _, chunk = heapq.heappop(self._chunks)
            found.append(chunk)
            if self._latest.get(chunk.request) == due:
                del self._latest[chunk.request]
        return found

    def drop(self, request: str) -> None:
        """A request is aborted."""
        if self._latest.pop(request, None) is not None:
            self._chunks = [entry for entry in self._chunks if entry[2].request != request]
            heapq.heapify(self._chunks)

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next one is through; None where none is on its way."""
        return max(0.0, self._chunks[0][0] - now) if self._chunks else None
