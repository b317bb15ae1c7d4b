"""Whether the daemon lives, and whether it takes chains: what `/healthz` and `/readyz` answer. Pure.

An endpoint in a thread of its own goes on to answer while the event loop hangs, or every engine is dead. So neither
question is answered by being answered: the loop has to have ticked lately, and engines that have work to have made
steps.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from pingpong_bus.messages import WorkerState

DaemonState = Literal["starting", "ready", "degraded", "draining"]

LOOP_LATE_S: Final = 10.0
"""The event loop ticks every second; so late, it hangs. The longest that it was seen held up is 0.3 s."""
OVERDUE_S: Final = 30.0
"""The watchdog replaces a worker whose engine makes no steps; so long after it should have, it has failed, too."""


class GroupPulse(msgspec.Struct, frozen=True):
    """A group at the latest tick."""

    name: str
    state: WorkerState
    overdue_s: float = 0.0
    """How long it should have been replaced for, and was not: its work waits for a step, or its heartbeats are
    missing."""


class Pulse(msgspec.Struct, frozen=True):
    """The daemon at the latest tick of its event loop."""

    state: DaemonState
    groups: tuple[GroupPulse, ...] = ()
    stage: str = ""
    """What a starting daemon is at."""
    store_error: str = ""
    """Why the chain store cannot be written now: nothing can be accepted then."""


class Health(msgspec.Struct, frozen=True):
    """The answer to both questions; becomes the body as JSON."""

    live: bool
    """False: nothing but another start will help."""
    ready: bool
    """Whether a chain that is submitted now would be accepted, while the queue has room, and run."""
    state: DaemonState
    reasons: list[str]
    """What is wrong, or not there yet, in sentences."""
    groups: dict[str, WorkerState]
    loop_late_s: float
    """Since the event loop's latest tick, less the second that lies between two."""


def judge(pulse: Pulse, tick_age_s: float) -> Health:
    """Judge the daemon.

    Args:
        pulse: of the latest tick.
        tick_age_s: how long ago that was.
    """
    late_s = max(0.0, tick_age_s - 1.0)
    hung = tick_age_s > LOOP_LATE_S
    serving = [group for group in pulse.groups if group.state == "ready"]
    stuck = [group for group in serving if group.overdue_s > OVERDUE_S]
    failed = [group for group in pulse.groups if group.state == "failed"]
    reasons = []
    if hung:
        reasons.append(f"The event loop has not ticked for {tick_age_s:.0f} s.")
    reasons += [f'Group "{it.name}" has made no step for {it.overdue_s:.0f} s too long.' for it in stuck]
    reasons += [f'Group "{it.name}" is given up.' for it in failed]
    if pulse.state == "starting":
        reasons.append(f"It starts: {pulse.stage or 'the engines load'}.")
    elif pulse.state == "draining":
        reasons.append("It is being stopped.")
    elif not serving:
        reasons.append("No group serves.")
    if pulse.store_error:
        reasons.append("The chain store cannot be written.")
    gone = bool(pulse.groups) and len(failed) == len(pulse.groups)
    all_stuck = bool(serving) and len(stuck) == len(serving)
    return Health(
        live=not (hung or gone or all_stuck),
        ready=not (hung or all_stuck or pulse.store_error) and bool(serving) and pulse.state in ("ready", "degraded"),
        state=pulse.state,
        reasons=reasons,
        groups={group.name: group.state for group in pulse.groups},
        loop_late_s=round(late_s, 3),
    )
