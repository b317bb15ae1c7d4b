"""What is trouble and what is not; in virtual time, with groups that know what is usual."""

from __future__ import annotations

import pytest

from jitter_world import Group
from pingpong_bus.log_records import DecodeJitter, DecodeJitterEnded
from pingpongd.jitter_judge import Verdict


def known(seed: int = 3, **how: float) -> Group:
    group = Group(seed, **how)
    group.run(40)
    assert group.records == []
    return group


def alarm(group: Group) -> DecodeJitter:
    (found,) = group.of(DecodeJitter)
    assert isinstance(found, DecodeJitter)
    return found


@pytest.mark.parametrize("slow", [1.45, 2.0, 5.0])
@pytest.mark.parametrize("step_ms", [8.6, 16.0, 120.0])
def test_a_slow_median_is_noticed_within_two_seconds(step_ms: float, slow: float) -> None:
    group = known(step_ms=step_ms)
    began = group.now
    group.run(4, slow=slow)
    assert alarm(group).slowdown == pytest.approx(slow, rel=0.12)
    assert group.records[0][0] - began <= 2.0
    assert group.health == "degraded"


def test_one_slow_second_now_and_then_is_none() -> None:
    group = known()
    for _ in range(20):
        group.run(1, slow=1.4)
        group.run(4)
    assert group.records == []


def test_a_little_slower_is_none() -> None:
    group = known()
    group.run(120, slow=1.15)
    assert group.records == []


def test_a_part_of_the_tokens_late_is_noticed() -> None:
    group = known(step_ms=10.0)
    for _ in range(6):
        group.second(group.counts(0.75), group.counts(0.25, slow=2.5))
    found = alarm(group)
    assert found.late_share > 0.03
    assert "of them late" in found.why


@pytest.mark.parametrize("seed", range(12))
def test_a_few_of_many_tokens_twice_as_late_are_noticed_within_five_seconds(seed: int) -> None:
    """What an H200 gave whose engine core had no core of its own."""
    group = known(seed, step_ms=8.6, sigma=0.03)
    began = group.now
    for _ in range(8):
        late = group.random.uniform(0.03, 0.08)
        group.second(group.counts(1.0 - 2.0 * late), group.counts(2.0 * late, slow=2.0))
    assert "of them late" in alarm(group).why
    assert group.records[0][0] - began <= 5.0


@pytest.mark.parametrize("seed", range(4))
def test_one_or_two_of_a_hundred_tokens_late_are_none(seed: int) -> None:
    group = known(seed, step_ms=8.6, sigma=0.03)
    for _ in range(600):
        late = group.random.uniform(0.005, 0.02)
        group.second(group.counts(1.0 - 2.0 * late), group.counts(2.0 * late, slow=2.0))
    assert group.records == []


def test_a_fifth_of_a_second_now_and_then_is_none() -> None:
    group = known(step_ms=8.6)
    for second in range(900):
        rows = group.random.choice((1, 1, 2, 4))
        late = group.counts(0.2, rows=rows, slow=2.0) if second % 30 == 29 else group.counts(0.2, rows=rows)
        group.second(group.counts(0.8, rows=rows), late)
    assert group.records == []


def test_one_late_step_of_many_answers_does_not_keep_an_episode_going() -> None:
    group = known(step_ms=60.0)
    for _ in range(40):
        group.second(group.counts(rows=8))
    group.run(6, rows=8, slow=2.0)
    assert group.health == "degraded"
    for _ in range(5):
        group.second(group.counts(0.85, rows=8), group.counts(0.15, rows=8, slow=2.0))
    assert group.health == "recovering"


def test_a_single_stall_is_noticed_at_once() -> None:
    group = known()
    group.second(group.stalled(group.counts(0.7), 312.0))
    found = alarm(group)
    assert found.cause == "engine_stall"
    assert found.worst_ms == pytest.approx(312.0)


def test_a_collection_in_the_engine_explains_a_stall() -> None:
    group = Group(3)
    group.engine_gc_ms = 3000.0  # while it started
    group.run(40)
    group.engine_gc_ms += 250.0
    group.second(group.stalled(group.counts(0.7), 312.0))
    assert alarm(group).cause == "garbage_collection"
    assert "250 ms in the engine's process" in alarm(group).why


def test_collections_from_before_the_engine_told_of_them_explain_nothing() -> None:
    group = known()
    group.engine_gc_ms = 3000.0
    group.second(group.stalled(group.counts(0.7), 312.0))
    assert alarm(group).cause == "engine_stall"


@pytest.mark.parametrize("ms", [40.0, 90.0, 110.0])
def test_a_shorter_wait_is_none(ms: float) -> None:
    group = known()
    group.second(group.stalled(group.counts(0.9), ms))
    assert group.records == []


def test_a_wait_as_there_have_been_is_none() -> None:
    group = known(step_ms=20.0)
    for _ in range(20):
        group.second(group.stalled(group.counts(0.9), 150.0))  # 7.5 times the usual: no stall, and remembered
    group.run(6)
    group.second(group.stalled(group.counts(0.8), 210.0))
    assert group.records == []
    group.second(group.stalled(group.counts(0.7), 400.0))
    assert alarm(group).cause == "engine_stall"


def test_work_that_waits_and_no_step_is_noticed() -> None:
    group = known()
    began = group.now
    while not group.records and group.now < began + 10:
        group.second(waiting=1)
    found = alarm(group)
    assert group.records[0][0] - began <= 5.0
    assert "has given nothing" in found.why


def test_a_worker_that_says_nothing_while_work_waits_is_noticed() -> None:
    group = known()
    began = group.now
    while not group.records and group.now < began + 10:
        group.second(silent=True)
    assert alarm(group).cause == "engine_stall"
    assert group.records[0][0] - began <= 5.0


def test_a_long_prefill_is_no_silence() -> None:
    group = known()
    for _ in range(8):  # the step is predicted to take 5 s
        group.step_ms, usual = 2500.0, group.step_ms
        group.second(waiting=1)
        group.step_ms = usual
    assert group.records == []


def test_nothing_to_do_is_no_silence() -> None:
    group = known()
    for _ in range(30):
        group.second(waiting=0)
    assert group.records == []


def test_prompts_beside_decodes_are_never_trouble() -> None:
    group = known()
    for _ in range(10):
        slow = group.counts(0.5, kind="prompts", slow=6.0)
        group.second(group.counts(0.5), group.stalled(slow, 900.0))
    assert group.records == []


def test_appends_within_what_decode_first_allows_are_none() -> None:
    group = known()
    for _ in range(60):
        group.second(group.counts(0.5), group.counts(0.5, kind="appends", slow=1.5))
    assert group.records == []


def test_appends_without_a_budget_are_our_own_doing() -> None:
    group = known()
    for _ in range(4):
        group.second(group.counts(0.5), group.counts(0.5, kind="appends", slow=3.5))
    found = alarm(group)
    assert found.cause == "own_appends"
    assert "3.5 times what they take alone" in found.why
    assert "1.5 are allowed" in found.why


def test_one_long_gap_for_an_append_is_noticed() -> None:
    group = known()
    group.second(group.counts(0.8), group.stalled(group.counts(0.1, kind="appends"), 158.0))
    assert alarm(group).cause == "own_appends"


def test_a_looser_target_of_a_chain_allows_more() -> None:
    group = known()
    group.allowed = 4.0
    for _ in range(20):
        group.second(group.counts(0.5), group.counts(0.5, kind="appends", slow=3.5))
    assert group.records == []


def test_slow_with_and_without_appends_is_not_the_appends() -> None:
    group = known()
    for _ in range(4):
        group.second(group.counts(0.5, slow=2.5), group.counts(0.5, kind="appends", slow=3.5))
    assert alarm(group).cause == "unknown"


def test_a_wobble_from_the_first_second_on_is_seen_by_a_peer() -> None:
    good, bad = Group(1), Group(2, name="b")
    for _ in range(40):
        good.second(good.counts(), peers=[bad])
        bad.second(bad.counts(slow=2.0), peers=[good])
    assert good.records == []
    assert alarm(bad).slowdown > 1.5


def test_slow_answers_are_judged_when_there_are_enough_of_them() -> None:
    group = Group(4, step_ms=700.0)
    group.run(200)
    group.run(12, slow=2.5)
    assert alarm(group).slowdown > 1.6


def test_what_an_episode_costs_is_counted() -> None:
    group = known(step_ms=10.0)
    group.run(20, slow=2.0)
    group.run(40)
    (ended,) = group.of(DecodeJitterEnded)
    assert ended.seconds == pytest.approx(20.0, abs=2.0)
    assert ended.lost_ms == pytest.approx(10_000.0, rel=0.15)  # 50 tokens a second, each 10 ms late
    assert ended.tokens == pytest.approx(1000, rel=0.15)
    assert ended.late == pytest.approx(ended.tokens, rel=0.1)
    assert ended.chains == ["c1"]


def test_a_verdict_on_nothing_is_harmless() -> None:
    group = Group(1)
    group.second()
    assert group.jitter.verdict == Verdict(allowed=1.5)


def test_a_worker_that_stood_still_beside_a_prompt_is_noticed() -> None:
    """Three seconds of SIGSTOP; the wait that they made is of a kind that is not judged by itself."""
    group = known()
    group.loop_late_ms = 2900.0
    group.second(group.stalled(group.counts(0.1, kind="prompts"), 3000.0))
    assert alarm(group).cause == "engine_stall"
    assert "2,900 ms" in alarm(group).why
    assert "worker's process" in alarm(group).why


def test_a_worker_that_stood_still_with_nothing_to_do_is_none() -> None:
    group = known()
    group.idle(3)
    group.loop_late_ms = 2900.0
    group.idle(1)
    assert group.records == []
