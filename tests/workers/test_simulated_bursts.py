"""The simulated engine's bursts: how long steps take that meet one, and that only the engine knows."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.messages import Sampling
from pingpong_worker.config import SimulatedSettings, WorkerConfig
from pingpong_worker.simulated_bursts import Bursts
from pingpong_worker.simulated_engine import SimulatedEngine

STEPS = st.lists(st.floats(0.001, 3), min_size=1, max_size=40)


def settings(**given: float) -> SimulatedSettings:
    return SimulatedSettings(burst_factor=2, burst_s=1, burst_every_s=4, **given)  # type: ignore[arg-type]


def ends(bursts: Bursts, steps: list[float]) -> list[float]:
    """When steps end that follow each other."""
    found, at = [], 0.0
    for step in steps:
        at = bursts.end_of(at, step)
        found.append(at)
    return found


@given(steps=STEPS)
def test_without_bursts_steps_take_what_they_take(steps: list[float]) -> None:
    for quiet in (SimulatedSettings(burst_factor=3), SimulatedSettings(burst_s=5)):
        assert ends(Bursts(quiet), steps)[-1] == pytest.approx(sum(steps))


@given(steps=STEPS, seed=st.integers(0, 100))
def test_steps_take_one_to_factor_times_as_long(steps: list[float], seed: int) -> None:
    at = 0.0
    for step, end in zip(steps, ends(Bursts(settings(burst_seed=seed)), steps), strict=True):
        assert step - 1e-9 <= end - at <= 2 * step + 1e-9
        at = end


@given(steps=STEPS, seed=st.integers(0, 100))
def test_it_is_the_same_work_however_it_is_cut_into_steps(steps: list[float], seed: int) -> None:
    at_once = Bursts(settings(burst_seed=seed)).end_of(0.0, sum(steps))
    assert ends(Bursts(settings(burst_seed=seed)), steps)[-1] == pytest.approx(at_once)


def test_bursts_take_the_share_of_time_that_they_are_told() -> None:
    quiet_s = 20_000.0  # of work; 1 s in 5 is a burst, in which half as much is done
    took_s = Bursts(settings()).end_of(0.0, quiet_s)
    assert took_s == pytest.approx(quiet_s / (1 - 0.2 * 0.5), rel=0.05)


def test_seeds_draw_other_bursts_and_a_scale_stretches_them() -> None:
    first, second = (Bursts(settings(burst_seed=seed)).end_of(0.0, 60) for seed in (1, 2))
    assert first != second
    assert Bursts(settings(burst_seed=1, time_scale=3)).end_of(0.0, 180) == pytest.approx(3 * first)


def test_none_comes_before_its_time() -> None:
    assert Bursts(settings(burst_after_s=100)).end_of(0.0, 100) == 100
    assert Bursts(settings(burst_after_s=100)).end_of(0.0, 200) > 205


async def test_an_engine_in_a_burst_decodes_more_slowly_and_says_what_a_step_took() -> None:
    simulated = SimulatedSettings(step_ms=5, burst_factor=6, burst_s=1e6, burst_every_s=1e-6)
    engine = SimulatedEngine(
        WorkerConfig(
            name="a", devices=["cpu:0"], engine="simulated", simulated=simulated, slab_fd=-1, control="", bell="",
            supervisor_pid=0,
        )
    )  # fmt: skip
    await engine.start()
    try:
        session = engine.open("s", cache_salt=None, sampling=Sampling(max_tokens=10, ignore_eos=True))
        begun = time.monotonic()
        async with asyncio.timeout(60):
            async for _ in session.finalize([1, 2, 3], Sampling(max_tokens=10, ignore_eos=True)):
                pass
        assert time.monotonic() - begun > 10 * 5e-3 * 6
        state = engine.scheduler_state()
        assert state is not None
        assert state.step_ms == pytest.approx(30, rel=0.2)
        assert state.decode_ms == pytest.approx(5, rel=0.2), "its scheduler knows of no burst"
    finally:
        await engine.shutdown()
