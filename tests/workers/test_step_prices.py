"""The price model: what it learns from noisy steps, that it rises, survives outliers, and comes back from a file."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingpong_worker.step_prices import StepKind, StepPrices, attention_work

GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
G = {size: 8e-3 + 20e-6 * size for size in GRAPHS}
"""Seconds of a step of each size without its work."""


def padded(rows: int) -> int:
    return next(size for size in GRAPHS if size >= rows)


def teach(
    prices: StepPrices,
    cost: Callable[[int, float], float],
    *,
    steps: int = 1500,
    seed: int = 1,
    noise: float = 0.05,
    largest: int = 256,
) -> None:
    draw = random.Random(seed)
    for _ in range(steps):
        tokens, context = draw.randint(1, largest), draw.randint(0, 12000)
        work = attention_work(context, tokens)
        prices.learn(tokens, work, cost(tokens, work) * draw.uniform(1 - noise, 1 + noise), "beside")


@settings(max_examples=10, deadline=None)
@given(slope=st.floats(5e-10, 5e-9), noise=st.floats(0, 0.05), seed=st.integers(0, 1000))
def test_padded_sizes_and_slope_come_back_from_noisy_steps(slope: float, noise: float, seed: int) -> None:
    prices = StepPrices(GRAPHS)
    teach(prices, lambda rows, work: G[padded(rows)] + slope * work, seed=seed, noise=noise)
    for rows in (20, 33, 100, 130, 250):
        for context in (1000, 6000, 11000):
            work = attention_work(context, rows)
            truth = G[padded(rows)] + slope * work
            assert prices.price(rows, work, "beside") == pytest.approx(truth, rel=0.15)
    # What differs by context alone is the slope's doing.
    rise = prices.price(100, 1_200_000, "beside") - prices.price(100, 0, "beside")
    assert rise == pytest.approx(slope * 1_200_000, rel=0.3)


def test_without_graphs_rows_are_told_from_work() -> None:
    prices = StepPrices()
    teach(prices, lambda rows, work: 15e-3 + 600e-6 * rows + 4e-9 * work)
    for rows in (3, 17, 50, 200):
        for context in (500, 8000):
            work = attention_work(context, rows)
            truth = 15e-3 + 600e-6 * rows + 4e-9 * work
            assert prices.price(rows, work, "beside") == pytest.approx(truth, rel=0.15)


def test_what_rows_cost_is_not_taken_for_work() -> None:
    """Prompts from their beginning: those of more rows have more work too."""
    prices = StepPrices()
    draw = random.Random(1)
    for _ in range(2000):
        tokens = draw.randint(40, 256)
        prices.learn(tokens, attention_work(0, tokens), 15e-3 + 600e-6 * tokens, "beside")
    far, near = (prices.price(100, attention_work(context, 100), "beside") for context in (2000, 0))
    assert far == pytest.approx(near, rel=0.15)


def test_a_padded_step_costs_what_its_graph_costs() -> None:
    prices = StepPrices(GRAPHS)
    for _ in range(5):
        prices.learn(64, 0, 10e-3, "beside")
        prices.learn(96, 0, 15e-3, "beside")
    assert prices.price(49, 0, "beside") == prices.price(64, 0, "beside") == pytest.approx(10e-3)
    assert prices.price(65, 0, "beside") == pytest.approx(15e-3)


kinds = st.sampled_from(get_args(StepKind))
steps_taken = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 4000), st.floats(1e-4, 1.0), kinds), min_size=1, max_size=60
)


@given(steps=steps_taken, graphs=st.sampled_from([[], GRAPHS]), asked=kinds)
def test_prices_rise_with_rows_and_with_work(
    steps: list[tuple[int, int, float, StepKind]], graphs: list[int], asked: StepKind
) -> None:
    prices = StepPrices(graphs)
    for rows, context, seconds, kind in steps:
        prices.learn(rows, attention_work(context, rows), seconds, kind)
    by_rows = [prices.price(rows, 1000, asked) for rows in range(1, 600, 7)]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(by_rows) if math.isfinite(a))
    assert all(seconds >= 0 for seconds in by_rows)
    assert prices.price(50, 0, asked) <= prices.price(50, 10_000_000, asked)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_one_step_in_fifty_that_takes_ten_times_as_long_moves_prices_little(seed: int) -> None:
    draw = random.Random(seed)
    prices = StepPrices(GRAPHS)
    for number in range(200):
        seconds = 10e-3 * draw.uniform(0.97, 1.03)
        prices.learn(64, 0, seconds * (10 if number % 50 == 30 else 1), "beside")
        assert prices.price(64, 0, "beside") == pytest.approx(10e-3, rel=0.2)


def test_a_slow_first_step_is_forgotten_at_the_second() -> None:
    prices = StepPrices(GRAPHS)
    prices.learn(8, 0, 2.0, "beside")
    prices.learn(8, 0, 10e-3, "beside")
    assert prices.price(8, 0, "beside") == pytest.approx(10e-3)


def test_a_machine_that_became_slower_is_believed() -> None:
    prices = StepPrices(GRAPHS)
    for seconds in [10e-3] * 50 + [25e-3] * 60:
        prices.learn(1, 0, seconds, "decodes")
    assert prices.price(1, 0, "decodes") == pytest.approx(25e-3, rel=0.1)


def test_unknown_prices_are_infinite_then_cautious() -> None:
    prices = StepPrices(GRAPHS)
    assert prices.price(1, 0, "decodes") == prices.price(9, 0, "beside") == math.inf
    prices.learn(1, 0, 8e-3, "decodes")
    assert prices.price(2, 0, "decodes") == pytest.approx(8e-3)
    assert prices.price(17, 0, "beside") >= 16e-3  # 16 tokens double the step, as long as nobody knows
    prices.learn(256, 0, 20e-3, "beside")
    middle = prices.price(128, 0, "beside")
    assert 8e-3 < middle < 20e-3
    assert prices.reach("beside") == 256


def test_what_was_not_seen_for_long_is_unknown_again() -> None:
    prices = StepPrices(GRAPHS)
    prices.learn(256, 0, 1.0, "beside")
    for _ in range(5000):
        prices.learn(8, 0, 10e-3, "beside")
    assert prices.reach("beside") == 8
    assert prices.price(256, 0, "beside") < 1.0


def test_no_measurement_teaches_nothing() -> None:
    prices = StepPrices()
    prices.learn(1, 0, 0.0, "decodes")
    prices.learn(0, 0, 1.0, "decodes")
    assert prices.price(1, 0, "decodes") == math.inf


@pytest.mark.parametrize("graphs", [[], GRAPHS])
def test_prices_come_back_from_a_dict(graphs: list[int]) -> None:
    prices = StepPrices(graphs)
    teach(prices, lambda rows, work: 8e-3 + 20e-6 * rows + 2e-9 * work, steps=500)
    prices.learn(1, 100, 8e-3, "decodes")
    prices.learn(200, 100, 12e-3, "prompts")
    again = StepPrices.from_dict(prices.to_dict(), graphs)
    for rows in (1, 40, 200):
        for kind in get_args(StepKind):
            assert again.price(rows, 5000, kind) == pytest.approx(prices.price(rows, 5000, kind), rel=0.1)
    assert StepPrices.from_dict(prices.to_dict(), [7]).price(1, 0, "decodes") == math.inf


@pytest.mark.parametrize(
    "damage",
    [
        {"decodes": None},
        {"beside": [[1, 2]]},
        {"beside": ["row"]},
        {"beside": [3]},
        {"beside": [[1, *[-1.0] * 10]]},
        {"beside": [[1, *[math.nan] * 10]]},
        {"beside": [["x", *[1.0] * 10]]},
    ],
)
def test_nonsense_is_refused(damage: dict[str, object]) -> None:
    prices = StepPrices()
    prices.learn(1, 0, 8e-3, "decodes")
    with pytest.raises((TypeError, ValueError)):
        StepPrices.from_dict(prices.to_dict() | damage)
