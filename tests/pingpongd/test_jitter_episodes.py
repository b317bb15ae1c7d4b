"""How an episode begins, changes its mind, and ends; whatever the order of seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_figures import H200, scaled
from jitter_world import Group
from pingpong_bus.log_records import (
    DecodeJitter,
    DecodeJitterCause,
    DecodeJitterEnded,
    GroupHealthChanged,
)
from pingpong_bus.messages import DeviceState, HostState, JitterCause
from pingpongd.jitter_episodes import GroupState, Named, Tick, ended, health, step
from pingpongd.jitter_judge import Trouble, Verdict
from pingpongd.jitter_rules import TABLE, Finding

NAMED = Named("a", ["GPU-1"], "i")
QUIET = HostState(runnable_wait=0.02)
STARVED = HostState(runnable_wait=0.7)
COOL = DeviceState(uuid="GPU-1", sm_mhz=1980, sm_max_mhz=1980)
HOT = DeviceState(uuid="GPU-1", sm_mhz=1095, sm_max_mhz=1980, throttle=["sw_thermal_slowdown"])
SHARED = DeviceState(uuid="GPU-1", sm_mhz=1980, sm_max_mhz=1980, foreign_pids=[77], foreign_utilization=0.5)


def known() -> Group:
    group = Group(9)
    group.run(40, look=(QUIET, [COOL]))
    return group


def causes(group: Group) -> list[JitterCause]:
    return [record.cause for _, record in group.records if isinstance(record, DecodeJitter | DecodeJitterCause)]


def test_an_episode_from_its_first_second_to_its_last() -> None:
    group = known()
    group.run(6, slow=2.0, look=(STARVED, [COOL]))
    assert group.health == "degraded"
    group.run(5, look=(QUIET, [COOL]))
    assert group.health == "recovering"
    group.run(5, look=(QUIET, [COOL]))
    assert group.health == "healthy"
    kinds = [type(record) for _, record in group.records]
    assert kinds == [DecodeJitter, GroupHealthChanged, GroupHealthChanged, DecodeJitterEnded, GroupHealthChanged]
    begun, over = group.of(DecodeJitter)[0], group.of(DecodeJitterEnded)[0]
    assert begun.episode == over.episode == "test-a-1"
    assert begun.cause == over.cause == "cpu_starvation"
    assert group.jitter.health(group.now).slowdown == 1.0
    assert group.jitter.health(group.now).episodes == 1


def test_a_group_that_gets_no_hops_comes_back_too() -> None:
    group = known()
    group.run(4, slow=2.0)
    over = group.now
    group.idle(30)
    (at,) = [at for at, record in group.records if isinstance(record, DecodeJitterEnded)]
    assert 9 <= at - over <= 12


@pytest.mark.parametrize("state", [HOT, SHARED])
def test_an_idle_group_stays_out_while_the_cause_is_seen_to_go_on(state: DeviceState) -> None:
    group = known()
    group.run(6, slow=2.0, look=(QUIET, [state]))
    group.idle(60, look=(QUIET, [state]))
    assert group.health == "degraded"
    over = group.now
    group.idle(30, look=(QUIET, [COOL]))
    (at,) = [at for at, record in group.records if isinstance(record, DecodeJitterEnded)]
    assert at - over <= 5


def test_even_then_not_for_ever() -> None:
    group = known()
    group.run(6, slow=2.0, look=(QUIET, [HOT]))
    group.idle(320, look=(QUIET, [HOT]))
    assert group.health == "healthy"


def test_a_more_telling_cause_is_believed_at_once() -> None:
    group = known()
    group.run(3, slow=2.0, look=(QUIET, [COOL]))
    assert causes(group) == ["unknown"]
    group.run(1, slow=2.0, look=(STARVED, [COOL]))
    assert causes(group) == ["unknown", "cpu_starvation"]
    group.run(1, slow=2.0, look=(STARVED, [HOT]))
    assert causes(group) == ["unknown", "cpu_starvation", "thermal_throttle"]
    (first, second) = group.of(DecodeJitterCause)
    assert (first.was, second.was) == ("unknown", "cpu_starvation")
    assert "1,095 of 1,980 MHz" in second.why


def test_a_less_telling_one_when_it_stays() -> None:
    group = known()
    group.run(4, slow=2.0, look=(QUIET, [HOT]))
    group.run(4, slow=2.0, look=(STARVED, [COOL]))
    assert causes(group) == ["thermal_throttle"]  # the hot look is one of the latest three, and two seconds are few
    group.run(3, slow=2.0, look=(STARVED, [COOL]))
    assert causes(group) == ["thermal_throttle", "cpu_starvation"]


def test_the_cause_that_most_seconds_pointed_to_is_the_episodes() -> None:
    group = known()
    group.run(4, slow=2.0, look=(QUIET, [HOT]))
    group.run(20, slow=2.0, look=(STARVED, [COOL]))
    group.idle(15)
    assert group.of(DecodeJitterEnded)[0].cause == "cpu_starvation"


def test_one_that_is_late_again_at_once_waits_longer_and_never_half_a_minute() -> None:
    group, waits = known(), []
    for _ in range(4):
        group.run(4, slow=2.0)
        over = group.now
        while group.health != "healthy":
            group.idle(1)
        waits.append(group.now - over)
    assert waits[0] == 10
    assert waits[1] == 20
    assert waits[2] == waits[3] == 25


def test_a_group_that_stays_a_little_slower_gets_well_all_the_same() -> None:
    """A busy machine of two cores: for two minutes tokens took 1.1 to 1.2 times the usual, now and then a bit more."""
    group = Group(9, step_ms=19.4)
    group.run(60)
    group.run(6, slow=2.0)
    over = group.now
    for second in range(120):
        group.run(1, slow=1.25 if second % 8 == 7 else group.random.uniform(1.08, 1.16))
    (at,) = [at for at, record in group.records if isinstance(record, DecodeJitterEnded)]
    assert at - over <= 30
    assert len(group.of(GroupHealthChanged)) == 3


def test_stalls_that_come_again_and_again_make_few_lines() -> None:
    group = known()
    for _ in range(20):
        group.second(group.stalled(group.counts(0.6), 400.0))
        group.run(6)
    assert group.health == "degraded"
    assert len(group.of(DecodeJitter)) == 1
    assert len(group.of(GroupHealthChanged)) <= 3
    group.run(12)
    assert group.health == "healthy"


def test_after_a_quiet_minute_it_waits_no_longer_than_the_first_time() -> None:
    group = known()
    group.run(4, slow=2.0)
    group.run(120)
    group.run(4, slow=2.0)
    over = group.now
    while group.health != "healthy":
        group.idle(1)
    assert group.now - over == 10


def test_nothing_is_learnt_in_an_episode() -> None:
    group = known()
    before = group.jitter.baseline.known_ms(("decode", 1, 0))
    group.run(300, slow=2.0, look=(STARVED, [COOL]))
    assert group.jitter.baseline.known_ms(("decode", 1, 0)) == before
    assert group.health == "degraded"


def test_what_goes_on_for_long_without_a_reason_becomes_usual() -> None:
    group = known()
    group.run(640, slow=2.0)
    assert group.health == "healthy"
    assert "usual now" in group.of(GroupHealthChanged)[-1].why
    group.run(300, slow=2.0)
    assert len(group.of(DecodeJitter)) == 1
    assert group.jitter.baseline.known_ms(("decode", 1, 0)) == pytest.approx(32.0, rel=0.1)


def test_neither_figures_nor_peers_speak_against_what_has_become_usual() -> None:
    group, peer = Group(3), Group(4, name="b")
    for it in (group, peer):
        it.jitter.measured(scaled(H200, 1.0, 16.0 / 8.6))
    for second in range(3000):
        group.second(group.counts(slow=3.0 if second > 60 else 1.0), peers=[peer])
        peer.second(peer.counts(), peers=[group])
    assert group.health == "healthy"
    assert len(group.of(DecodeJitter)) == 1
    assert peer.records == []
    group.jitter.measured(scaled(H200, 1.0, 16.0 / 8.6))
    for _ in range(60):
        group.second(group.counts(slow=3.0), peers=[peer])
    assert group.health == "degraded"


def test_so_do_late_tokens_that_go_on_for_long() -> None:
    group = Group(3, step_ms=8.6, sigma=0.03)
    group.run(60)
    for _ in range(1500):
        group.second(group.counts(0.9), group.counts(0.1, slow=2.0))
    assert group.health == "healthy"
    assert len(group.of(DecodeJitter)) == 1


def test_the_end_of_its_worker_ends_it() -> None:
    group = known()
    group.run(4, slow=2.0)
    records = group.jitter.end(group.now, "its worker is gone")
    assert [type(record) for record in records] == [DecodeJitterEnded, GroupHealthChanged]
    assert group.jitter.end(group.now, "again") == []
    group.jitter.begin()
    group.run(20)
    assert group.health == "healthy"
    group.run(4, slow=2.0)  # what is usual is known still
    assert group.health == "degraded"


TROUBLES: list[tuple[Trouble, ...]] = [(), (), ("median",), ("late",), ("stall",), ("silence", "median"), ("appends",)]


@given(
    st.lists(
        st.tuples(st.sampled_from(TROUBLES), st.sampled_from(range(len(TABLE))), st.booleans(), st.floats(1.0, 40.0)),
        max_size=60,
    )
)
def test_any_order_of_seconds_makes_sound_records(seconds: list[tuple[tuple[Trouble, ...], int, bool, float]]) -> None:
    state, now, open_episode, was = GroupState(), 0.0, "", "healthy"
    for troubles, rank, in_force, passed in seconds:
        now += passed
        verdict = Verdict(troubles=troubles, tokens=10, late=3, lost_ms=5.0, worst_ms=50.0, slowdown=1.4)
        finding = Finding(TABLE[rank].cause, TABLE[rank].name, "why", rank, {})
        tick = Tick(at_s=now, verdict=verdict, finding=finding, chains=["c"], in_force=in_force)
        state, records = step(state, tick, NAMED)
        for record in records:
            if isinstance(record, DecodeJitter):
                assert not open_episode
                open_episode = record.episode
            elif isinstance(record, DecodeJitterCause):
                assert (record.episode, record.cause != record.was) == (open_episode, True)
            elif isinstance(record, DecodeJitterEnded):
                assert record.episode == open_episode
                assert record.seconds >= 0
                open_episode = ""
            elif isinstance(record, GroupHealthChanged):
                assert (record.was, record.state != record.was) == (was, True)
                was = record.state
        assert bool(open_episode) == (state.episode is not None) == (state.health != "healthy")
        assert bool(troubles) <= (state.health == "degraded")
        assert health(state, now).slowdown >= 1.0
        assert health(state, now).state == was
    state, records = ended(state, now, "over", NAMED)
    assert bool(records) == bool(open_episode)
    assert state.health == "healthy"
