"""What `/healthz` and `/readyz` answer, for everything that a daemon can be in."""

from __future__ import annotations

import pytest

from pingpong_bus.messages import WorkerState
from pingpongd.health import LOOP_LATE_S, OVERDUE_S, DaemonState, GroupPulse, Pulse, judge


def pulse(state: DaemonState, *groups: WorkerState, overdue_s: float = 0.0, **more: str) -> Pulse:
    found = tuple(GroupPulse(f"g{at}", of_group, overdue_s) for at, of_group in enumerate(groups))
    return Pulse(state, found, **more)


@pytest.mark.parametrize(
    ("given", "tick_age_s", "live", "ready"),
    [
        (pulse("ready", "ready", "ready"), 0.5, True, True),
        (pulse("degraded", "ready", "dead"), 0.5, True, True),
        (pulse("degraded", "ready", "failed"), 0.5, True, True),
        (pulse("degraded", "loading", "waiting"), 0.5, True, False),
        (pulse("degraded", "failed", "failed"), 0.5, False, False),
        (pulse("starting"), 0.5, True, False),
        (pulse("starting", "ready", "loading"), 0.5, True, False),
        (pulse("draining", "ready", "ready"), 0.5, True, False),
        (pulse("ready", "ready"), LOOP_LATE_S - 0.1, True, True),
        (pulse("ready", "ready"), LOOP_LATE_S + 0.1, False, False),
        (pulse("ready", "ready", "ready", overdue_s=OVERDUE_S - 1), 0.5, True, True),
        (pulse("ready", "ready", "ready", overdue_s=OVERDUE_S + 1), 0.5, False, False),
        (pulse("ready", "ready", store_error="the disk is full"), 0.5, True, False),
    ],
)
def test_the_verdict(given: Pulse, tick_age_s: float, live: bool, ready: bool) -> None:
    found = judge(given, tick_age_s)
    assert (found.live, found.ready) == (live, ready)
    assert bool(found.reasons) == (not (live and ready) or "failed" in found.groups.values())


def test_one_stuck_group_of_two_is_named_and_does_not_take_the_daemon_down() -> None:
    groups = (GroupPulse("a", "ready", OVERDUE_S + 12), GroupPulse("b", "ready"))
    found = judge(Pulse("ready", groups), 0.2)
    assert found.live
    assert found.ready
    assert found.reasons == ['Group "a" has made no step for 42 s too long.']


def test_a_start_says_what_it_is_at() -> None:
    found = judge(Pulse("starting", stage="fetching the model"), 0.2)
    assert found.reasons == ["It starts: fetching the model."]
