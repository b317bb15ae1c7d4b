"""How fast a daemon's workers write, from successive status replies. Pure."""

from __future__ import annotations

from collections import deque

from pingpong_bus.messages import StatusReply

WINDOW_S = 5.0
"""Over which a rate is taken: a worker's counts come once a second."""


class TokenRates:
    """Output tokens a second of each worker, by the daemon's own clock.

    A worker or a daemon that was started anew counts from 0, and so does its rate.
    """

    def __init__(self) -> None:
        self._instance: int | None = None
        self._samples: dict[str, deque[tuple[int | None, float, int]]] = {}

    def add(self, status: StatusReply) -> None:
        """Take in the latest status."""
        if status.pid != self._instance:
            self._instance = status.pid
            self._samples.clear()
        for worker in status.workers:
            samples = self._samples.setdefault(worker.name, deque())
            if samples and (samples[-1][0] != worker.pid or samples[-1][2] > worker.output_tokens):
                samples.clear()
            samples.append((worker.pid, status.uptime_s, worker.output_tokens))
            while len(samples) > 2 and status.uptime_s - samples[1][1] >= WINDOW_S:
                samples.popleft()

    def of(self, worker: str) -> float | None:
        """Tokens a second; None until there are two samples."""
        samples = self._samples.get(worker)
        if not samples or samples[-1][1] <= samples[0][1]:
            return None
        (_, began_s, before), (_, now_s, after) = samples[0], samples[-1]
        return (after - before) / (now_s - began_s)

    @property
    def total(self) -> float | None:
        """Of all workers; None until one is known."""
        known = [rate for name in self._samples if (rate := self.of(name)) is not None]
        return sum(known) if known else None
