"""The simulated engine's timing model: its tables, arrivals, and the H200's figures that benchmarks simulate with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import DecodePace, Sampling
from pingpong_worker.config import SimulatedSettings
from pingpong_worker.simulated_arrivals import Arrivals
from pingpong_worker.simulated_engine import check_settings
from pingpong_worker.simulated_messages import Chunk
from pingpong_worker.simulated_scheduler import SimulatedScheduler
from pingpong_worker.simulated_timing import TimingModel
from pingpongd.config import load_config

H200 = load_config(Path(__file__).parents[2] / "benchmarks" / "h200_simulated.toml").simulated


def chunk(name: str, tokens: int, max_tokens: int = 1, *, append: bool = False) -> Chunk:
    ids = [1000 + position % 900 for position in range(tokens)]
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return Chunk(name, ids, None, sampling, append, DecodePace(itl_ratio=10.0))


def steps_ms(scheduler: SimulatedScheduler) -> list[float]:
    """Run until there is nothing to do; ms of each step."""
    found = []
    while (step := scheduler.plan()) is not None:
        found.append(step.duration_s * 1e3)
        scheduler.commit(step)
    return found


def ttft_ms(scheduler: SimulatedScheduler, tokens: int) -> float:
    scheduler.add(chunk(f"of {tokens}", tokens))
    return TimingModel(H200).admission_s(tokens) * 1e3 + sum(steps_ms(scheduler))


@pytest.mark.parametrize(
    ("tokens", "cold", "finalize", "decode"), [(4352, 206, (14, 16), 8.6), (12544, 656, (17, 21.5), 8.95)]
)
def test_a_simulated_h200_takes_what_was_measured(
    tokens: int, cold: float, finalize: tuple[float, float], decode: float
) -> None:
    scheduler = SimulatedScheduler(H200)
    assert ttft_ms(scheduler, tokens) == pytest.approx(cold, rel=0.01)
    assert finalize[0] < ttft_ms(scheduler, tokens + 32) < finalize[1]
    scheduler.add(chunk("answer", tokens, 9))
    assert steps_ms(scheduler)[1:] == pytest.approx([decode] * 8, rel=0.01)


@pytest.mark.parametrize(("context", "mixed"), [(4096, 16.8), (12288, 21.0)])
def test_a_step_of_a_decode_beside_256_prompt_tokens_takes_what_was_measured(context: int, mixed: float) -> None:
    model = TimingModel(H200)
    work = model.work(context, 1, decode=True) + model.work(context, 256, decode=False)
    assert model.price(257, work, "beside") * 1e3 == pytest.approx(mixed, rel=0.1)


def test_a_table_of_rows_is_a_line_between_its_points_and_behind_them() -> None:
    model = TimingModel(SimulatedSettings(step_rows=[(2, 4.0), (4, 8.0)], time_scale=2.0))
    prices = [model.price(rows, 0.0, "decodes") * 1e3 for rows in (1, 2, 3, 4, 6)]
    assert prices == pytest.approx([8.0, 8.0, 12.0, 16.0, 24.0])


def test_chunks_of_a_request_keep_their_order_and_an_aborted_one_never_gets_through() -> None:
    arrivals = Arrivals(TimingModel(SimulatedSettings(request_ms=10.0, request_us=1000.0)))
    long, short, other = chunk("a", 90), chunk("a", 1), chunk("b", 5)
    for one in (long, short, other, chunk("c", 1)):
        arrivals.add(one, now=0.0)
    arrivals.drop("c")
    assert arrivals.take(0.0149) == []
    assert arrivals.wait_s(0.0) == pytest.approx(0.015)
    assert arrivals.take(0.2) == [other, long, short]
    assert arrivals.wait_s(0.2) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step_rows": [(4, 1.0), (2, 1.0)]}, "simulated.step_rows"),
        ({"decode_context_ns": 1.0}, "simulated.decode_context_ns"),
        ({"time_scale": 0.0}, "simulated.time_scale"),
        ({"request_us": -1.0}, "simulated.request_us"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(msgspec.structs.replace(SimulatedSettings(), **changes))
    assert caught.value.field == field
