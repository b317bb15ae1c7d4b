"""When a worker counts as hung. Pure: heartbeats and looks at the clock in, a verdict out.

A worker that serves beats, and says with each beat how many steps its engine has made and what waits for one. It is
hung when beats are missing, or when work waits and no step comes. A worker that loads does not beat, for its event
loop is blocked by the engine's start: it is hung when it, or a process under it, stands stopped, or when the start
takes too long.

A supervisor that was stopped itself sees everything late. Time in which it did not look is not held against workers,
and how long work has waited is counted in heartbeats, by the worker's own clock.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pingpong_bus.messages import Heartbeat

_LATE_BEAT = 0.5
"""A beat is missing when it is this part of the interval late."""
_STEPS_OVERDUE = 5.0
"""Predicted steps that may pass without one."""
_LONGEST_GAP_BEATS = 2.0
"""What the time between two beats counts at most, in intervals: a worker that was stopped and goes on has lost the
time, and not spent it on a step."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What is allowed; times in seconds."""

    heartbeat_s: Annotated[float, msgspec.Meta(gt=0)]
    """Between heartbeats, as the worker was told."""
    misses: Annotated[int, msgspec.Meta(ge=1)]
    """Heartbeats that may be missing in a row; of a loading worker, looks in a row at which it may stand stopped."""
    stall_s: Annotated[float, msgspec.Meta(gt=0)]
    """Work may wait this long for a step, or five times the predicted step, whichever is longer."""
    start_s: Annotated[float, msgspec.Meta(gt=0)]
    """A start may take this long."""
    look_s: Annotated[float, msgspec.Meta(gt=0)]
    """Between two looks of the supervisor, when it is not held up."""

    @property
    def silence_s(self) -> float:
        """How long a serving worker may say nothing."""
        return (self.misses + _LATE_BEAT) * self.heartbeat_s


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that serves; times are the supervisor's, in seconds, except where said."""

    heard_at: float
    """Of the latest beat, or later by what the supervisor has missed."""
    looked_at: float
    beat_ns: int | None = None
    """When the latest beat was sent, by the worker's clock; None before the first."""
    steps: int = 0
    waiting: int = 0
    stalled_s: float = 0.0
    """How long work has waited and no step has come, as of the latest beat."""
    step_s: float = 0.0
    """The longest step that was predicted in this time."""


class Starting(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that starts or loads; times are the supervisor's, in seconds."""

    since: float
    looked_at: float
    stopped: int = 0
    """Looks in a row at which it, or a process under it, stood stopped."""


def serving(now: float) -> Serving:
    """A worker that has just got ready."""
    return Serving(heard_at=now, looked_at=now)


def starting(now: float) -> Starting:
    """A worker that has just been started."""
    return Starting(since=now, looked_at=now)


def beat(state: Serving, rules: Rules, now: float, message: Heartbeat) -> Serving:
    """Take a heartbeat."""
    gap_s = 0.0
    if state.beat_ns is not None:
        gap_s = max(0.0, (message.at_ns - state.beat_ns) / 1e9)
    # Work that came since the last beat has waited for less than the gap: it counts from this beat on.
    waited = state.waiting > 0 and message.waiting > 0 and message.steps == state.steps
    step_s = message.predicted_step_ms / 1000
    return Serving(
        heard_at=now,
        looked_at=state.looked_at,
        beat_ns=message.at_ns,
        steps=message.steps,
        waiting=message.waiting,
        stalled_s=state.stalled_s + min(gap_s, _LONGEST_GAP_BEATS * rules.heartbeat_s) if waited else 0.0,
        step_s=max(state.step_s, step_s) if waited else step_s,
    )


def look(state: Serving, rules: Rules, now: float) -> tuple[Serving, str]:
    """Judge a worker that serves.

    Returns:
        The next state, and why it is hung, empty where it is not.
    """
    missed_s = _missed_s(state.looked_at, rules, now)
    # A stop of the supervisor that is longer than a heartbeat may have held up the worker as well: begin anew.
    heard_at = now if missed_s > rules.heartbeat_s else min(now, state.heard_at + missed_s)
    state = msgspec.structs.replace(state, heard_at=heard_at, looked_at=now)
    silent_s = now - heard_at
    if silent_s > rules.silence_s:
        return state, f"no heartbeat for {silent_s:.1f} s"
    if state.stalled_s > _longest_stall_s(state, rules):
        what = "1 submission has" if state.waiting == 1 else f"{state.waiting} submissions have"
        predicted = f"; one should take {state.step_s:.1g} s" if state.step_s else ""
        return state, f"{what} waited {state.stalled_s:.0f} s for a step{predicted}"
    return state, ""


def overdue_s(state: Serving, rules: Rules, now: float) -> float:
    """For how long a worker that serves has been past what `look` allows; 0 while it is not."""
    silent_s = now - state.heard_at - rules.silence_s
    stalled_s = state.stalled_s - _longest_stall_s(state, rules)
    return max(0.0, silent_s, stalled_s)


def look_at_start(state: Starting, rules: Rules, now: float, *, stopped: bool) -> tuple[Starting, str]:
    """Judge a worker that starts or loads.

    Args:
        state: so far.
        rules: what is allowed.
        now: the supervisor's time in seconds.
        stopped: whether it, or a process under it, stands stopped now, as after SIGSTOP.

    Returns:
        The next state, and why it is hung, empty where it is not.
    """
    since = min(now, state.since + _missed_s(state.looked_at, rules, now))
    state = Starting(since=since, looked_at=now, stopped=state.stopped + 1 if stopped else 0)
    if state.stopped >= rules.misses:
        return state, f"it stood stopped while it was loading, at {state.stopped} looks in a row"
    if now - since > rules.start_s:
        return state, f"it did not start within {rules.start_s:g} s"
    return state, ""


def _longest_stall_s(state: Serving, rules: Rules) -> float:
    return max(rules.stall_s, _STEPS_OVERDUE * state.step_s)


def _missed_s(looked_at: float, rules: Rules, now: float) -> float:
    """For how long the supervisor has not looked when it should have."""
    return max(0.0, now - looked_at - rules.look_s)
