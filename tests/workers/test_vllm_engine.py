"""The real engine: both kinds of session against a prompt sent at once, and what must not kill it."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import pytest
import pytest_asyncio

from pingpong_bus.errors import ConfigError, EngineError
from pingpong_bus.messages import DecodePace, Sampling, SessionKind
from pingpong_worker import calibration, calibration_sizes
from pingpong_worker.config import WorkerConfig
from pingpong_worker.engine import Session
from pingpong_worker.resuming import sampling_after
from pingpong_worker.vllm_engine import VllmEngine
from pingpong_worker.vllm_limits import CPU_GRID_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

KINDS: tuple[SessionKind, ...] = ("prefix-cache", "streaming-input")
GREEDY = Sampling(max_tokens=12, ignore_eos=True)
SEEDED = Sampling(max_tokens=12, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
PROMPT = [(index * 7919 + 13) % 40000 + 100 for index in range(330)]
_ids = itertools.count()


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def _cold_cache(vllm_engine: VllmEngine) -> AsyncIterator[None]:
    yield
    await vllm_engine.reset_prefix_cache()  # fails where a test has left a request or a session behind


def open_session(
    engine: VllmEngine,
    kind: SessionKind,
    sampling: Sampling = GREEDY,
    salt: str | None = None,
    pace: DecodePace | None = None,
    grid: int | None = None,
) -> Session:
    return engine.open(f"session-{next(_ids)}", cache_salt=salt, sampling=sampling, kind=kind, pace=pace, grid=grid)


class Answer:
    """All outputs of one session put together."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_token: int | None = None
        self.cached_tokens: int | None = None

    @classmethod
    async def of(cls, session: Session, ids: Sequence[int], sampling: Sampling) -> Answer:
        self = cls()
        async for output in session.finalize(ids, sampling):
            assert self.finish_reason is None, "nothing may follow the end"
            if output.cached_tokens is not None:
                assert self.cached_tokens is None, "given once"
                self.cached_tokens = output.cached_tokens
            self.ids += output.ids
            self.finish_reason, self.stop_token = output.finish_reason, output.stop_token
        return self


async def ask(
    engine: VllmEngine,
    cuts: Sequence[int] = (),
    *,
    kind: SessionKind = "prefix-cache",
    sampling: Sampling = GREEDY,
    prompt: Sequence[int] = PROMPT,
    salt: str | None = None,
    grid: int | None = None,
) -> Answer:
    """Append the prompt cut at `cuts`, and finalize with the rest."""
    session = open_session(engine, kind, sampling, salt, grid=grid)
    for start, end in itertools.pairwise([0, *cuts]):
        await session.append(prompt[start:end])
    return await Answer.of(session, prompt[cuts[-1] if cuts else 0 :], sampling)


@pytest.mark.parametrize("kind", KINDS)
async def test_appended_prompts_are_answered_like_prompts_sent_at_once(
    vllm_engine: VllmEngine, kind: SessionKind
) -> None:
    expected = await ask(vllm_engine)
    assert len(expected.ids) == GREEDY.max_tokens
    assert expected.finish_reason == "length"
    for cuts in ((1,), (32, 64, 96), (31, 200, 201, 329)):
        await vllm_engine.reset_prefix_cache()
        answer = await ask(vllm_engine, cuts, kind=kind)
        assert (answer.ids, answer.finish_reason, answer.stop_token) == (expected.ids, "length", None)


async def test_seeded_answers_do_not_depend_on_how_the_prompt_arrived(vllm_engine: VllmEngine) -> None:
    """One-shot is prefilled in parts here (330 tokens, budget 256), the appends are not; two at once share steps."""
    expected = await ask(vllm_engine, sampling=SEEDED)
    for cuts in ((200,), (64, 128, 192, 256, 320)):
        await vllm_engine.reset_prefix_cache()
        assert (await ask(vllm_engine, cuts, sampling=SEEDED)).ids == expected.ids
    assert (await ask(vllm_engine, sampling=SEEDED)).ids == expected.ids, "from the cache"
    other = Sampling(max_tokens=12, temperature=0.7, seed=8, ignore_eos=True)
    answers = await asyncio.gather(
        ask(vllm_engine, sampling=SEEDED, salt="a"),
        ask(vllm_engine, sampling=other, salt="b"),
        ask(vllm_engine, (100,), sampling=SEEDED, salt="c"),
    )
    assert answers[0].ids == answers[2].ids == expected.ids
    assert answers[1].ids != expected.ids


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_goes_on_from_any_of_its_tokens(vllm_engine: VllmEngine, kind: SessionKind) -> None:
    expected = (await ask(vllm_engine)).ids
    for cut in (1, 5, 11):
        await vllm_engine.reset_prefix_cache()
        rest = sampling_after(GREEDY, cut)
        answer = await ask(vllm_engine, kind=kind, prompt=[*PROMPT, *expected[:cut]], sampling=rest)
        assert (expected[:cut] + answer.ids, answer.finish_reason) == (expected, "length")
    seeded = await ask(vllm_engine, prompt=[*PROMPT, *expected[:3]], sampling=sampling_after(SEEDED, 3))
    again = await ask(vllm_engine, (64,), prompt=[*PROMPT, *expected[:3]], sampling=sampling_after(SEEDED, 3))
    assert len(seeded.ids) == SEEDED.max_tokens - 3
    assert again.ids == seeded.ids


async def test_seeds_matter(vllm_engine: VllmEngine) -> None:
    answers = [
        (await ask(vllm_engine, sampling=Sampling(max_tokens=12, temperature=0.9, seed=seed, ignore_eos=True))).ids
        for seed in (1, 2)
    ]
    assert answers[0] != answers[1]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(vllm_engine: VllmEngine, kind: SessionKind) -> None:
    whole = (await ask(vllm_engine)).ids
    stop = next(token for token in whole[1:] if token != whole[0])
    at = whole.index(stop)
    sampling = Sampling(max_tokens=12, stop_token_ids=[stop], ignore_eos=True)
    answer = await ask(vllm_engine, (300,), kind=kind, sampling=sampling)
    assert (answer.ids, answer.finish_reason, answer.stop_token) == (whole[:at], "stop", stop)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_models_own_end_is_found_without_a_tokenizer(vllm_engine: VllmEngine, kind: SessionKind) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(vllm_engine.limits.model)
    text = "<|im_start|>user\nAnswer with one word: what colour is the sky?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = await ask(vllm_engine, (5,), kind=kind, prompt=prompt, sampling=Sampling(max_tokens=60))
    assert (answer.finish_reason, answer.stop_token) == ("stop", tokenizer.eos_token_id)
    assert tokenizer.eos_token_id not in answer.ids
    on = Sampling(max_tokens=len(answer.ids) + 3, ignore_eos=True)
    further = await ask(vllm_engine, (5,), kind=kind, prompt=prompt, sampling=on)
    assert further.finish_reason == "length"
    assert further.ids[: len(answer.ids) + 1] == [*answer.ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_would_kill_the_engine_is_refused(vllm_engine: VllmEngine, kind: SessionKind) -> None:
    limits = vllm_engine.limits
    session = open_session(vllm_engine, kind)
    with pytest.raises(EngineError, match="no token ids"):
        await session.append([])
    with pytest.raises(EngineError, match=f"token id {limits.vocabulary_size} is not in"):
        await session.append([5, limits.vocabulary_size])
    with pytest.raises(EngineError, match="token id -1 is not in"):
        await session.append([-1])
    with pytest.raises(EngineError, match="do not fit"):
        await session.append([5] * limits.max_model_len)
    await session.append(PROMPT[:10])
    with pytest.raises(EngineError, match="a prompt of 20 tokens and an output of 4077 do not fit"):
        await Answer.of(session, PROMPT[10:20], Sampling(max_tokens=limits.max_model_len - 19))
    await session.abort()
    await vllm_engine.check()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_append_does_not_harm_the_answer(vllm_engine: VllmEngine, kind: SessionKind) -> None:
    expected = await ask(vllm_engine)
    await vllm_engine.reset_prefix_cache()
    session = open_session(vllm_engine, kind)
    await session.append(PROMPT[:32])
    append = asyncio.create_task(session.append(PROMPT[32:320]))
    await asyncio.sleep(0.01)  # into its engine step; the answer must be right wherever it is cut off
    append.cancel()
    answer = await Answer.of(session, PROMPT[320:], GREEDY)
    with suppress(asyncio.CancelledError):
        await append
    assert answer.ids == expected.ids


@pytest.mark.parametrize("kind", KINDS)
async def test_abort_frees_the_memory_and_ends_whoever_waits(vllm_engine: VllmEngine, kind: SessionKind) -> None:
    session = open_session(vllm_engine, kind)
    await session.append(PROMPT)
    long = Sampling(max_tokens=3000, ignore_eos=True)
    first = asyncio.Event()

    async def decode() -> None:
        async for _ in session.finalize(PROMPT[:5], long):
            first.set()

    task = asyncio.create_task(decode())
    await asyncio.wait_for(first.wait(), 30)
    await session.abort()
    with pytest.raises(EngineError, match="aborted"):
        await asyncio.wait_for(task, 30)
    await session.abort()
    await vllm_engine.reset_prefix_cache()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_consumer_that_goes_away_ends_the_request(vllm_engine: VllmEngine, kind: SessionKind) -> None:
    session = open_session(vllm_engine, kind)
    outputs = session.finalize(PROMPT, Sampling(max_tokens=3000, ignore_eos=True))
    async with aclosing(outputs):  # type: ignore[type-var]
        await anext(outputs)
    await vllm_engine.reset_prefix_cache()


async def test_salts_keep_their_caches_apart(vllm_engine: VllmEngine) -> None:
    block = vllm_engine.limits.block_size
    for kind in KINDS:
        await vllm_engine.reset_prefix_cache()
        assert (await ask(vllm_engine, kind=kind)).cached_tokens == 0
        assert (await ask(vllm_engine, kind=kind, salt="a")).cached_tokens == 0
        assert (await ask(vllm_engine, kind=kind, salt="b")).cached_tokens == 0
        whole = len(PROMPT) // block * block
        assert (await ask(vllm_engine, kind=kind, salt="a")).cached_tokens == whole
        await vllm_engine.reset_prefix_cache()
        assert (await ask(vllm_engine, kind=kind, salt="a")).cached_tokens == 0, "forgotten"


async def test_appends_are_what_the_answer_finds_in_the_cache(vllm_engine: VllmEngine) -> None:
    answer = await ask(vllm_engine, (100, 200, 321))
    assert answer.cached_tokens == 320


async def test_on_a_grid_whole_cells_are_found_and_by_the_same_grid_alone(vllm_engine: VllmEngine) -> None:
    expected = await ask(vllm_engine)
    first = await ask(vllm_engine, grid=64)
    assert (first.ids, first.cached_tokens) == (expected.ids, 0)
    assert (await ask(vllm_engine, grid=64)).cached_tokens == 320
    assert (await ask(vllm_engine, grid=128)).cached_tokens == 0
    await vllm_engine.reset_prefix_cache()
    for cuts, grid, found in (((100, 300), 64, 256), ((100, 300), 256, 256), ((200,), 256, 0)):
        answer = await ask(vllm_engine, cuts, grid=grid, salt=str((cuts, grid)), kind="streaming-input")
        assert (answer.ids, answer.cached_tokens) == (expected.ids, found)
    assert (await ask(vllm_engine)).cached_tokens == 0, "what is on no grid finds nothing of a grid"
    seeded = await ask(vllm_engine, sampling=SEEDED, grid=64)
    assert (await ask(vllm_engine, sampling=SEEDED, grid=64, salt="again")).ids == seeded.ids, "what a replay hangs on"


async def test_a_grid_that_the_engine_cannot_hold_is_refused(vllm_engine: VllmEngine) -> None:
    for grid, words in ((100, "not a multiple of vLLM's block_size, 32"), (512, "max_num_batched_tokens, 256")):
        with pytest.raises(EngineError, match=f"a grid of {grid} tokens: .*{words}"):
            open_session(vllm_engine, "prefix-cache", grid=grid)
        with pytest.raises(EngineError, match=f"a grid of {grid} tokens: .*{words}"):
            await vllm_engine.score(PROMPT, [5], grid=grid)


async def test_scores_are_those_that_the_answer_was_chosen_by(vllm_engine: VllmEngine) -> None:
    best = (await ask(vllm_engine)).ids
    for place in (0, 4):
        scores = await vllm_engine.score([*PROMPT, *best[:place]], [best[place], 17, 4711, best[place]])
        assert None not in scores
        assert scores[0] == scores[3] == max(score for score in scores if score is not None)
        assert sum(math.exp(score) for score in scores[:3] if score is not None) <= 1.0 + 1e-6
    gridded = [await vllm_engine.score(PROMPT, [best[0], 17], grid=64) for _ in range(2)]
    assert gridded[0] == gridded[1]
    assert gridded[0] == pytest.approx(await vllm_engine.score(PROMPT, [best[0], 17]), abs=1e-3)


async def test_an_append_that_is_held_back_beside_a_decode_and_then_cancelled_leaves_its_blocks(
    vllm_engine: VllmEngine,
) -> None:
    """What finalize does to an append in flight, in an engine that both agents share."""
    prompt = [(index * 5881 + 7) % 40000 + 100 for index in range(1500)]
    strict, long = DecodePace(itl_ratio=1.0), Sampling(max_tokens=2000, ignore_eos=True)
    upstream = open_session(vllm_engine, "prefix-cache", long, pace=strict)
    async with aclosing(upstream.finalize(PROMPT, long)) as decoding:  # type: ignore[type-var]
        await anext(decoding)
        session = open_session(vllm_engine, "prefix-cache", GREEDY, "beside")
        append = asyncio.create_task(session.append(prompt[:-1]))
        before = vllm_engine.scheduler_state()
        computed = before.append_tokens if before else 0
        async with asyncio.timeout(60):
            while (state := vllm_engine.scheduler_state()) is None or state.append_tokens < computed + 100:
                assert not append.done(), "it was not held back"
                await anext(decoding)
        append.cancel()
        with suppress(asyncio.CancelledError):
            await append
        answer = await Answer.of(session, prompt[-1:], GREEDY)
        assert answer.cached_tokens is not None
        assert answer.cached_tokens >= 64
        assert answer.cached_tokens % vllm_engine.limits.block_size == 0
    await vllm_engine.reset_prefix_cache()
    assert (await ask(vllm_engine, prompt=prompt)).ids == answer.ids


async def test_it_is_measured_with_appends_beside_a_decode(
    vllm_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_sizes, "_LONGEST_PREFILL_S", 1e-6)
    monkeypatch.setattr(calibration_sizes, "_BESIDE_STEPS", 2)
    monkeypatch.setattr(calibration, "_TOGETHER", (2,))
    monkeypatch.setattr(calibration, "_BUDGET_S", 120.0)
    before = vllm_engine.scheduler_state()
    figures = await calibration.calibrate(vllm_engine, (2.0,))
    assert [tokens for tokens, _ in figures.prefill] == [64], "none takes so little time"
    assert [(cached, rest) for cached, rest, _ in figures.finalize] == [(64, 8), (64, 64)]
    assert [answers for answers, _ in figures.batch] == [2]
    after = vllm_engine.scheduler_state()
    assert after is not None
    rode = after.append_tokens - (before.append_tokens if before else 0)
    assert rode >= sum(one.tokens for one in figures.beside) > 0


async def test_streaming_input_is_granted_only_where_it_is_safe(vllm_engine: VllmEngine) -> None:
    seeded = open_session(vllm_engine, "streaming-input", SEEDED)
    assert seeded.kind == "prefix-cache"
    await seeded.abort()
    limits = vllm_engine.limits
    room = limits.kv_tokens // limits.max_model_len - 1
    assert room >= 1
    sessions = [open_session(vllm_engine, "streaming-input") for _ in range(room)]
    assert {session.kind for session in sessions} == {"streaming-input"}
    for session in sessions:
        await session.append(PROMPT[:40])
    beside = open_session(vllm_engine, "streaming-input")
    assert beside.kind == "prefix-cache"
    assert (await Answer.of(beside, PROMPT, GREEDY)).finish_reason == "length", "paused sessions must not stop it"
    with pytest.raises(EngineError, match="in use"):
        await vllm_engine.reset_prefix_cache()
    for session in sessions:
        await session.abort()
    again = open_session(vllm_engine, "streaming-input")
    assert again.kind == "streaming-input"
    await again.abort()


async def test_limits(vllm_engine: VllmEngine) -> None:
    limits = vllm_engine.limits
    assert limits.max_model_len == 4096
    assert limits.vocabulary_size == 49152
    assert limits.block_size == 32
    assert limits.kv_tokens >= 2 * limits.max_model_len
    assert limits.sessions == KINDS
    assert limits.dtype == "float32"
    assert limits.has_tokenizer
    assert (limits.grid_tokens, limits.grid_refusal, limits.decode_first) == (CPU_GRID_TOKENS, "", True)
    assert not limits.batch_invariant
    assert limits.device.endswith(", 1 core")


@pytest.mark.parametrize(
    ("model", "engine_args", "field", "words"),
    [
        (None, {"max_model_length": 1}, "vllm.max_model_length", "max_model_len"),
        (None, {"model": "other"}, "vllm.model", "`model`"),
        (None, {"max_model_len": "long"}, "vllm.max_model_len", "integer"),
        (None, {"max_model_len": 10**6}, "vllm", "max_model_len"),
        (None, {"quantization": "none-such"}, "vllm", "quantization"),
        ("nobody/has-this-model", {}, "model", "was not found"),
    ],
)
async def test_a_configuration_that_cannot_work_is_named(
    vllm_engine: VllmEngine, model: str | None, engine_args: dict[str, Any], field: str, words: str
) -> None:
    config = WorkerConfig(
        name="bad",
        devices=["cpu:0"],
        model=model or vllm_engine.limits.model,
        engine_args=engine_args,
        slab_fd=-1,
        control="",
        bell="",
        supervisor_pid=0,
    )
    engine = VllmEngine(config)
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    await engine.shutdown()
    assert caught.value.field == field
    assert words in str(caught.value)
    assert len(str(caught.value)) < 450, str(caught.value)
    assert "\n" not in str(caught.value)
