"""What is learned from how chains end, and when an engine counts as drifted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.messages import Literals, OutputOf, Placement, Prediction, PreparedAgent
from pingpongd.drift import IN_A_ROW, Drift
from pingpongd.factors import LEAST, MOST, Factors, kind_of
from pingpongd.shapes import chain_shape

KIND, OTHER = ("a kind",), ("another kind",)


def test_a_factor_follows_what_chains_take() -> None:
    factors = Factors()
    for _ in range(40):
        factors.learn(KIND, "serial", "a", 1.2)
    assert factors.factor(KIND, "serial", "a") == pytest.approx(1.2, abs=0.01)


def test_one_chain_that_met_a_busy_host_says_little() -> None:
    factors = Factors()
    factors.learn(KIND, "serial", "a", 9.0)
    assert 1.0 < factors.factor(KIND, "serial", "a") <= 1.05


@given(st.lists(st.floats(0, 100), max_size=60))
def test_factors_are_bounded(ratios: list[float]) -> None:
    factors = Factors()
    for ratio in ratios:
        factors.learn(KIND, "overlap", "a", ratio)
    assert LEAST <= factors.factor(KIND, "overlap", "a") <= MOST


def test_what_was_never_run_takes_what_series_took_on_its_groups() -> None:
    factors = Factors()
    factors.learn(KIND, "serial", "a", 1.2)
    learned = factors.factor(KIND, "serial", "a")
    assert factors.factor(KIND, "ping-pong", "ab") == learned
    assert factors.factor(KIND, "overlap", "a") == learned
    assert factors.factor(OTHER, "serial", "a") == learned
    assert factors.factor(OTHER, "serial", "c") == 1.0


def test_series_is_none_the_worse_for_what_other_placements_took() -> None:
    factors = Factors()
    for _ in range(10):
        factors.learn(KIND, "ping-pong", "ab", 1.4)
    assert factors.factor(KIND, "serial", "a") == 1.0
    assert factors.factor(KIND, "ping-pong", "ab") > 1.2


def test_a_placement_that_is_avoided_is_tried_again_one_day() -> None:
    factors = Factors()
    factors.learn(KIND, "ping-pong", "ab", 1.4)
    avoided = factors.factor(KIND, "ping-pong", "ab")
    for _ in range(200):
        factors.learn(KIND, "serial", "a", 1.0)
    assert factors.factor(KIND, "ping-pong", "ab") - 1.0 < (avoided - 1.0) / 10


def test_a_group_that_was_measured_anew_begins_anew() -> None:
    factors = Factors()
    factors.learn(KIND, "ping-pong", "ab", 1.2)
    factors.learn(OTHER, "serial", "c", 1.2)
    factors.forget("b")
    assert factors.factor(KIND, "ping-pong", "ab") == 1.0
    assert factors.factor(OTHER, "serial", "c") > 1.0


def test_chains_of_one_form_and_about_one_length_are_of_one_kind() -> None:
    def kind(tokens: int, output: int, placement: Placement, prefill: float, hidden: float) -> object:
        prepared = [PreparedAgent(segments=[Literals(ids=[1] * tokens)]), PreparedAgent(segments=[OutputOf(agent=0)])]
        shape = chain_shape([[], [0]], prepared, outputs=[output, output])
        prediction = Prediction(
            placement=placement,
            groups=("a", "b"),
            e2e_ms=1000,
            prefill_ms=prefill,
            decode_ms=1000 - prefill,
            hidden_ms=hidden,
        )
        return kind_of(shape, prediction, busy=False)

    assert kind(1000, 100, "serial", 400, 0) == kind(1100, 110, "ping-pong", 200, 210)
    assert kind(1000, 100, "serial", 400, 0) != kind(4000, 100, "serial", 400, 0)
    assert kind(1000, 100, "serial", 400, 0) != kind(1000, 100, "serial", 50, 0), "one is cold, the other warm"


@pytest.mark.parametrize("ratio", [1.2, 0.8])
def test_an_engine_has_drifted_when_chains_deviate_in_a_row(ratio: float) -> None:
    drift = Drift()
    assert not any(drift.add(ratio) for _ in range(IN_A_ROW - 1))
    assert drift.add(ratio)
    assert drift.add(ratio), "it is asked for until it was done"


def test_deviations_in_both_directions_or_with_good_ones_between_are_no_drift() -> None:
    drift = Drift()
    assert not any(drift.add(ratio) for ratio in [1.2, 0.8] * 20)
    assert not any(drift.add(ratio) for ratio in [1.2, 1.2, 1.2, 1.2, 1.01] * 20)


def test_what_a_new_measurement_does_not_change_is_normal() -> None:
    drift = Drift()
    while not drift.add(1.2):
        pass
    drift.measured()
    assert not any(drift.add(1.2) for _ in range(50)), "it would be measured for ever"
    assert [drift.add(1.4) for _ in range(IN_A_ROW)][-1], "and then it drifts from there"
