"""The simulated engine in its child process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import msgspec
import psutil
import pytest

from pingpong_bus.errors import ConfigError, EngineError
from pingpong_bus.messages import DecodePace, Sampling, SessionKind
from pingpong_worker.config import SimulatedSettings, WorkerConfig
from pingpong_worker.engine import Engine, OutputTokens
from pingpong_worker.simulated_engine import SimulatedEngine

HANG_S = 20
GREEDY = Sampling(max_tokens=24, ignore_eos=True)
KINDS: list[SessionKind] = ["prefix-cache", "streaming-input"]
PROMPT = [(7 * index) % 250 for index in range(150)]


def make_engine(**settings: object) -> SimulatedEngine:
    fast = {"step_ms": 0.0, "row_us": 0.0, **settings}
    config = WorkerConfig(
        name="g0",
        devices=["cpu:0"],
        engine="simulated",
        simulated=SimulatedSettings(**fast),  # type: ignore[arg-type]
        slab_fd=-1,
        control="",
        bell="",
        supervisor_pid=os.getpid(),
    )
    return SimulatedEngine(config)


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    engine = make_engine()
    await engine.start()
    yield engine
    await engine.shutdown()


async def answer(
    engine: Engine,
    prompt: list[int],
    *,
    cuts: tuple[int, ...] = (),
    kind: SessionKind = "prefix-cache",
    sampling: Sampling = GREEDY,
    salt: str | None = None,
    name: str = "s",
    grid: int | None = None,
) -> list[OutputTokens]:
    """Append up to each cut, then finalize with the rest."""
    session = engine.open(name, cache_salt=salt, sampling=sampling, kind=kind, grid=grid)
    at = 0
    async with asyncio.timeout(HANG_S):
        for cut in cuts:
            await session.append(prompt[at:cut])
            at = cut
        outputs = [tokens async for tokens in session.finalize(prompt[at:], sampling)]
    await session.abort()
    return outputs


def ids(outputs: list[OutputTokens]) -> list[int]:
    return [token for tokens in outputs for token in tokens.ids]


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_depend_on_the_prompt_alone(engine: SimulatedEngine, kind: SessionKind) -> None:
    plain = await answer(engine, PROMPT)
    assert len(ids(plain)) == 24
    assert plain[-1].finish_reason == "length"
    grown = await answer(engine, PROMPT, cuts=(40, 41, 128), kind=kind, salt="other")
    assert ids(grown) == ids(plain)
    assert ids(await answer(engine, [*PROMPT[:-1], 251])) != ids(plain)


async def test_cached_tokens_are_whole_blocks_of_the_same_salt(engine: SimulatedEngine) -> None:
    first = await answer(engine, PROMPT, salt="a")
    again = await answer(engine, PROMPT, salt="a")
    salted = await answer(engine, PROMPT, salt="b")
    assert [outputs[0].cached_tokens for outputs in (first, again, salted)] == [0, 144, 0]
    assert all(tokens.cached_tokens is None for tokens in again[1:])
    await engine.reset_prefix_cache()
    assert (await answer(engine, PROMPT, salt="a"))[0].cached_tokens == 0


async def test_prefix_session_finds_its_own_appends(engine: SimulatedEngine) -> None:
    outputs = await answer(engine, PROMPT, cuts=(100,))
    assert outputs[0].cached_tokens == 96


async def test_a_prompt_of_whole_blocks_leaves_one_token_to_compute(engine: SimulatedEngine) -> None:
    await answer(engine, PROMPT[:64])
    assert (await answer(engine, PROMPT[:64]))[0].cached_tokens == 48


async def test_least_recently_used_blocks_are_evicted() -> None:
    engine = make_engine(kv_tokens=256, max_model_len=256)
    await engine.start()
    try:
        await answer(engine, PROMPT)
        await answer(engine, PROMPT[::-1])
        outputs = await answer(engine, PROMPT)
        assert outputs[0].cached_tokens == 0
    finally:
        await engine.shutdown()


async def test_seed_decides_where_there_is_a_temperature(engine: SimulatedEngine) -> None:
    def seeded(seed: int) -> Sampling:
        return Sampling(max_tokens=24, ignore_eos=True, temperature=0.8, seed=seed)

    one = ids(await answer(engine, PROMPT, sampling=seeded(1)))
    assert ids(await answer(engine, PROMPT, sampling=seeded(1), cuts=(80,))) == one
    assert ids(await answer(engine, PROMPT, sampling=seeded(2))) != one


async def test_an_answer_may_end_by_itself(engine: SimulatedEngine) -> None:
    ends = []
    for first in range(20):
        outputs = await answer(engine, [first, 2, 3], sampling=Sampling(max_tokens=100), name=f"s{first}")
        ends.append((outputs[-1].finish_reason, outputs[-1].stop_token, outputs[-1].ids))
    assert ("stop", 257, []) in ends
    assert any(reason == "length" for reason, _, _ in ends)


async def test_stop_tokens_are_not_part_of_the_answer(engine: SimulatedEngine) -> None:
    plain = ids(await answer(engine, PROMPT))
    stop = plain[5]
    sampling = Sampling(max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    outputs = await answer(engine, PROMPT, sampling=sampling)
    assert ids(outputs) == plain[: plain.index(stop)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", stop)


async def test_many_sessions_at_once_answer_as_if_alone() -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=32, block_size=8)
    await engine.start()
    try:
        prompts = [[index, *PROMPT[: 20 + 7 * index]] for index in range(8)]
        alone = [ids(await answer(engine, prompt, salt="alone")) for prompt in prompts]
        together = await asyncio.gather(
            *(
                answer(engine, prompt, cuts=(10,) if index % 2 else (), name=f"s{index}")
                for index, prompt in enumerate(prompts)
            )
        )
        assert [ids(outputs) for outputs in together] == alone
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
async def test_finalize_overtakes_a_cancelled_append(kind: SessionKind) -> None:
    engine = make_engine(step_ms=5.0, max_num_batched_tokens=16)
    await engine.start()
    try:
        plain = ids(await answer(engine, PROMPT, salt="plain"))
        session = engine.open("s", cache_salt=None, sampling=GREEDY, kind=kind)
        append = asyncio.create_task(session.append(PROMPT[:100]))
        await asyncio.sleep(0.01)
        append.cancel()
        await asyncio.wait({append})
        async with asyncio.timeout(HANG_S):
            outputs = [tokens async for tokens in session.finalize(PROMPT[100:], GREEDY)]
        assert ids(outputs) == plain
    finally:
        await engine.shutdown()


async def test_a_cancelled_append_of_a_prefix_session_is_not_computed_to_its_end() -> None:
    engine = make_engine(step_ms=50.0, max_num_batched_tokens=1, max_num_seqs=1)
    await engine.start()
    try:
        session = engine.open("s", cache_salt=None, sampling=GREEDY, kind="prefix-cache")
        append = asyncio.create_task(session.append([1] * 2000))  # 100 s of steps, in the only seat
        await asyncio.sleep(0.02)
        append.cancel()
        await asyncio.wait({append})
        assert len(ids(await answer(engine, [1], sampling=Sampling(max_tokens=2, ignore_eos=True), name="t"))) == 2
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
async def test_aborted_sessions_make_room(kind: SessionKind) -> None:
    engine = make_engine(max_num_seqs=1)
    await engine.start()
    try:
        endless = Sampling(max_tokens=3000, ignore_eos=True)
        session = engine.open("endless", cache_salt=None, sampling=endless, kind=kind)
        await session.append(PROMPT)
        async with asyncio.timeout(HANG_S):
            async for _ in session.finalize([1], endless):
                break
        await session.abort()
        await session.abort()
        assert len(ids(await answer(engine, PROMPT))) == 24
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "what"), [([1] * 4090, "4096"), ([5000], "vocabulary")])
async def test_what_can_never_run_is_refused(
    engine: SimulatedEngine, kind: SessionKind, prompt: list[int], what: str
) -> None:
    with pytest.raises(EngineError, match=what):
        await answer(engine, prompt, kind=kind)
    assert len(ids(await answer(engine, PROMPT, kind=kind))) == 24


async def test_a_killed_child_fails_everything_that_waits() -> None:
    engine = make_engine(step_ms=50.0)
    await engine.start()
    try:
        await engine.check()
        waiting = asyncio.create_task(answer(engine, PROMPT))
        await asyncio.sleep(0.02)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="-9"):
            await waiting
        with pytest.raises(EngineError):
            await engine.check()
        with pytest.raises(EngineError):
            await answer(engine, PROMPT)
        with pytest.raises(EngineError):
            await engine.reset_prefix_cache()
    finally:
        await engine.shutdown()


async def test_shutdown_ends_the_child_and_may_be_repeated() -> None:
    engine = make_engine()
    await engine.shutdown()
    await engine.start()
    pid = engine.pid
    await engine.shutdown()
    await engine.shutdown()
    assert pid is not None
    assert not psutil.pid_exists(pid)


def test_it_says_that_it_guesses_no_tokens_where_it_is_asked_to() -> None:
    plain = make_engine()
    asked = SimulatedEngine(msgspec.structs.replace(plain._config, speculation_tokens=8))
    assert asked.limits.speculation_refusal == "the simulated engine guesses no tokens."
    assert plain.limits.speculation_refusal == ""


async def test_a_grid_is_offered_in_whole_blocks_that_a_step_can_hold() -> None:
    assert make_engine().limits.grid_tokens == 256
    assert make_engine(max_num_batched_tokens=100, block_size=16).limits.grid_tokens == 96
    refused = make_engine(max_num_batched_tokens=10, block_size=16).limits
    assert refused.grid_tokens == 0
    assert "blocks of 16" in refused.grid_refusal


async def test_sessions_on_a_grid_share_the_cache_among_themselves_alone(engine: SimulatedEngine) -> None:
    plain = await answer(engine, PROMPT)
    first = await answer(engine, PROMPT, grid=64)
    assert first[0].cached_tokens == 0
    assert ids(first) == ids(plain)
    assert (await answer(engine, PROMPT, grid=64, cuts=(40, 100)))[0].cached_tokens == 128
    assert (await answer(engine, PROMPT, grid=32))[0].cached_tokens == 0
    assert (await answer(engine, PROMPT))[0].cached_tokens == 144


async def test_a_grid_that_cannot_be_held_is_refused(engine: SimulatedEngine) -> None:
    with pytest.raises(EngineError, match="blocks of 16"):
        await answer(engine, PROMPT, grid=24)
    with pytest.raises(EngineError, match="a step holds 2048"):
        await answer(engine, PROMPT, grid=4096)


async def test_the_token_that_follows_is_the_likeliest(engine: SimulatedEngine) -> None:
    (token, *_) = ids(await answer(engine, PROMPT))
    best, other, never = await engine.score(PROMPT, [token, 256 + 1, 300])
    assert best is not None
    assert other is not None
    assert never is None
    assert other < best < 0
    assert await engine.score(PROMPT, [token], grid=64) == [best]


async def test_the_scheduler_shows_what_it_does() -> None:
    engine = make_engine(step_ms=1.0, row_us=50.0)
    await engine.start()
    try:
        assert engine.scheduler_state() is None
        decoding = engine.open("d", cache_salt=None, sampling=GREEDY, pace=DecodePace(itl_ratio=2))
        growing = engine.open("a", cache_salt=None, sampling=GREEDY)
        async with asyncio.timeout(HANG_S):
            appending: asyncio.Task[int | None] | None = None
            async for _ in decoding.finalize(PROMPT, GREEDY):
                appending = appending or asyncio.create_task(growing.append(PROMPT[::-1]))
            assert appending is not None
            await appending
        state = engine.scheduler_state()
        assert state is not None
        assert state.steps == 23
        assert state.decode_ms == pytest.approx(1.05)
        assert state.target_ms == pytest.approx(2.1)
        assert 0 < state.append_tokens <= 150
    finally:
        await engine.shutdown()


async def test_it_tells_how_much_of_its_memory_is_held_until_nothing_is() -> None:
    engine = make_engine(step_ms=5.0, kv_tokens=1600, block_size=16)

    async def usage_is(held: float) -> None:
        async with asyncio.timeout(HANG_S):
            while (state := engine.scheduler_state()) is None or state.kv_usage != pytest.approx(held):
                await asyncio.sleep(0.005)

    await engine.start()
    try:
        endless = msgspec.structs.replace(GREEDY, max_tokens=1000 - len(PROMPT))
        session = engine.open("d", cache_salt=None, sampling=endless)
        answer = session.finalize(PROMPT, endless)
        await anext(answer)
        await usage_is(63 / 100)  # blocks of its whole length
        await answer.aclose()
        await usage_is(0)
    finally:
        await engine.shutdown()


@pytest.mark.parametrize(("name", "value"), [("block_size", 0), ("step_ms", -1.0), ("vocabulary_size", 100)])
async def test_settings_that_cannot_work_are_named(name: str, value: float) -> None:
    engine = make_engine(**{name: value})
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    assert caught.value.field == f"simulated.{name}"
