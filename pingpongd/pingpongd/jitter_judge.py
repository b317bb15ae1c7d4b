"""Whether a group's tokens came late in the latest seconds. Pure: step counts and the usual in, a verdict out.

Four things are trouble: the median is slow for two seconds; too large a part of the tokens is late; a single wait
stalls; work waits and nothing comes at all. What is too slow depends on how much a cell's times scatter and on how many
of them there are, so that one look in a second for years makes no false alarm. Tokens beside appends are held against
what decode-first allows, and trouble with these alone is trouble of its own kind.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from pingpong_bus.messages import StepCounts
from pingpong_bus.step_times import middle_ms, upper_ms
from pingpongd.jitter_baseline import LATE, Baseline, Usual, quantile_ms

Trouble = Literal["median", "late", "stall", "silence", "appends"]

SLOW: Final = 1.3
"""A median of so many times the usual is slow, where times scatter little."""
_SLOWEST_LIMIT = 1.7
"""However much they scatter: twice the usual is always noticed."""
_SIGMAS = 5.0
_MEDIAN_NOISE = 1.57
"""Variance of a median over that of a mean: pi / 2."""
_STILL_SLOW = 0.67
"""Of a degraded group, this part of the distance to the limit is enough for that to go on."""
_IN_A_ROW = 2
_SAMPLE = 3.0
"""Independent times that a sample has at least; a second with fewer is judged with the next."""
_ROW_GAP_S = 6.0
_WINDOW_S = 5.0
"""The time over which late tokens are counted."""
_LATE_SHARE = 0.10
"""Of the tokens, beyond the usual."""
_LATE_SHARE_SPREAD, _SPREAD_S = 0.03, 3
"""Fewer are enough where they are spread over so many seconds: an H200 whose engine core has no core of its own is late
with 3 to 8 % of them in each."""
_LATE_SHARE_ON, _LATE_STEPS_ON = 0.02, 3.0
_STALL_MS, _STALL_RATIO = 100.0, 8.0
_LONG_STALL_MS, _LONG_STALL_RATIO = 200.0, 4.0
_STALL_OVER_WORST = 1.5
"""A stall is beyond so many times the worst of the past."""
_APPENDS_STALL_MS, _APPENDS_STALL_RATIO = 60.0, 4.0
"""Beyond what is allowed beside appends, and as a multiple of it."""
_SILENT_S, _SILENT_STEPS = 1.5, 3.0
_LOOP_STALL_MS = 500.0
"""A worker whose event loop stood still for so long held up whatever it had: also tokens beside prompts, which are not
judged by their own times."""
_ON_TIME_TOKENS = 10
"""So many without appends have to be seen in time, for appends to be what made the others late."""


class Second(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has told of about a second."""

    at_s: float
    """Its end; any clock that only grows."""
    counts: Sequence[StepCounts] = ()
    allowed: float = 1.5
    """What a token beside appends may take, over one without."""
    waiting: int = 0
    """Submissions that the engine holds."""
    silent_s: float = 0.0
    """For how long they have waited and nothing has come; 0 where something has."""
    predicted_s: float = 0.0
    """The longest that the next step should take."""
    loop_late_ms: float = 0.0
    """The latest that the worker's event loop was."""

    @property
    def held_up_ms(self) -> float:
        """How long the worker stood still while it had something to do; 0 where that was not for long."""
        busy = self.waiting > 0 or bool(self.counts)
        return self.loop_late_ms if busy and self.loop_late_ms >= _LOOP_STALL_MS else 0.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a second, and of those before that count with it."""

    troubles: tuple[Trouble, ...] = ()
    """Empty: all came in time."""
    tokens: int = 0
    """Of this second that could be judged."""
    late: int = 0
    """Of them."""
    decode_late: int = 0
    """Of these, those that came while nothing but decodes ran."""
    lost_ms: float = 0.0
    """What they have taken beyond the usual, all answers together; less than 0 where they were faster."""
    p50_ms: float = 0.0
    """The next five are of the latest seconds, of the kind of step that is in trouble."""
    p99_ms: float = 0.0
    worst_ms: float = 0.0
    late_share: float = 0.0
    usual_ms: float = 0.0
    beyond_ms: float = 0.0
    """What the worst single token of this second waited beyond its usual."""
    slowdown: float = 1.0
    """What tokens took in the latest seconds, over what they should."""
    on_time: bool = False
    """Tokens that came while nothing but decodes ran were not late."""
    appends_ratio: float = 0.0
    """Median beside appends over the usual without; 0 where there were none."""
    allowed: float = 1.0
    silent_s: float = 0.0
    guessed: bool = False
    """None of these tokens' cells is known: what is usual was guessed."""


class _Tally:
    """One second's tokens of one kind, held against the usual."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.buckets: dict[int, float] = {}
        self.ratios: list[tuple[float, float]] = []
        """Times over the usual, each with its number of tokens."""
        self.tokens = self.known = self.late = 0
        self.independent = self.expected_late = 0.0
        self.total_ms = self.expected_ms = self.usual_ms = 0.0
        self.room = self.variance = self.pace_variance = 0.0
        """Sums over tokens."""
        self.worst_ms = self.beyond_ms = 0.0
        self.stalled = False

    def add(self, counts: StepCounts, usual: Usual, allowed: float) -> None:
        count = sum(counts.buckets.values())
        reference = usual.ms * allowed
        limit = LATE * reference * usual.room
        for bucket, tokens in counts.buckets.items():
            self.ratios.append((middle_ms(bucket) / reference, tokens))
            if upper_ms(bucket - 1) > limit:
                self.late += tokens
        self.tokens += count
        self.known += count if usual.known else 0
        self.independent += count / counts.decodes
        self.expected_late += usual.late * count
        self.total_ms += counts.total_ms
        self.expected_ms += count * reference
        self.usual_ms += count * usual.ms
        self.room += count * usual.room
        self.variance += count * usual.spread**2
        self.pace_variance += count * usual.pace_spread**2
        self.beyond_ms = max(self.beyond_ms, counts.worst_ms - reference)

    def merge(self, other: _Tally) -> None:
        """Take another one's times in, to be judged as one sample."""
        self.ratios += other.ratios
        for name in ("tokens", "independent", "room", "variance", "pace_variance"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def median(self) -> float:
        """Of the ratios, interpolated within a bucket."""
        left = sum(tokens for _, tokens in self.ratios) / 2
        for ratio, tokens in sorted(self.ratios):
            if tokens >= left:
                return float(ratio * 2.0 ** ((left / tokens - 0.5) / 8))
            left -= tokens
        return 1.0

    def limit(self) -> float:
        """The median at which it is slow."""
        spread = math.sqrt((_MEDIAN_NOISE * self.variance / self.independent + self.pace_variance) / self.tokens)
        return min(_SLOWEST_LIMIT, max(SLOW, math.exp(_SIGMAS * spread))) * self.room / self.tokens


class _Pace:
    """Whether the median of a kind of step is slow."""

    def __init__(self) -> None:
        self._sample: _Tally | None = None
        self._row = 0
        self._judged_at = -math.inf
        self.slow = False
        self.ratio = 0.0

    def take(self, tally: _Tally, *, troubled: bool) -> None:
        if not tally.tokens:
            if tally.at_s - self._judged_at > _ROW_GAP_S:
                self._sample, self._row, self.slow, self.ratio = None, 0, False, 0.0
            elif troubled:
                self.slow = False
            return
        if self._sample is not None and tally.at_s - self._sample.at_s <= _ROW_GAP_S:
            sample = self._sample
            sample.merge(tally)
        else:
            sample = self._sample = _Tally()
            sample.merge(tally)
            sample.at_s = tally.at_s
        if sample.independent < _SAMPLE:
            return
        self._sample = None
        self.ratio = sample.median()
        limit = sample.limit()
        if troubled:
            limit = 1.0 + _STILL_SLOW * (limit - 1.0)
        late_row = tally.at_s - self._judged_at > _ROW_GAP_S
        self._row = 0 if self.ratio < limit else (0 if late_row else self._row) + 1
        self._judged_at = tally.at_s
        self.slow = self._row >= (1 if troubled else _IN_A_ROW)


class Judge:
    """Of one group."""

    def __init__(self) -> None:
        self._seconds = deque[tuple[_Tally, _Tally]](maxlen=64)
        self._pace, self._appends_pace = _Pace(), _Pace()

    def judge(
        self, second: Second, baseline: Baseline, peers: Iterable[Baseline] = (), *, troubled: bool = False
    ) -> Verdict:
        """Judge a second.

        Args:
            second: the latest.
            baseline: the group's own.
            peers: those of groups of the same kind.
            troubled: the group is degraded: less is enough for that to go on than for it to begin.
        """
        peers = list(peers)
        decode, appends = (
            self._tally(second, kind, allowed, baseline, peers)
            for kind, allowed in (("decode", 1.0), ("appends", second.allowed))
        )
        self._seconds.append((decode, appends))
        while self._seconds[0][0].at_s <= second.at_s - _WINDOW_S:
            self._seconds.popleft()
        self._pace.take(decode, troubled=troubled)
        self._appends_pace.take(appends, troubled=troubled)
        troubles: list[Trouble] = []
        if self._pace.slow:
            troubles.append("median")
        if _many_late([decode] if troubled else [tally for tally, _ in self._seconds], troubled=troubled):
            troubles.append("late")
        if decode.stalled or second.held_up_ms:
            troubles.append("stall")
        if second.silent_s >= max(_SILENT_S, _SILENT_STEPS * second.predicted_s):
            troubles.append("silence")
        if self._appends_pace.slow or appends.stalled:
            troubles.append("appends")
        return self._verdict(second, troubles)

    def _tally(
        self, second: Second, kind: str, allowed: float, baseline: Baseline, peers: Sequence[Baseline]
    ) -> _Tally:
        tally = _Tally()
        tally.at_s = second.at_s
        for counts in second.counts:
            if counts.kind != kind or not counts.buckets:
                continue
            for bucket, tokens in counts.buckets.items():
                tally.buckets[bucket] = tally.buckets.get(bucket, 0.0) + tokens
            tally.worst_ms = max(tally.worst_ms, counts.worst_ms)
            usual = baseline.usual(("decode", counts.decodes, counts.context), peers)
            if usual is None:
                continue
            tally.add(counts, usual, allowed)
            past_ms = baseline.worst.get(counts.kind, 0.0) * usual.ms
            reference = usual.ms * usual.room * allowed
            tally.stalled |= _stalls(counts.worst_ms, reference, past_ms, beside_appends=kind == "appends")
        return tally

    def _verdict(self, second: Second, troubles: Sequence[Trouble]) -> Verdict:
        decode, appends = self._seconds[-1]
        beside = "appends" in troubles and len(troubles) == 1
        shown = [pair[1 if beside or not decode.buckets else 0] for pair in self._seconds]
        buckets: dict[int, float] = {}
        for tally in shown:
            for bucket, tokens in tally.buckets.items():
                buckets[bucket] = buckets.get(bucket, 0.0) + tokens
        tokens, worst_ms = sum(tally.tokens for tally in shown), max(tally.worst_ms for tally in shown)
        slowdown = _mean_ratio(tally for pair in self._seconds for tally in pair)
        if troubles:  # they may have begun in the middle of these seconds
            slowdown = max(slowdown, _mean_ratio((decode, appends)), self._pace.ratio if self._pace.slow else 1.0)
        on_time = sum(pair[0].tokens for pair in self._seconds) >= _ON_TIME_TOKENS
        return Verdict(
            troubles=tuple(troubles),
            tokens=decode.tokens + appends.tokens,
            late=decode.late + appends.late,
            decode_late=decode.late,
            lost_ms=decode.total_ms + appends.total_ms - decode.expected_ms - appends.expected_ms,
            p50_ms=min(worst_ms, quantile_ms(buckets, 0.5)),
            p99_ms=min(worst_ms, quantile_ms(buckets, 0.99)),
            worst_ms=max(worst_ms, second.held_up_ms, 1e3 * second.silent_s if "silence" in troubles else 0.0),
            late_share=sum(tally.late for tally in shown) / tokens if tokens else 0.0,
            usual_ms=sum(tally.usual_ms for tally in shown) / tokens if tokens else 0.0,
            beyond_ms=max(decode.beyond_ms, appends.beyond_ms, 1e3 * second.silent_s, second.held_up_ms),
            slowdown=slowdown,
            on_time=on_time and not {"median", "late", "stall", "silence"} & set(troubles),
            appends_ratio=self._appends_pace.ratio * second.allowed,
            allowed=second.allowed,
            silent_s=second.silent_s,
            guessed=tokens > 0 and not any(tally.known for tally in shown),
        )


def _mean_ratio(tallies: Iterable[_Tally]) -> float:
    """What tokens took over what they should, at least 1."""
    total_ms = expected_ms = 0.0
    for tally in tallies:
        total_ms += tally.total_ms
        expected_ms += tally.expected_ms
    return max(1.0, total_ms / expected_ms) if expected_ms else 1.0


def _many_late(tallies: Sequence[_Tally], *, troubled: bool) -> bool:
    """Whether more of these tokens are late than chance would have it."""
    tokens = sum(tally.tokens for tally in tallies)
    late, expected = sum(tally.late for tally in tallies), sum(tally.expected_late for tally in tallies)
    if not tokens:
        return False
    # Answers that decode at once are late together: what counts is how many steps were.
    steps = sum(tally.independent for tally in tallies) / tokens
    if troubled:
        return late * steps >= _LATE_STEPS_ON and (late - expected) / tokens >= _LATE_SHARE_ON
    chance = expected * steps
    beyond = late * steps >= chance + 6.0 * math.sqrt(chance) + 6.0
    spread = sum(tally.late - tally.expected_late >= _LATE_SHARE_ON * tally.tokens > 0 for tally in tallies)
    least = _LATE_SHARE_SPREAD if spread >= _SPREAD_S else _LATE_SHARE
    return beyond and (late - expected) / tokens >= least


def _stalls(ms: float, reference_ms: float, past_ms: float, *, beside_appends: bool) -> bool:
    beyond, ratio = ms - reference_ms, ms / reference_ms
    if ms < _STALL_OVER_WORST * past_ms:
        return False
    if beside_appends and beyond >= _APPENDS_STALL_MS and ratio >= _APPENDS_STALL_RATIO:
        return True
    return (beyond >= _STALL_MS and ratio >= _STALL_RATIO) or (beyond >= _LONG_STALL_MS and ratio >= _LONG_STALL_RATIO)
