"""What predictions learn of agents and steps from earlier runs."""

from __future__ import annotations

import msgspec
import pytest

from pingpong_bus.messages import DraftCounts
from pingpongd.habits import WEIGHT, Habits
from pingpongd.shapes import ChainShape

SHAPE = ChainShape(((), (0,), (1,)), (("", 0),) * 3, outputs=(100, 2048, 100), steps=(None, 10.0, None))
AGENTS = [("write", ""), ("take", ""), ("edit", "")]
GUESSED = [True, False, True]


def test_nothing_known_leaves_a_shape_as_it_is() -> None:
    assert Habits().applied(SHAPE, "c", AGENTS, GUESSED) == SHAPE


def test_a_pace_is_what_a_step_gave_in_the_mean() -> None:
    habits = Habits()
    habits.learn_pace("c", "edit", "", DraftCounts(steps=10, drafted=50, accepted=30))
    assert habits.applied(SHAPE, "c", AGENTS, GUESSED).pace(2) == (4.0, 6.0)
    habits.learn_pace("c", "edit", "", DraftCounts(steps=10, drafted=0, accepted=0))
    tokens, rows = habits.applied(SHAPE, "c", AGENTS, GUESSED).pace(2)
    assert (tokens, rows) == (pytest.approx(4.0 - 3.0 * WEIGHT), pytest.approx(6.0 - 5.0 * WEIGHT))
    assert habits.applied(SHAPE, "c", AGENTS, GUESSED).pace(0) == (1.0, 1.0)


def test_a_pace_is_of_one_chain_agent_and_model_and_only_where_tokens_are_guessed() -> None:
    habits = Habits()
    habits.learn_pace("c", "edit", "", DraftCounts(steps=10, drafted=50, accepted=30))
    assert habits.applied(SHAPE, "d", AGENTS, GUESSED) == SHAPE
    assert habits.applied(SHAPE, "c", [("write", ""), ("take", ""), ("edit", "large")], GUESSED) == SHAPE
    assert habits.applied(SHAPE, "c", AGENTS, [False] * 3) == SHAPE
    habits.learn_pace("c", "write", "", DraftCounts(steps=0, drafted=0, accepted=0))
    assert habits.applied(SHAPE, "c", AGENTS, GUESSED).pace(0) == (1.0, 1.0)


def test_steps_are_expected_to_take_and_give_what_they_did() -> None:
    habits = Habits()
    habits.learn_step("c", "take", 250.0, 80)
    found = habits.applied(SHAPE, "c", AGENTS, GUESSED)
    assert found.steps == (None, 250.0, None)
    assert found.outputs == (100, 20, 100)
    habits.learn_step("c", "take", 350.0, 80)
    assert habits.applied(SHAPE, "c", AGENTS, GUESSED).steps[1] == pytest.approx(250.0 + 100.0 * WEIGHT)
    habits.learn_step("c", "edit", 1.0, 4)
    assert habits.applied(SHAPE, "c", AGENTS, GUESSED).outputs[2] == 100, "an agent is no step"


def test_a_step_that_has_run_is_not_unknown_any_more() -> None:
    habits = Habits()
    shape = msgspec.structs.replace(SHAPE, unknown_steps=(1,))
    assert habits.applied(shape, "c", AGENTS, [False] * 3).unknown_steps == (1,)
    habits.learn_step("c", "take", 8000.0, 40)
    assert habits.applied(shape, "c", AGENTS, [False] * 3).unknown_steps == ()


def test_what_is_known_is_bounded() -> None:
    habits = Habits()
    for number in range(5000):
        habits.learn_step(f"c{number}", "take", 250.0, 80)
    assert habits.applied(SHAPE, "c0", AGENTS, GUESSED) == SHAPE
    assert habits.applied(SHAPE, "c4999", AGENTS, GUESSED) != SHAPE
