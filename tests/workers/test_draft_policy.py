"""How many tokens are guessed: as many as pay, by what steps were measured to take; none where it does not pay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_worker.draft_policy import MARGIN, StepTimes, lengths

SURE = [0.97**n for n in range(1, 9)]
UNLIKELY = [0.1, 0.01]


def measured(plain_ms: float, ratio: float, *, ahead: bool = False, steps: int = 40) -> StepTimes:
    times = StepTimes(ahead=ahead, on_cores=True)
    for _ in range(steps):
        times.learn(plain_ms / 1e3, 1, 0)
        for guessed in (1, 2, 4, 8):
            times.learn(plain_ms * ratio / 1e3, 1, guessed)
    return times


def test_what_is_likely_is_guessed_and_what_is_not_is_not() -> None:
    times = StepTimes(ahead=False, on_cores=True)
    assert lengths(times, [SURE], 1, math.inf)[0] >= 6
    assert lengths(times, [UNLIKELY], 1, math.inf) == [0]
    assert lengths(times, [[]], 1, math.inf) == [0]
    assert lengths(times, [], 1, math.inf) == []


def test_dear_steps_are_not_taken_and_cheap_ones_are() -> None:
    chances = [[0.6, 0.36, 0.2]]
    assert lengths(measured(10, 1.02), chances, 1, math.inf) == [3]
    assert lengths(measured(10, 2.5), chances, 1, math.inf) == [0]


def test_planning_ahead_is_given_up_only_for_more_than_it_is_worth() -> None:
    little = [[0.15]]
    assert lengths(StepTimes(ahead=False, on_cores=False), little, 1, math.inf) == [1]
    assert lengths(StepTimes(ahead=True, on_cores=False), little, 1, math.inf) == [0]


def test_one_that_guesses_among_many_has_to_be_worth_it_for_all() -> None:
    times = measured(10, 1.3)
    assert lengths(times, [SURE], 1, math.inf)[0] > 0
    assert lengths(times, [SURE], 40, math.inf) == [0]


def test_others_are_not_held_up_for_longer_than_they_allow() -> None:
    times = measured(10, 1.3)
    assert lengths(times, [SURE], 2, 1.2) == [0]
    assert lengths(times, [SURE], 2, 1.4)[0] > 0


def test_a_plain_step_is_taken_now_and_then_where_it_is_not_sure() -> None:
    times = measured(10, 1.2)
    some = [[0.4]]
    assert lengths(times, some, 1, math.inf) == [1]
    for _ in range(300):
        times.learn(0.012, 1, 1)
    assert lengths(times, some, 1, math.inf) == [0]
    assert lengths(times, [SURE], 1, math.inf)[0] > 0, "what is sure needs none"
    times.learn(0.010, 1, 0)
    assert lengths(times, some, 1, math.inf) == [1]


def test_one_slow_step_is_no_price_and_an_old_one_is_forgotten() -> None:
    times = measured(10, 1.1)
    times.learn(3.0, 1, 8)
    assert times.price(8) < 1.4
    for _ in range(40):
        times.learn(0.03, 1, 8)
    assert times.price(8) > 2
    for _ in range(600):
        times.learn(0.010, 1, 0)
    assert times.price(8) < 2


def test_nonsense_is_not_learnt() -> None:
    times = StepTimes(ahead=False, on_cores=True)
    before = times.price(4)
    times.learn(0.0, 1, 4)
    times.learn(0.1, 0, 4)
    times.learn(0.1, 1, 4)  # without a plain step there is no multiple of one
    assert times.price(4) == pytest.approx(before)


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=12).map(lambda one: sorted(one, reverse=True)), max_size=4),
    st.integers(0, 20),
    st.floats(0.5, 4),
)
def test_what_is_guessed_pays_by_its_own_account(chances: list[list[float]], others: int, ratio: float) -> None:
    times = measured(10, ratio, steps=3)
    decodes = len(chances) + others
    taken = lengths(times, chances, decodes, math.inf)
    assert all(0 <= number <= len(one) for number, one in zip(taken, chances, strict=True))
    if any(taken):
        tokens = decodes + sum(sum(one[:number]) for number, one in zip(taken, chances, strict=True))
        assert tokens / decodes / times.price(sum(taken)) > MARGIN
