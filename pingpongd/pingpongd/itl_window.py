"""Time between tokens (ITL) of a group over the latest seconds, for people who look on, and for the log. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from pingpong_bus.log_records import DecodeSteps
from pingpong_bus.messages import ItlSummary, StepCounts, StepKind
from pingpongd.jitter_baseline import quantile_ms
from pingpongd.jitter_judge import Verdict

WINDOW_S: Final = 10
HISTORY_S: Final = 60


class _Counted:
    """Tokens of some seconds."""

    def __init__(self) -> None:
        self.buckets: dict[int, float] = {}
        self.tokens = 0
        self.worst_ms = 0.0

    def add(self, buckets: Mapping[int, float], worst_ms: float) -> None:
        for bucket, count in buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0.0) + count
        self.tokens += int(sum(buckets.values()))
        self.worst_ms = max(self.worst_ms, worst_ms)

    def at(self, share: float) -> float:
        return min(quantile_ms(self.buckets, share), self.worst_ms)


class ItlWindow:
    """Of one group."""

    def __init__(self) -> None:
        self._seconds = deque[tuple[_Counted, int]](maxlen=WINDOW_S)
        self._history = deque[float](maxlen=HISTORY_S)
        self._usual_ms = 0.0
        self._logged_s: float | None = None
        self._kinds: dict[StepKind, _Counted] = {}
        self._late = 0

    def take(self, at_s: float, counts: Sequence[StepCounts], verdict: Verdict) -> None:
        """Take a second."""
        second = _Counted()
        for cell in counts:
            second.add(cell.buckets, cell.worst_ms)
            self._kinds.setdefault(cell.kind, _Counted()).add(cell.buckets, cell.worst_ms)
        self._seconds.append((second, verdict.late))
        self._history.append(round(second.at(0.5), 2))
        self._usual_ms = verdict.usual_ms or self._usual_ms
        self._late += verdict.decode_late
        if self._logged_s is None:
            self._logged_s = at_s - 1.0

    def summary(self) -> ItlSummary:
        """Of the latest seconds."""
        window = _Counted()
        for second, _ in self._seconds:
            window.add(second.buckets, second.worst_ms)
        return ItlSummary(
            tokens=window.tokens,
            p50_ms=round(window.at(0.5), 2),
            p99_ms=round(window.at(0.99), 2),
            worst_ms=round(window.worst_ms, 2),
            late=sum(late for _, late in self._seconds),
            usual_ms=round(self._usual_ms, 2),
            history_ms=list(self._history),
        )

    def steps(self, at_s: float, every_s: float, worker: str, devices: list[str]) -> DecodeSteps | None:
        """The log record of the time since the last one; None where it is not due, or nothing was decoded."""
        if self._logged_s is None or at_s - self._logged_s < every_s - 0.5:  # judgements do not come to the second
            return None
        kinds, late, seconds = self._kinds, self._late, at_s - self._logged_s
        self._kinds, self._late, self._logged_s = {}, 0, at_s
        if not kinds:
            return None
        decode, appends, prompts = (kinds.get(kind, _Counted()) for kind in ("decode", "appends", "prompts"))
        return DecodeSteps(
            worker=worker,
            devices=devices,
            seconds=round(seconds, 2),
            tokens=decode.tokens,
            p50_ms=round(decode.at(0.5), 2),
            p99_ms=round(decode.at(0.99), 2),
            worst_ms=round(decode.worst_ms, 2),
            late=late,
            usual_ms=round(self._usual_ms, 2),
            appends_tokens=appends.tokens,
            appends_p50_ms=round(appends.at(0.5), 2),
            appends_p99_ms=round(appends.at(0.99), 2),
            prompts_tokens=prompts.tokens,
            prompts_p99_ms=round(prompts.at(0.99), 2),
        )
