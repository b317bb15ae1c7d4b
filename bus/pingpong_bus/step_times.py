"""Histograms of times between tokens: log-scale buckets, the same in every process.

A bucket is an eighth of an octave, 9 % wide, so that a ratio of 1.3 between two medians is seen; 0.1 ms to 105 s are
160 buckets, and a histogram of 32-bit counts takes 640 bytes whatever it has counted. Pure.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Final

BUCKETS: Final = 160
_FIRST_MS = 0.1
_PER_OCTAVE = 8


def bucket_of(ms: float) -> int:
    """The bucket of a time: 0 up to 0.1 ms, the last one for all that are longer than the table."""
    if ms <= _FIRST_MS:
        return 0
    return min(BUCKETS - 1, math.ceil(_PER_OCTAVE * math.log2(ms / _FIRST_MS)))


def upper_ms(bucket: int) -> float:
    """The longest time of a bucket, in ms."""
    return float(_FIRST_MS * 2 ** (bucket / _PER_OCTAVE))


def middle_ms(bucket: int) -> float:
    """The time that stands for a bucket: half a bucket, geometrically, below its upper end."""
    return float(_FIRST_MS * 2 ** ((bucket - 0.5) / _PER_OCTAVE))


class StepTimes:
    """One histogram; counts may be taken from and added to others of the same buckets."""

    __slots__ = ("_counts", "total", "worst_ms")

    def __init__(self) -> None:
        self._counts = array("I", bytes(4 * BUCKETS))
        self.total = 0
        """Times counted."""
        self.worst_ms = 0.0

    def add(self, ms: float, count: int = 1) -> None:
        """Count a time so often."""
        self._counts[bucket_of(ms)] += count
        self.total += count
        self.worst_ms = max(self.worst_ms, ms)

    def merge(self, buckets: Mapping[int, int], worst_ms: float = 0.0) -> None:
        """Add the counts of another histogram; buckets beyond the table count as its last."""
        for bucket, count in buckets.items():
            self._counts[min(max(bucket, 0), BUCKETS - 1)] += count
            self.total += count
        self.worst_ms = max(self.worst_ms, worst_ms)

    def buckets(self) -> dict[int, int]:
        """The counts that are not 0, by bucket."""
        return {bucket: count for bucket, count in enumerate(self._counts) if count}

    def quantile_ms(self, share: float) -> float:
        """The time below which this share of all lies, to within a bucket; 0 where none were counted."""
        if not self.total:
            return 0.0
        left = share * self.total
        for bucket, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                return min(middle_ms(bucket), self.worst_ms or math.inf)
        return self.worst_ms
