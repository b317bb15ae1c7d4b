"""One group under the jitter watchdog: what its worker tells, second by second, up to records and its health. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from pingpong_bus.log_records import Record
from pingpong_bus.messages import (
    DeviceState,
    EngineFigures,
    GroupHealth,
    Heartbeat,
    HostState,
    JitterCause,
    StepCounts,
)
from pingpongd import jitter_episodes
from pingpongd.jitter_baseline import Baseline
from pingpongd.jitter_episodes import GroupState, Named, Tick
from pingpongd.jitter_evidence import Looks
from pingpongd.jitter_judge import Judge, Second, Verdict
from pingpongd.jitter_rules import cause_of

_LAG = 5
"""Seconds are learnt from when so many more have shown no trouble: its first ones are not taken for usual."""
_MISSED_BEATS = 2.5
"""A worker in which work waits is silent after so many intervals without a heartbeat."""
_LONGEST_GAP_BEATS = 2.0
"""What the time between two beats counts at most of silence, as for the watchdog."""
_MOST_ALLOWED = 10.0
_IN_FORCE: Final[frozenset[JitterCause]] = frozenset({"thermal_throttle", "foreign_process"})
"""Causes that can be seen to go on where the group itself does nothing."""


class _Told(msgspec.Struct):
    """What heartbeats have said since the last judgement."""

    counts: list[StepCounts] = []
    beats: int = 0
    silent_s: float = 0.0
    """Work has waited, and no step has come."""
    predicted_s: float = 0.0
    gc_worker_ms: float = 0.0
    gc_engine_ms: float = 0.0
    loop_late_ms: float = 0.0


class _Healthy(msgspec.Struct, frozen=True):
    """A second to be learnt from if no trouble follows."""

    counts: Sequence[StepCounts]
    look: tuple[HostState, Sequence[DeviceState]] | None


class JitterGroup:
    """Of one group, through all starts of its worker."""

    def __init__(self, named: Named) -> None:
        """Args:
        named: whose it is.
        """
        self.named = named
        self.baseline = Baseline()
        self.looks = Looks()
        self.state = GroupState()
        self.verdict = Verdict()
        """Of the latest second."""
        self.second = Second(at_s=0.0)
        """What it was judged by."""
        self.figures: EngineFigures | None = None
        self.judged_s: float | None = None
        """When it was last."""
        self._judge = Judge()
        self._told = _Told()
        self._last: Heartbeat | None = None
        self._heard_s = 0.0
        self._silent_s = 0.0
        self._allowed = deque[float](maxlen=3)
        self._look: tuple[HostState, Sequence[DeviceState]] | None = None
        self._healthy = deque[_Healthy]()

    def begin(self) -> None:
        """A new worker: what is usual stays, for its devices are the same; what was told is void."""
        self._judge, self._told, self._last, self._silent_s = Judge(), _Told(), None, 0.0
        self._allowed.clear()
        self._healthy.clear()
        self._look = None
        self.looks.forget_processes()
        self.verdict = Verdict()

    def measured(self, figures: EngineFigures | None) -> None:
        """The engine was measured, or measured anew."""
        self.figures = figures
        self.baseline.measured(figures)

    def beat(self, message: Heartbeat, at_s: float, heartbeat_s: float) -> None:
        """Take a heartbeat that came at `at_s`, of a worker that was told to send one every `heartbeat_s`."""
        told, last = self._told, self._last
        told.beats += 1
        told.counts = [*told.counts, *message.step_counts]
        gap_s = 0.0
        if last is not None:
            gap_s = min(_LONGEST_GAP_BEATS * heartbeat_s, max(0.0, (message.at_ns - last.at_ns) / 1e9))
            told.gc_worker_ms += max(0.0, message.gc_ms - last.gc_ms)
            if last.scheduler is not None and message.scheduler is not None:  # else it is all since the engine's start
                told.gc_engine_ms += max(0.0, message.scheduler.gc_ms - last.scheduler.gc_ms)
        waited = last is not None and last.waiting > 0 and message.waiting > 0
        still = waited and last is not None and message.steps == last.steps
        self._silent_s = self._silent_s + gap_s if still else 0.0
        told.silent_s = self._silent_s
        told.predicted_s = max(told.predicted_s, message.predicted_step_ms / 1e3)
        told.loop_late_ms = max(told.loop_late_ms, message.loop_late_ms)
        scheduler = message.scheduler
        if scheduler is not None and scheduler.decode_ms > 0 and scheduler.target_ms > 0:
            self._allowed.append(min(_MOST_ALLOWED, scheduler.target_ms / scheduler.decode_ms))
        self._last, self._heard_s = message, at_s

    def look(self, host: HostState, gpus: Sequence[DeviceState]) -> None:
        """Take a look of the probes."""
        self._look = host, gpus
        self.looks.look(host, gpus)

    def judge(
        self,
        at_s: float,
        *,
        heartbeat_s: float,
        allowed: float,
        quiet_s: float,
        chains: Sequence[str] = (),
        peers: Sequence[JitterGroup] = (),
    ) -> list[Record]:
        """Judge the time since the last judgement.

        Args:
            at_s: now.
            heartbeat_s: what the worker was told.
            allowed: what a token beside appends may take at least, over one without.
            quiet_s: after which an episode is over.
            chains: ids of those with hops on the group.
            peers: groups of the same kind.

        Returns:
            What there is to log.
        """
        told, self._told = self._told, _Told()
        last, silent_s = self._last, told.silent_s
        waiting = last.waiting if last is not None else 0
        if not told.beats and waiting and at_s - self._heard_s >= _MISSED_BEATS * heartbeat_s:
            silent_s = self._silent_s + at_s - self._heard_s
        if told.beats:
            self.looks.process(told.gc_worker_ms, told.gc_engine_ms, told.loop_late_ms)
        second = Second(
            at_s=at_s,
            counts=told.counts,
            allowed=max(allowed, *self._allowed, 1.0),
            waiting=waiting,
            silent_s=silent_s,
            predicted_s=max(told.predicted_s, last.predicted_step_ms / 1e3 if last is not None else 0.0),
            loop_late_ms=told.loop_late_ms,
        )
        self.second = second
        baselines = [peer.baseline for peer in peers]
        # One that recovers is judged as a healthy one: what is little slower than usual would hold it for ever.
        troubled = self.state.health == "degraded"
        verdict = self.verdict = self._judge.judge(second, self.baseline, baselines, troubled=troubled)
        late = sum(bool(peer.verdict.troubles) for peer in peers)
        idle = self.state.episode is not None and not verdict.tokens and not waiting
        finding = None
        if verdict.troubles or idle:
            finding = cause_of(self.looks.evidence(verdict, len(peers), late))
        tick = Tick(
            at_s=at_s,
            verdict=verdict,
            finding=finding,
            chains=chains,
            in_force=idle and finding is not None and finding.cause in _IN_FORCE,
            quiet_s=quiet_s,
        )
        self.judged_s = at_s
        self.state, records = jitter_episodes.step(self.state, tick, self.named)
        if jitter_episodes.adopted(self.state):
            self.baseline.forget()
            self._judge = Judge()
            records += self.end(at_s, "it has been like this for long, and that counts as usual now")
        self._learn(second, baselines)
        return records

    def count(self, at_s: float) -> list[Record]:
        """Take what was told without judging it."""
        told, self._told = self._told, _Told()
        self.second, self.verdict, self.judged_s = Second(at_s=at_s, counts=told.counts), Verdict(), at_s
        return []

    def end(self, at_s: float, why: str) -> list[Record]:
        """End an episode that goes on."""
        self.state, records = jitter_episodes.ended(self.state, at_s, why, self.named)
        return records

    def health(self, at_s: float) -> GroupHealth:
        """As others see it."""
        return jitter_episodes.health(self.state, at_s)

    def _learn(self, second: Second, peers: Sequence[Baseline]) -> None:
        """Learn from a second some time ago, if all has been well since."""
        if self.verdict.troubles or self.state.episode is not None:
            self._healthy.clear()
            return
        self._healthy.append(_Healthy(second.counts, self._look))
        self._look = None
        if len(self._healthy) <= _LAG:
            return
        known = self._healthy.popleft()
        if known.counts:
            self.baseline.learn(known.counts, peers)
            if known.look is not None:
                self.looks.learn(*known.look)
