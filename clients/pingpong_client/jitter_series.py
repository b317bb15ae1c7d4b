"""How steadily one group decoded over time, in bounded memory: where there are too many points, neighbours are joined.

Pure. A log line is about some ten seconds; a joined point keeps what can be had: the tokens' median over the lines'
medians, and the highest 99th percentile and worst.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from pingpong_bus.log_records import DecodeSteps

MOST_POINTS: Final = 480
_WIDER: Final = 1.25
"""A point's time, at first, to that of a log line: no point between two lines is empty because one came late."""
_KEPT_MEDIANS: Final = 16
"""Of the lines that are joined to a point."""
_KEPT_OF_ALL: Final = 500
_LATEST_S: Final = 1e11
"""Seconds since 1970 in the year 5138: a later time is no time."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Some seconds of decoding. Times between two tokens of an answer, while nothing but decodes ran."""

    at: float
    """Where it begins: seconds since 1970, UTC."""
    seconds: float
    """To where the next one would begin."""
    tokens: int
    p50_ms: float
    p99_ms: float
    worst_ms: float
    late: int
    usual_ms: float
    """0: not known."""
    appends_tokens: int
    appends_p99_ms: float


class _Weighed:
    """Values, each of so many tokens, for their median; neighbours are joined where there are many."""

    __slots__ = ("_most", "tokens")

    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens: dict[float, int] = {}
        """By value."""

    def add(self, tokens: Mapping[float, int]) -> None:
        for value, count in tokens.items():
            if count:
                self.tokens[value] = self.tokens.get(value, 0) + count
        if len(self.tokens) > 2 * self._most:
            self.tokens = _thinned(self.tokens, self._most)

    @property
    def median(self) -> float:
        return _median(self.tokens)


class _Sums:
    """A point that grows."""

    __slots__ = ("appends_p99_ms", "appends_tokens", "late", "medians", "p99_ms", "tokens", "usual_ms", "worst_ms")

    def __init__(self) -> None:
        self.medians = _Weighed(_KEPT_MEDIANS)
        self.tokens = self.late = self.appends_tokens = 0
        self.p99_ms = self.worst_ms = self.usual_ms = self.appends_p99_ms = 0.0

    def add(self, steps: DecodeSteps) -> None:
        self._count(steps)
        self.medians.add({steps.p50_ms: steps.tokens})

    def join(self, later: _Sums) -> None:
        self._count(later)
        self.medians.add(later.medians.tokens)

    def _count(self, more: DecodeSteps | _Sums) -> None:
        self.tokens += more.tokens
        self.late += more.late
        self.p99_ms = max(self.p99_ms, more.p99_ms)
        self.worst_ms = max(self.worst_ms, more.worst_ms)
        self.usual_ms = more.usual_ms or self.usual_ms
        self.appends_tokens += more.appends_tokens
        self.appends_p99_ms = max(self.appends_p99_ms, more.appends_p99_ms)


class Series:
    """One group's points."""

    def __init__(self) -> None:
        self._width_s = 0.0
        """By the first line."""
        self._points: dict[int, _Sums] = {}
        self._medians, self._p99s = _Weighed(_KEPT_OF_ALL), _Weighed(_KEPT_OF_ALL)
        self.tokens = self.late = self.appends_tokens = 0
        self.worst_ms = self.usual_ms = 0.0

    def add(self, at: float, steps: DecodeSteps) -> None:
        """Add what a line says that was written at `at`: it is about the seconds before."""
        middle = at - steps.seconds / 2
        if not 0 <= middle < _LATEST_S:
            return
        self._width_s = self._width_s or max(1.0, _WIDER * steps.seconds)
        self._points.setdefault(int(middle // self._width_s), _Sums()).add(steps)
        while len(self._points) > MOST_POINTS:
            self._join()
        self.tokens += steps.tokens
        self.late += steps.late
        self.appends_tokens += steps.appends_tokens
        self._medians.add({steps.p50_ms: steps.tokens})
        self._p99s.add({steps.p99_ms: steps.tokens})
        self.worst_ms = max(self.worst_ms, steps.worst_ms)
        self.usual_ms = steps.usual_ms or self.usual_ms

    @property
    def p50_ms(self) -> float:
        """The tokens' median over the lines' medians."""
        return self._medians.median

    @property
    def p99_ms(self) -> float:
        """The tokens' median over the lines' 99th percentiles: the 99th percentile at most times."""
        return self._p99s.median

    def points(self) -> Iterator[Point]:
        """The points in order of time."""
        for number, sums in sorted(self._points.items()):
            yield Point(
                at=number * self._width_s,
                seconds=self._width_s,
                tokens=sums.tokens,
                p50_ms=sums.medians.median,
                p99_ms=sums.p99_ms,
                worst_ms=sums.worst_ms,
                late=sums.late,
                usual_ms=sums.usual_ms,
                appends_tokens=sums.appends_tokens,
                appends_p99_ms=sums.appends_p99_ms,
            )

    def _join(self) -> None:
        self._width_s *= 2
        joined: dict[int, _Sums] = {}
        for number, sums in sorted(self._points.items()):
            before = joined.setdefault(number // 2, sums)
            if before is not sums:
                before.join(sums)
        self._points = joined


def _median(tokens: Mapping[float, int]) -> float:
    """The median of values of which each counts so often."""
    left = sum(tokens.values()) / 2
    for value, count in sorted(tokens.items()):
        left -= count
        if left <= 0:
            return value
    return 0.0


def _thinned(tokens: Mapping[float, int], kept: int) -> dict[float, int]:
    """The same in fewer values: neighbours become the median of them."""
    ordered = sorted(tokens.items())
    size = -(-len(ordered) // kept)
    parts = [dict(ordered[start : start + size]) for start in range(0, len(ordered), size)]
    return {_median(part): sum(part.values()) for part in parts}
