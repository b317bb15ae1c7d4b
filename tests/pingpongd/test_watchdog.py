"""The watchdog's rules: who is silent, who stalls, and that nobody pays for a supervisor that was away."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.messages import Heartbeat
from pingpongd.watchdog import (
    Rules,
    Serving,
    Starting,
    beat,
    look,
    look_at_start,
    serving,
    starting,
)

RULES = Rules(heartbeat_s=1.0, misses=3, stall_s=10.0, start_s=60.0, look_s=0.5)


def heartbeat(at_s: float, *, steps: int = 0, waiting: int = 0, step_ms: float = 0.0) -> Heartbeat:
    return Heartbeat(
        at_ns=int(at_s * 1e9),
        open_hops=waiting,
        output_tokens=0,
        rss_bytes=0,
        steps=steps,
        waiting=waiting,
        predicted_step_ms=step_ms,
    )


class Run:
    """Time passes, a worker beats, a supervisor looks; times in seconds."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.rules = rules
        self.now = 0.0
        self.state = serving(0.0)
        self.why = ""

    def beat(self, *, steps: int = 0, waiting: int = 0, step_ms: float = 0.0, sent: float | None = None) -> None:
        message = heartbeat(self.now if sent is None else sent, steps=steps, waiting=waiting, step_ms=step_ms)
        self.state = beat(self.state, self.rules, self.now, message)

    def look(self) -> str:
        self.state, why = look(self.state, self.rules, self.now)
        self.why = self.why or why
        return why

    def pass_time(self, seconds: float, **beats: float) -> None:
        """Look as often as a supervisor does; with `beats`, the worker beats every second and says that."""
        for number in range(1, int(seconds / self.rules.look_s) + 1):
            self.now += self.rules.look_s
            if beats and number % 2 == 0:
                self.beat(**beats)  # type: ignore[arg-type]
            self.look()


def test_a_worker_that_beats_is_healthy() -> None:
    run = Run()
    run.pass_time(100, steps=0)
    assert run.why == ""


def test_two_beats_may_be_missing() -> None:
    run = Run()
    run.pass_time(10, steps=0)
    run.pass_time(3.5)
    assert run.why == ""


def test_three_missing_beats_are_a_hang() -> None:
    run = Run()
    run.pass_time(10, steps=0)
    run.pass_time(4)
    assert run.why == "no heartbeat for 4.0 s"


def test_one_that_never_beats_is_hung() -> None:
    run = Run()
    run.pass_time(4)
    assert run.why == "no heartbeat for 4.0 s"


def test_work_that_waits_without_a_step() -> None:
    run = Run()
    run.pass_time(5, steps=7)
    run.pass_time(10, steps=7, waiting=3, step_ms=400.0)
    assert run.why == ""  # it has waited since the first beat that told of it: 9 s
    run.pass_time(2, steps=7, waiting=3, step_ms=400.0)
    assert run.why == "3 submissions have waited 11 s for a step; one should take 0.4 s"


@pytest.mark.parametrize(("step_ms", "seconds"), [(0.0, 10), (1000.0, 10), (4000.0, 20), (60_000.0, 300)])
def test_patience_grows_with_the_predicted_step(step_ms: float, seconds: int) -> None:
    run = Run()
    run.pass_time(1, waiting=1, step_ms=step_ms)
    run.pass_time(seconds, waiting=1, step_ms=step_ms)
    assert run.why == ""
    run.pass_time(1, waiting=1, step_ms=step_ms)
    assert run.why.startswith(f"1 submission has waited {seconds + 1} s for a step")


def test_a_prediction_that_shrinks_while_work_waits_takes_no_patience_away() -> None:
    run = Run()
    run.pass_time(2, waiting=1, step_ms=4000.0)
    run.pass_time(15, waiting=1, step_ms=1.0)
    assert run.why == ""


def test_a_step_ends_the_wait() -> None:
    run = Run()
    for steps in range(20):
        run.pass_time(9, steps=steps, waiting=2)
    assert run.why == ""


def test_work_that_is_withdrawn_ends_the_wait() -> None:
    run = Run()
    for _ in range(5):
        run.pass_time(9, waiting=2)
        run.pass_time(1, waiting=0)
    assert run.why == ""


@pytest.mark.parametrize("away", [2.0, 60.0, 86_400.0])
def test_a_supervisor_that_was_stopped_blames_nobody(away: float) -> None:
    run = Run()
    run.pass_time(10, steps=1, waiting=1)
    run.now += away
    assert run.look() == ""  # what the worker has sent meanwhile is heard only after this
    run.pass_time(3.5)
    assert run.why == ""
    run.pass_time(1)
    assert "no heartbeat" in run.why  # but it is not forgiven for good


def test_a_machine_that_was_stopped_blames_no_engine() -> None:
    run = Run()
    run.pass_time(8, steps=1, waiting=1)
    run.now += 3600
    run.look()
    run.beat(steps=1, waiting=1)
    assert run.look() == ""


def test_a_worker_that_was_stopped_and_goes_on_in_time_has_not_waited_for_a_step() -> None:
    rules = msgspec.structs.replace(RULES, misses=30)
    run = Run(rules)
    run.pass_time(6, steps=1, waiting=1)
    run.pass_time(20)
    run.beat(steps=1, waiting=1)
    assert run.look() == ""


def test_the_clock_of_a_worker_may_stand_still_or_go_back() -> None:
    run = Run()
    for _ in range(100):
        run.now += 0.5
        run.beat(waiting=1, sent=50 - run.now)
        assert run.look() == ""


@given(
    gaps=st.lists(st.floats(0, 1000), min_size=1, max_size=50),
    steps=st.lists(st.integers(0, 3), min_size=50, max_size=50),
)
def test_whenever_the_supervisor_looks_a_worker_that_works_is_healthy(gaps: list[float], steps: list[int]) -> None:
    """A worker beats every second by the same clock; the supervisor hears all of it whenever it wakes up."""
    state, now, sent, done = serving(0.0), 0.0, 0, 0
    for gap, more in zip(gaps, steps, strict=False):
        now += gap
        state, why = look(state, RULES, now)  # a timer may go before the socket is read
        assert why == ""
        while sent + 1 <= now:
            sent += 1
            done += 1 + more
            state = beat(state, RULES, now, heartbeat(sent, steps=done, waiting=1))
        state, why = look(state, RULES, now)
        assert why == ""


@given(st.lists(st.floats(0, 1.4), min_size=60, max_size=60))
def test_a_silent_worker_is_found_as_soon_as_enough_was_seen(gaps: list[float]) -> None:
    """However unevenly the supervisor looks, silence is counted by the time in which it has looked."""
    state, now, looked = serving(0.0), 0.0, 0.0
    for gap in gaps:
        now += gap
        looked += min(gap, RULES.look_s)
        state, why = look(state, RULES, now)
        assert bool(why) == (looked > RULES.silence_s) or abs(looked - RULES.silence_s) < 1e-6
        if why:
            return


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 1e6))), max_size=60))
def test_a_stall_is_never_longer_than_the_time_that_passed(events: list[tuple[int, int, float] | None]) -> None:
    state, steps = serving(0.0), 0
    for number, event in enumerate(events):
        now = number * 0.5
        if event is None:
            state, _ = look(state, RULES, now)
        else:
            more, waiting, step_ms = event
            steps += more
            state = beat(state, RULES, now, heartbeat(now, steps=steps, waiting=waiting, step_ms=step_ms))
            assert state.waiting > 0 or state.stalled_s == 0
        assert 0 <= state.stalled_s <= now
        assert state.heard_at <= now


# ------------------------------------------------------------------------------------------------------------ starting


def looks(stopped: str, state: Starting | None = None) -> list[str]:
    """What is said at looks of a second each: "s" where the worker stands stopped, "." where it runs."""
    state = state or starting(0.0)
    rules = msgspec.structs.replace(RULES, look_s=1.0)
    said = []
    for now, letter in enumerate(stopped, start=1):
        state, why = look_at_start(state, rules, float(now), stopped=letter == "s")
        said.append(why)
    return said


@pytest.mark.parametrize(
    ("stopped", "hung"),
    [("." * 60, False), ("ss", False), ("sss", True), ("ss.ss.ss", False), ("..sss", True), ("." * 61, True)],
)
def test_a_worker_that_starts(stopped: str, hung: bool) -> None:
    said = looks(stopped)
    assert not any(said[:-1])
    assert bool(said[-1]) == hung


def test_what_is_said_of_a_start() -> None:
    assert looks("sss")[-1] == "it stood stopped while it was loading, at 3 looks in a row"
    assert looks("." * 61)[-1] == "it did not start within 60 s"


def test_a_supervisor_that_was_stopped_gives_the_start_its_time_back() -> None:
    state, why = look_at_start(starting(0.0), RULES, 3600.0, stopped=False)
    assert why == ""
    state, why = look_at_start(state, RULES, 3600.5, stopped=False)
    assert why == ""


def test_states_are_values() -> None:
    state = serving(0.0)
    beat(state, RULES, 1.0, heartbeat(1.0))
    look(state, RULES, 9.0)
    assert state == Serving(heard_at=0.0, looked_at=0.0)
