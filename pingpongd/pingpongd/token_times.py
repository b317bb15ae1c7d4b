"""How long answers have waited for their tokens since the daemon's start, for `/metrics`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pingpong_bus.step_times import BUCKETS, upper_ms

EDGES: Final = (*range(24, 105, 2), *range(112, 153, 8))
"""Buckets of `step_times` at whose upper ends the metric's buckets end: a quarter of an octave, 19 %, from 0.8 to 819
ms, then octaves to 52 s. They are not vLLM's, which begin at 10 ms, where an H200 takes 8.6: times are counted in the
worker by `step_times`, and to sort them anew would move some to where they were not."""
LABELS: Final = tuple(f"{upper_ms(edge) / 1000:.4g}" for edge in EDGES)
"""The same in seconds, as `le`."""


class TokenTimes:
    """One histogram; its counts only grow, and have no limit."""

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self._sum_ms = 0.0

    def add(self, buckets: Mapping[int, int], total_ms: float) -> None:
        """Take counts by bucket of `step_times`, and the sum of all their times."""
        for bucket, count in buckets.items():
            self._counts[min(max(bucket, 0), BUCKETS - 1)] += count
        self._sum_ms += total_ms

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """The counts up to each of `LABELS` and "+Inf", and the sum in seconds."""
        counts, found, below, edges = list(self._counts), [], 0, dict(zip(EDGES, LABELS, strict=True))
        for bucket, count in enumerate(counts):
            below += count
            if bucket in edges:
                found.append((edges[bucket], float(below)))
        return [*found, ("+Inf", float(below))], self._sum_ms / 1000
