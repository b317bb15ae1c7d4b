"""The restart policy: back-off, crash loops, and starts that can never work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpongd.config import RestartConfig
from pingpongd.restart import Again, End, GiveUp, History, ended

RULES = RestartConfig()


def decide(
    ends: Sequence[tuple[float, bool]], rules: RestartConfig = RULES, why: str = "it ended with signal 9"
) -> list[Again | GiveUp]:
    """What follows from ends, each a time in seconds and whether the worker had served."""
    history, decisions = History(), []
    for at, served in ends:
        history, decision = ended(history, rules, End(at=at, why=why, served=served))
        decisions.append(decision)
    return decisions


def waits(decisions: Sequence[Again | GiveUp]) -> list[float | None]:
    return [decision.wait_s if isinstance(decision, Again) else None for decision in decisions]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0, True)], [1]),
        ([(0, True), (10, True), (20, True), (30, True), (40, True)], [1, 2, 4, 8, None]),
        ([(0, True), (601, True), (1202, True)], [1, 1, 1]),  # a quiet time makes the wait short again
        ([(0, True), (300, True), (650, True)], [1, 2, 2]),
        ([(0, False), (1800, False), (3600, False), (5400, False), (7200, False)], [1, 2, 4, 8, None]),
        ([(0, False), (1800, False), (3600, True), (5400, False)], [1, 2, 1, 1]),  # serving once ends the row
    ],
)
def test_when_the_next_one_starts(ends: list[tuple[float, bool]], expected: list[float | None]) -> None:
    assert waits(decide(ends)) == expected


def test_the_longest_wait() -> None:
    rules = RestartConfig(give_up_after=100, backoff_max_s=60)
    assert waits(decide([(0, True)] * 10, rules)) == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_what_is_said_of_a_crash_loop() -> None:
    last = decide([(at, True) for at in range(5)])[-1]
    assert last == GiveUp(
        "crash loop: it ended 5 times within 600 s, at last because it ended with signal 9", permanent=False
    )
    last = decide([(at * 1000, False) for at in range(5)])[-1]
    assert last == GiveUp(
        "crash loop: it ended 5 times in a row before it could serve, at last because it ended with signal 9",
        permanent=False,
    )


def test_what_can_never_work_is_given_up_at_once() -> None:
    end = End(at=0, why="there is no such model", served=False, permanent=True)
    assert ended(History(), RULES, end)[1] == GiveUp("there is no such model", permanent=True)


rules = st.builds(
    RestartConfig,
    backoff_s=st.floats(0.01, 100),
    backoff_max_s=st.floats(0.01, 1000),
    give_up_after=st.integers(1, 50),
    within_s=st.floats(1, 10_000),
)
gaps = st.lists(st.tuples(st.floats(0, 5000), st.booleans()), max_size=80)


@given(rules, gaps)
def test_no_storm_of_starts(rules: RestartConfig, gaps: list[tuple[float, bool]]) -> None:
    """In no span of `within_s` are there more starts than ends that are forgiven, and every wait is within bounds."""
    history, now, ends = History(), 0.0, list[float]()
    for gap, served in gaps:
        now += gap
        ends.append(now)
        history, decision = ended(history, rules, End(at=now, why="x", served=served))
        recent = sum(now - at < rules.within_s for at in ends)
        if recent >= rules.give_up_after:
            assert isinstance(decision, GiveUp)
        if isinstance(decision, GiveUp):
            assert not decision.permanent
            return
        assert min(rules.backoff_s, rules.backoff_max_s) <= decision.wait_s <= rules.backoff_max_s
        now += decision.wait_s
        assert len(history.ends) < rules.give_up_after


@given(rules, st.integers(1, 30))
def test_each_wait_in_a_row_is_twice_the_last(rules: RestartConfig, count: int) -> None:
    found = [wait for wait in waits(decide([(0.0, True)] * count, rules)) if wait is not None]
    for one, two in itertools.pairwise(found):
        assert two == pytest.approx(min(2 * one, rules.backoff_max_s))
