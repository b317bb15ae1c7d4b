"""What reading ahead beside decodes is taken to cost."""

from __future__ import annotations

import pytest

from pingpong_bus.messages import BesideFigure
from pingpongd.ride_cost import CHEAP, LEAST_PRICE, MOST_PRICE, RideCost

STEP_MS = 8.0


def read_ms(begin: int, end: int) -> float:
    return (end - begin) * 0.05


def figure(slowed: float, *, tokens: int = 1000, append_ms: float = 250.0, ratio: float = 2.0) -> BesideFigure:
    return BesideFigure(context=0, tokens=tokens, append_ms=append_ms, decode_ms=STEP_MS * slowed, itl_ratio=ratio)


def test_decodes_lose_the_same_however_fast_a_read_rides() -> None:
    # 1,000 tokens of 50 ms alone, ridden in 250 ms that slowed decodes by 10 %: these lost 22.7 ms.
    cost = RideCost([figure(1.1)], read_ms, STEP_MS, paced=True)
    ride = cost.ride(0, 4000, inner=True)
    assert ride.slowed == pytest.approx(CHEAP)
    assert ride.ms < 4 * 250, "there is room for more in a step"
    assert ride.ms * (1 - 1 / ride.slowed) == pytest.approx(4 * 22.7, rel=0.01)


def test_a_tighter_pace_rides_slower_and_loses_the_same() -> None:
    cost = RideCost([figure(1.1, ratio=1.1), figure(1.1, ratio=2.0)], read_ms, STEP_MS, paced=True)
    final, inner = cost.ride(0, 1000, inner=False), cost.ride(0, 1000, inner=True)
    assert final.ms > inner.ms
    assert final.slowed == pytest.approx(1.1)
    lost = [ride.ms * (1 - 1 / ride.slowed) for ride in (final, inner)]
    assert lost[0] == pytest.approx(lost[1])


def test_nothing_rides_faster_than_alone_and_prices_are_bounded() -> None:
    cheap = RideCost([figure(1.0)], read_ms, STEP_MS, paced=True).ride(0, 1000, inner=True)
    assert cheap.ms == pytest.approx(50)
    assert cheap.ms * (1 - 1 / cheap.slowed) == pytest.approx(LEAST_PRICE * 50)
    dear = RideCost([figure(9.0)], read_ms, STEP_MS, paced=True).ride(0, 1000, inner=True)
    assert dear.ms * (1 - 1 / dear.slowed) == pytest.approx(MOST_PRICE * 50)


def test_of_two_prices_the_lower_is_the_undisturbed_one() -> None:
    quiet = RideCost([figure(1.1)], read_ms, STEP_MS, paced=True)
    both = RideCost([figure(1.1), figure(1.6, ratio=1.5)], read_ms, STEP_MS, paced=True)
    assert both.ride(0, 1000, inner=True) == quiet.ride(0, 1000, inner=True)


def test_stock_vllm_rides_as_it_was_measured() -> None:
    ride = RideCost([figure(1.1)], read_ms, STEP_MS, paced=False).ride(0, 4000, inner=True)
    assert ride.ms == pytest.approx(4 * 250)
    assert ride.slowed == pytest.approx(1.1)


def test_without_figures_a_read_takes_what_it_takes_alone() -> None:
    cost = RideCost([], read_ms, STEP_MS, paced=True)
    assert not cost.known
    assert cost.ride(0, 1000, inner=True) == (50.0, 1.0)
