"""What is measured of an engine: exact on a clock of the model's own, and given up cleanly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.errors import EngineError
from pingpong_bus.messages import EngineFigures, Sampling
from pingpong_worker.calibration import calibrate
from pingpong_worker.calibration_sizes import next_append, next_length
from pingpong_worker.calibrator import NOISY, Calibrator
from pingpong_worker.config import SimulatedSettings, WorkerConfig
from pingpong_worker.engine import OutputTokens, Session
from pingpong_worker.figures_file import FiguresKind, figures_kind, figures_path, load_figures, save_figures
from pingpong_worker.simulated_engine import SimulatedEngine
from pingpong_worker.timed_answer import TokenTimes, percentile, usual
from virtual_model import VirtualModel, virtual_engine, worker_config

GPU = SimulatedSettings(step_ms=8.0, row_us=50.0, context_ns=1.0, max_model_len=40_960, kv_tokens=100_000)
CPU = SimulatedSettings(step_ms=15.0, row_us=750.0, max_model_len=4096, max_num_batched_tokens=4096)
GREEDY = Sampling(max_tokens=8, ignore_eos=True)
FIGURES = EngineFigures(
    measured_at="2026-01-01T00:00:00+00:00", prefill=[(64, 3.5)], finalize=[], decode=[(76, 8.0)], batch=[]
)


def arrivals(*outputs: tuple[float, int]) -> TokenTimes:
    found = TokenTimes()
    for at, tokens in outputs:
        found.add(at, tokens)
    return found


# --------------------------------------------------------------------------------------------------------- pure parts


@given(st.floats(1e-6, 1.0), st.integers(1, 200_000))
def test_prompts_grow_until_one_takes_too_long(token_s: float, most: int) -> None:
    lengths: list[int] = []
    seconds = 0.0
    while (longer := next_length(lengths[-1] if lengths else 0, seconds, most)) is not None:
        lengths.append(longer)
        seconds = longer * token_s
    assert lengths[0] == min(64, most)
    assert all(longer > shorter for shorter, longer in pairwise(lengths))
    assert lengths[-1] <= most
    assert all(length * token_s <= 2.001 for length in lengths[1:])
    if token_s * most < 2 and most <= 98_304:
        assert lengths[-1] * 1.5 >= most, "a fast engine is measured at what it holds"


@given(st.integers(1, 500), st.integers(0, 10_000))
def test_appends_grow_until_one_is_long_enough(tokens_a_step: int, room: int) -> None:
    tokens: int | None = 16
    tried = []
    while tokens is not None:
        tried.append(tokens)
        assert len(tried) < 10
        tokens = next_append(tokens, tokens // tokens_a_step, room)
    assert all(tokens <= max(16, room) for tokens in tried)
    assert tried[-1] >= min(24 * tokens_a_step, room, 4096)


def test_what_tokens_took_is_told_by_when_they_came() -> None:
    found = arrivals((1.0, 1), (1.5, 0), (2.0, 2), (3.0, 1), (3.5, 1))
    assert (found.tokens, found.first, found.last) == (5, 1.0, 3.5)
    assert found.steps_ms() == [500.0, 500.0, 1000.0, 500.0]
    assert found.after(2).steps_ms() == [500.0]
    assert found.within(2.0, 3.0).steps_ms() == [1000.0]
    assert arrivals().steps_ms() == arrivals((1.0, 1)).steps_ms() == []


def test_percentiles() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.01)) == (50.0, 99.0, 3.0)
    assert percentile([], 0.5) == 0.0


def test_a_few_slow_steps_are_not_usual() -> None:
    assert usual([1.0, 90.0, 2.0, 3.0]) == 2.5
    assert usual([7.0]) == 7.0


# ------------------------------------------------------------------------------------------------- the virtual engine


async def test_figures_are_those_of_the_timing_model() -> None:
    async with virtual_engine(GPU) as engine:
        figures = await calibrate(engine, (1.2, 2.0))
    assert [tokens for tokens, _ in figures.prefill] == [64, 256, 1024, 4096, 12288, 32768]
    for tokens, ms in figures.prefill:
        steps = -(-tokens // GPU.max_num_batched_tokens)
        assert ms == pytest.approx(8 * steps + 0.05 * tokens + 1e-6 * tokens * (tokens + 1) / 2)
    assert [(cached, rest) for cached, rest, _ in figures.finalize] == [
        (context, rest) for context in (256, 4096, 30608) for rest in (8, 64)
    ]
    for cached, rest, ms in figures.finalize:
        assert ms == pytest.approx(8 + 0.05 * rest + 1e-6 * rest * (cached + rest / 2 + 0.5))
    assert [context for context, _ in figures.decode] == [300, 30652]
    for context, ms in figures.decode:
        assert ms == pytest.approx(8.05 + 1e-6 * context, rel=1e-4)
    assert [answers for answers, _ in figures.batch] == [2, 4, 8]
    for answers, ms in figures.batch:
        assert ms == pytest.approx(8 + 0.05 * answers, rel=1e-3)
    assert figures.step_p50_ms == pytest.approx(figures.decode[0][1], rel=1e-3)
    assert figures.step_p50_ms <= figures.step_p99_ms < 8.06
    assert not figures.cached


async def test_appends_beside_a_decode_take_what_its_pace_allows() -> None:
    async with virtual_engine(GPU) as engine:
        figures = await calibrate(engine, (1.2, 2.0))
    places = [(one.context, one.tokens, one.itl_ratio) for one in figures.beside]
    assert places == sorted(places)
    assert sorted(one.itl_ratio for one in figures.beside) == [1.2, 1.2, 2.0, 2.0]
    for one in figures.beside:
        assert 8.05 < one.decode_ms <= 8.06 * one.itl_ratio
        assert one.append_ms > one.tokens * 0.05
    tight, loose = ([one for one in figures.beside if one.itl_ratio == ratio] for ratio in (1.2, 2.0))
    for slow, fast in zip(tight, loose, strict=True):
        assert slow.append_ms / slow.tokens > 2 * fast.append_ms / fast.tokens
    assert max(one.decode_ms for one in loose) > 1.8 * 8.05, "it has gone up to its target"


async def test_a_slow_engine_is_measured_at_what_it_is_used_for() -> None:
    async with virtual_engine(CPU) as engine:
        figures = await calibrate(engine, (1.2, 2.0))
    lengths = [tokens for tokens, _ in figures.prefill]
    assert lengths[:3] == [64, 256, 1024]
    assert lengths[3] * 0.75 == pytest.approx(2000, rel=0.05), "what takes two seconds"
    assert len(lengths) == 4
    assert {one.itl_ratio for one in figures.beside} == {1.2, 2.0}


@pytest.mark.parametrize("session", ["prefix-cache", "streaming-input"])
@pytest.mark.parametrize(("room", "seats"), [(137, 1), (160, 2), (300, 4), (700, 64)])
async def test_no_engine_is_asked_for_more_than_it_holds(session: str, room: int, seats: int) -> None:
    settings = SimulatedSettings(max_model_len=room, kv_tokens=room + 16, max_num_seqs=seats)
    async with virtual_engine(settings, session=session) as engine:
        figures = await calibrate(engine)
    assert figures.prefill
    assert figures.decode
    assert all(answers <= seats for answers, _ in figures.batch)


async def test_an_engine_that_does_not_hold_appends_back_is_not_measured_with_them() -> None:
    async with virtual_engine(CPU, decode_first=False) as engine:
        assert (await calibrate(engine)).beside == []


async def test_too_small_an_engine_is_refused() -> None:
    async with virtual_engine(SimulatedSettings(max_model_len=64)) as engine:
        with pytest.raises(EngineError, match="64 tokens is too small"):
            await calibrate(engine)


async def test_an_engine_that_hands_over_whole_answers_is_refused() -> None:
    class AtOnce:
        """A session whose answer comes as one output."""

        def __init__(self, session: Session) -> None:
            self.kind, self.append, self.abort = session.kind, session.append, session.abort
            self._session = session

        async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
            outputs = [output async for output in self._session.finalize(ids, sampling)]
            yield OutputTokens([token for output in outputs for token in output.ids], "length")

    async with virtual_engine(CPU) as engine:
        opened = engine.open
        with (
            mock.patch.object(engine, "open", lambda *given, **more: AtOnce(opened(*given, **more))),
            pytest.raises(EngineError, match="all at once"),
        ):
            await calibrate(engine)


async def test_one_that_is_given_up_leaves_nothing_in_the_engine() -> None:
    model = VirtualModel()
    async with virtual_engine(CPU, model) as engine:
        whole = asyncio.create_task(calibrate(engine))
        turns = 0
        while not whole.done():
            await asyncio.sleep(0)
            turns += 1
        for share in (0.02, 0.3, 0.5, 0.7, 0.9):
            calibrating = asyncio.create_task(calibrate(engine))
            for _ in range(int(share * turns)):
                await asyncio.sleep(0)
            calibrating.cancel()
            await asyncio.wait([calibrating])
            assert calibrating.cancelled()
            alone = TokenTimes()
            session = engine.open("next", cache_salt=str(share), sampling=GREEDY)
            async for output in session.finalize(list(range(64)), GREEDY):
                alone.add(model.now, len(output.ids))
            assert alone.steps_ms() == pytest.approx([15.75] * 7), "no step held anything else"


# ------------------------------------------------------------------------------------------------ when it is measured


def kind(**changes: object) -> FiguresKind:
    values = {"device": "d", "model": "org/m", "dtype": "bfloat16", "engine": "vllm 0.32.0", "settings": "0", **changes}
    return FiguresKind(**values)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_figures_are_found_again_by_the_same_kind_of_engine() -> None:
    assert load_figures(kind()) is None
    save_figures(kind(), FIGURES)
    assert load_figures(kind()) == msgspec.structs.replace(FIGURES, cached=True)
    for field in ("device", "model", "dtype", "engine", "settings"):
        assert load_figures(kind(**{field: "other"})) is None


def test_broken_files_are_as_good_as_none(caplog: pytest.LogCaptureFixture) -> None:
    save_figures(kind(), FIGURES)
    path = figures_path(kind())
    whole = path.read_bytes()
    for content in (b"", whole[:-9], whole.replace(b'"format":1', b'"format":0'), whole.replace(b'"d"', b'"e"')):
        assert content != whole
        path.write_bytes(content)
        caplog.clear()
        assert load_figures(kind()) is None
        assert str(path) in caplog.text


WRONG: list[dict[str, object]] = [
    {"prefill": [[0, 0.0], [0, 1e308]]},
    {"prefill": []},
    {"prefill": [[64, 1e308]]},
    {"prefill": [[10**400, 1.0]]},
    {"decode": []},
    {"decode": [[300, -5.0], [300, 0.0]]},
    {"decode": [[300, 5.0], [300, 6.0]]},
    {"finalize": [[256, 8, 1.0], [256, 8, 1.0]]},
    {"finalize": [[256, 0, 1.0]]},
    {"batch": [[4, 1.0], [2, 1.0]]},
    {"beside": [{"context": -1, "tokens": 16, "append_ms": 1.0, "decode_ms": 1.0}]},
    {"beside": [{"context": 0, "tokens": 16, "append_ms": 0.0, "decode_ms": 1.0}]},
    {"beside": [{"context": 0, "tokens": 16, "append_ms": 1.0, "decode_ms": 1.0, "itl_ratio": 0.0}]},
    {"step_p50_ms": 2.0, "step_p99_ms": 1.0},
    {"measured_at": "yesterday"},
]


@pytest.mark.parametrize("changes", WRONG)
def test_what_cannot_have_been_measured_is_not_used(
    changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    save_figures(kind(), FIGURES)
    path = figures_path(kind())
    content = json.loads(path.read_bytes())
    content["figures"] |= changes
    path.write_text(json.dumps(content))
    assert load_figures(kind()) is None
    assert len(caplog.records) == 1
    assert f"{path} is not used" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"paces": (1.2, 3.0)},
        {"session": "streaming-input"},
        {"engine_args": {"max_num_seqs": 4}},
        {"environment": {"A": "1"}},
        {"decode_first": False},
    ],
)
def test_what_the_engine_was_started_with_is_part_of_its_kind(changes: dict[str, object]) -> None:
    def of(config: WorkerConfig) -> FiguresKind:
        return figures_kind(SimulatedEngine(config).limits, config)

    assert of(worker_config(CPU)) == of(worker_config(CPU, name="another", bell="b"))
    assert of(worker_config(CPU)) != of(worker_config(GPU))
    assert of(worker_config(CPU)) != of(worker_config(CPU, **changes))


class Failing(SimulatedEngine):
    """Fails as it is measured."""

    def __init__(self, error: Exception) -> None:
        super().__init__(worker_config(CPU))
        self._failure = error

    async def reset_prefix_cache(self) -> None:
        raise self._failure


@pytest.mark.parametrize("error", [EngineError("the cache\nis in use."), ZeroDivisionError("oops")])
async def test_a_failure_costs_the_figures_only(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    calibrator = Calibrator(Failing(error), worker_config(CPU))
    assert await calibrator.at_start() is None
    warning = next(record for record in caplog.records if record.levelname == "WARNING")
    assert " ".join(str(error).split()) in warning.message
    assert calibrator.kept() is None
    with pytest.raises(EngineError, match=str(error)):
        await calibrator.measure()


async def test_it_gives_way_at_once_and_is_one_at_a_time() -> None:
    async with virtual_engine(CPU) as engine:
        calibrator = Calibrator(engine, worker_config(CPU))
        measuring = asyncio.create_task(calibrator.measure())
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already"):
            await calibrator.measure()
        for _ in range(3):
            await asyncio.sleep(0)
            calibrator.give_way()
        with pytest.raises(EngineError, match="gave way"):
            await measuring
        calibrator.give_way()  # to nothing
        figures = await calibrator.measure()
        assert calibrator.kept() == msgspec.structs.replace(figures, cached=True)


def measured(p99_ms: float) -> Callable[..., Coroutine[None, None, EngineFigures]]:
    async def calibrate(*_: object) -> EngineFigures:
        return msgspec.structs.replace(FIGURES, step_p50_ms=10.0, step_p99_ms=p99_ms)

    return calibrate


async def test_noisy_figures_are_used_and_measured_again_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calibrator = Calibrator(SimulatedEngine(worker_config(CPU)), worker_config(CPU))
    monkeypatch.setattr("pingpong_worker.calibrator.calibrate", measured(10 * NOISY))
    await calibrator.at_start()
    assert calibrator.kept() is not None
    assert not caplog.records
    monkeypatch.setattr("pingpong_worker.calibrator.calibrate", measured(10 * NOISY + 1))
    assert await calibrator.at_start() is not None
    assert calibrator.kept() is None, "what was kept before is not believed either"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("ratio", [1.0, 2 * NOISY])
async def test_figures_serve_where_nothing_can_be_kept(
    ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    calibrator = Calibrator(SimulatedEngine(worker_config(CPU)), worker_config(CPU))
    monkeypatch.setattr("pingpong_worker.calibrator.calibrate", measured(10 * ratio))
    assert calibrator.kept() is None
    assert await calibrator.at_start() is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
