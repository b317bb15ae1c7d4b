"""What surrounds the engine, without one: guards, settings, versions, the plugin, fixes for old versions."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pingpong_bus.errors import ConfigError, EngineError, EngineLost
from pingpong_bus.messages import DecodePace, EngineLimits, Sampling, TokenizerSource
from pingpong_worker import vllm_engine, vllm_plugin, vllm_settings, vllm_start, vllm_tokenizer
from pingpong_worker.config import WorkerConfig
from pingpong_worker.engine import OutputTokens
from pingpong_worker.main import vllm_parts
from pingpong_worker.prompt import Prompts
from pingpong_worker.vllm_guards import (
    Reservations,
    check_length,
    check_not_empty,
    check_vocabulary,
    session_kind,
    stop_ids,
)
from pingpong_worker.vllm_handle import Handling, VllmHandle
from pingpong_worker.vllm_scoring import score_next
from pingpong_worker.vllm_sessions import PrefixCacheSession, StreamingInputSession
from pingpong_worker.vllm_settings import (
    DETERMINISTIC_INDUCTOR,
    check_argument_names,
    engine_arguments,
    engine_environment,
)
from pingpong_worker.vllm_versions import check_supported, parse_version, prompt_maker, scheduler_class

# --------------------------------------------------------------------------------------------------------------- guards


def test_guards_refuse_what_kills_an_engine() -> None:
    with pytest.raises(EngineError, match="no token ids"):
        check_not_empty([])
    check_vocabulary([0, 9], 10)
    with pytest.raises(EngineError, match="token id 10 "):
        check_vocabulary([3, 10], 10)
    check_length(90, 10, 100)
    with pytest.raises(EngineError, match="a prompt of 91 tokens and an output of 10 do not fit in the engine's 100"):
        check_length(91, 10, 100)


def test_only_greedy_sampling_goes_into_a_resumable_request() -> None:
    assert session_kind("streaming-input", Sampling(max_tokens=1)) == "streaming-input"
    assert session_kind("streaming-input", Sampling(max_tokens=1, temperature=0.1)) == "prefix-cache"
    assert session_kind("prefix-cache", Sampling(max_tokens=1)) == "prefix-cache"
    assert session_kind("streaming-input", Sampling(max_tokens=1), 256) == "prefix-cache", "it would leave the grid"


def test_stop_ids_are_the_models_unless_they_are_to_be_ignored() -> None:
    assert stop_ids(Sampling(max_tokens=1, stop_token_ids=[7]), {2, 3}) == [2, 3, 7]
    assert stop_ids(Sampling(max_tokens=1, stop_token_ids=[7], ignore_eos=True), {2, 3}) == [7]


def test_reservations_leave_room_for_one_more_request_at_full_length() -> None:
    reservations = Reservations(kv_tokens=1024, max_model_len=250, block_size=32, max_num_seqs=32)
    assert [reservations.take(name) for name in "abcd"] == [True, True, True, False], "4 of 256 fit, one stays free"
    reservations.give_back("x")
    assert not reservations.take("d")
    reservations.give_back("b")
    assert reservations.take("d")
    assert not reservations.take("e")


def test_reservations_leave_room_for_all_prefix_cache_sessions_that_are_open() -> None:
    reservations = Reservations(kv_tokens=1024, max_model_len=256, block_size=32, max_num_seqs=32)
    for name in "pqr":
        reservations.add_beside(name)
    assert reservations.take("a"), "3 and 1 of 4"
    assert not reservations.take("b"), "3 and 2"
    reservations.give_back("p")
    assert reservations.take("b"), "2 and 2"
    for name in "qr":
        reservations.give_back(name)
    assert [reservations.take(name) for name in "cd"] == [True, False], "one stays free"


def test_reservations_take_at_most_half_of_the_engines_sequences() -> None:
    roomy = Reservations(kv_tokens=2**20, max_model_len=64, block_size=32, max_num_seqs=5)
    for at in range(10**5):  # they fill the engine's sequences, not its cache
        roomy.add_beside(str(at))
    assert [roomy.take(name) for name in "abc"] == [True, True, False]
    assert not Reservations(kv_tokens=64, max_model_len=64, block_size=32, max_num_seqs=5).take("a")


# ----------------------------------------------------------------------------------------------- sessions, faked engine


class FakeLlm:
    """An `AsyncLLM` whose outputs are scripted; it extends the prompts that it is given, as vLLM does."""

    errored = False

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)
        self.requests: list[tuple[Any, Any, str]] = []
        self.chunks: list[Any] = []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.requests.append((prompt, params, request_id))
        if hasattr(prompt, "__anext__"):
            async for chunk in prompt:
                self.chunks.append(chunk)
            for output in self.outputs:
                yield output
        else:
            prompt["ids"].append(-1)
            yield self.outputs.pop(0)

    async def abort(self, request_id: str) -> None:
        pass


def output(ids: list[int], reason: str | None = None, stop: int | None = None, cached: int = 0) -> Any:
    completion = SimpleNamespace(token_ids=ids, finish_reason=reason, stop_reason=stop)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=cached)


def handle(llm: FakeLlm) -> VllmHandle:
    limits = EngineLimits(
        engine="fake", model="m", max_model_len=100, vocabulary_size=50, block_size=4, kv_tokens=400, max_num_seqs=4
    )
    return VllmHandle(
        llm=llm,
        limits=limits,
        end_ids=frozenset({2}),
        make_prompt=lambda ids, salt: {"ids": list(ids), "salt": salt},
        make_params=lambda **given: given,
        make_chunk=lambda prompt, params: (prompt, params),
        refusals=(ValueError,),
    )


async def test_prompts_are_copies_and_appends_carry_their_mark() -> None:
    llm = FakeLlm([output([9], "length"), output([9], "length"), output([5], "length")])
    closed: list[bool] = []
    session = PrefixCacheSession(handle(llm), "s", Handling(cache_salt="salt"), lambda: closed.append(True))
    mine = [1, 2, 3]
    await session.append(mine)
    await session.append([4])
    assert closed == []
    answer = [item async for item in session.finalize([5], Sampling(max_tokens=1, seed=3, temperature=1.0))]
    assert answer == [OutputTokens([5], "length", None, 0)]
    assert closed == [True]
    assert mine == [1, 2, 3]
    assert [prompt["ids"] for prompt, _, _ in llm.requests] == [[1, 2, 3, -1], [1, 2, 3, 4, -1], [1, 2, 3, 4, 5, -1]]
    marks = [params.get("extra_args") for _, params, _ in llm.requests]
    assert marks == [{"pingpong": {"append": True}}] * 2 + [{"pingpong": {"itl_ratio": 1.2}}]
    assert "seed" not in llm.requests[0][1], "an append must not draw"
    assert len({name for _, _, name in llm.requests}) == 3


@pytest.mark.parametrize(
    ("handling", "append", "answer"),
    [
        (Handling(), {"append": True}, {"itl_ratio": 1.2}),
        (
            Handling(pace=DecodePace(itl_ratio=2, itl_target_ms=9)),
            {"append": True},
            {"itl_ratio": 2, "itl_target_ms": 9},
        ),
        (Handling(grid=256), {"append": True, "grid": 256}, {"itl_ratio": 1.2, "grid": 256}),
    ],
)
def test_marks_say_what_the_scheduler_has_to_know(
    handling: Handling, append: dict[str, Any], answer: dict[str, Any]
) -> None:
    engine = handle(FakeLlm([]))
    sampling = Sampling(max_tokens=5)
    assert engine.append_params(handling)["extra_args"] == {"pingpong": append}
    assert engine.answer_params(handling, sampling)["extra_args"] == {"pingpong": answer}
    score = {"grid": handling.grid} if handling.grid else {}
    assert engine.score_params(handling, [1])["extra_args"] == {"pingpong": score}


def test_what_was_computed_on_a_grid_is_found_on_that_grid_only() -> None:
    salts = [Handling(cache_salt=salt, grid=grid).salt for salt in (None, "s") for grid in (None, 256, 512)]
    assert salts == [None, "grid256", "grid512", "s", "s/grid256", "s/grid512"]


async def test_sessions_give_their_salt_to_every_request() -> None:
    llm = FakeLlm([output([9], "length"), output([5], "length")])
    session = PrefixCacheSession(handle(llm), "s", Handling(cache_salt="x", grid=4), lambda: None)
    await session.append([1, 2, 3, 4])
    async for _ in session.finalize([5], Sampling(max_tokens=1)):
        pass
    assert [prompt["salt"] for prompt, _, _ in llm.requests] == ["x/grid4"] * 2


async def test_scores_are_looked_up_among_what_the_engine_says() -> None:
    position = {
        7: SimpleNamespace(logprob=-0.5),
        9: SimpleNamespace(logprob=-2.0),
        3: SimpleNamespace(logprob=-math.inf),
    }
    llm = FakeLlm([scored([position]), scored([position])])
    engine = handle(llm)
    assert await score_next(engine, [1, 2], [9, 7, 9, 3, 4], None) == [-2.0, -0.5, -2.0, None, None]
    assert await score_next(engine, [1, 2], [7], 4) == [-0.5]
    (prompt, params, name), (gridded, on_grid, other) = llm.requests
    assert (params["max_tokens"], params["temperature"]) == (1, 0.0)
    assert (params["logprob_token_ids"], params["logprobs"]) == ([3, 4, 7, 9], 4)
    assert on_grid["extra_args"] == {"pingpong": {"grid": 4}}
    assert len({prompt["salt"], gridded["salt"], None}) == 3, "nothing may be found in the cache"
    assert name != other
    with pytest.raises(EngineError, match="token id 50 is not in"):
        await score_next(engine, [1], [50], None)
    with pytest.raises(EngineError, match="do not fit"):
        await score_next(engine, [1] * 100, [1], None)


def scored(logprobs: list[Any]) -> Any:
    given = output([7], "length")
    given.outputs[0].logprobs = logprobs
    return given


async def test_merged_outputs_of_chunks_are_told_apart_by_counting() -> None:
    """The sample of a cancelled append arrives in one output with the first tokens of the answer."""
    llm = FakeLlm([output([41, 42, 7, 8], None, cached=4), output([9, 2], "stop", 2)])
    closed: list[bool] = []
    session = StreamingInputSession(handle(llm), "s", Handling(), lambda: closed.append(True))
    for ids in ([1, 2], [3]):  # appends whose waiting is cut off at once
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.append(ids), 0.001)
    answer = [item async for item in session.finalize([4], Sampling(max_tokens=5))]
    assert answer == [OutputTokens([7, 8], None, None, 4), OutputTokens([9], "stop", 2, None)]
    assert [prompt["ids"] for prompt, _ in llm.chunks] == [[1, 2], [3], [4]]
    assert [params["max_tokens"] for _, params in llm.chunks] == [1, 1, 5]
    assert closed == [True]


async def test_refusals_become_engine_errors() -> None:
    class Refusing(FakeLlm):
        async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
            raise ValueError("no")
            yield

    llm = Refusing([])
    with pytest.raises(EngineError, match="refused or failed the request: no"):
        await PrefixCacheSession(handle(llm), "s", Handling(), lambda: None).append([1])
    streaming = StreamingInputSession(handle(llm), "s", Handling(), lambda: None)
    with pytest.raises(EngineError, match="refused or failed the request: no"):
        await streaming.append([1])
    await streaming.abort()


@pytest.mark.parametrize("kind", [PrefixCacheSession, StreamingInputSession])
async def test_a_request_that_the_engine_aborts_is_lost(
    kind: type[PrefixCacheSession] | type[StreamingInputSession],
) -> None:
    """An engine that is told to end aborts its requests before it is dead."""
    engine = handle(FakeLlm([output([7]), output([], "abort")]) if kind is StreamingInputSession else Shutting([]))
    session = kind(engine, "s", Handling(), lambda: None)
    engine.check()
    with pytest.raises(EngineLost, match="told to shut down"):
        async for _ in session.finalize([1], Sampling(max_tokens=5)):
            pass
    with pytest.raises(EngineLost):
        engine.check()
    await session.abort()


class Shutting(FakeLlm):
    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        yield output([7])
        yield output([], "abort")


async def test_a_request_that_we_abort_is_none_of_the_engines_faults() -> None:
    engine = handle(Shutting([]))
    session = PrefixCacheSession(engine, "s", Handling(), lambda: None)
    outputs = session.finalize([1], Sampling(max_tokens=5))
    await anext(outputs)
    await session.abort()
    with pytest.raises(EngineError, match="aborted") as caught:
        await anext(outputs)
    assert not isinstance(caught.value, EngineLost)
    engine.check()


async def test_whatever_a_dead_engine_raises_is_its_death() -> None:
    class Dead(FakeLlm):
        errored = True

        async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
            raise ValueError("Socket operation on non-socket")
            yield

        async def abort(self, request_id: str) -> None:
            raise ValueError("Socket operation on non-socket")

    engine = handle(Dead([]))
    for session in (
        PrefixCacheSession(engine, "s", Handling(), lambda: None),
        StreamingInputSession(engine, "s", Handling(), list),
    ):
        with pytest.raises(EngineLost, match="has died"):
            await session.append([1])
        await session.abort()
    with pytest.raises(EngineLost, match="has died"):
        engine.check()


@pytest.mark.parametrize(("bug", "words"), [(True, "failed the request: oops"), (False, "before its answer")])
async def test_whoever_waits_for_a_session_learns_of_its_end_however_it_came(bug: bool, words: str) -> None:
    class Ending(FakeLlm):
        async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
            await anext(prompt)
            if bug:
                raise ZeroDivisionError("oops")
            return
            yield

    session = StreamingInputSession(handle(Ending([])), "s", Handling(), lambda: None)
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match=words):
            await session.append([1])
        with pytest.raises(EngineError, match=words):
            async for _ in session.finalize([2], Sampling(max_tokens=1)):
                pass


# ------------------------------------------------------------------------------------------------------------- starting


class BadLibrary:
    """A module whose import ends in a native library that does not fit."""

    @property
    def AsyncEngineArgs(self) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")


@pytest.mark.parametrize(("module", "words"), [(None, "halted"), (BadLibrary(), "operator torchvision::nms")])
async def test_a_vllm_that_cannot_be_imported_is_a_fault_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: object, words: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(vllm_engine, "installed_version", lambda: (0, 32, 0))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    bad = msgspec.structs.replace(config(["cpu:0"]), model=str(tmp_path))
    with pytest.raises(ConfigError, match=f"vLLM cannot be imported: .*{words}.*pip uninstall torchvision"):
        await vllm_engine.VllmEngine(bad).start()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Engine core initialization failed."), "OutOfMemoryError: CUDA out of memory. Tried 2.00 GiB."),
        (RuntimeError("Engine core initialization failed."), "ValueError: No available memory for the cache blocks."),
        (RuntimeError("Engine core initialization failed."), "ValueError: 3 GiB KV cache is needed, more than 1 GiB."),
        (OSError(12, "Cannot allocate memory"), ""),
        (MemoryError(), ""),
    ],
)
def test_no_memory_can_never_work_and_is_said_in_one_sentence(error: Exception, reason: str) -> None:
    found = vllm_start.start_error(error, reason, config(["cpu:0"]))
    assert isinstance(found, ConfigError)
    assert found.message.startswith("the model and its KV cache do not fit in memory: ")
    assert "\n" not in str(found)


def test_a_killed_engine_may_have_run_out_of_memory() -> None:
    words = "Engine core initialization failed. Failed core proc(s): {'EngineCore_DP0': -9}"
    found = vllm_start.start_error(RuntimeError(words), "", config(["cpu:0"]))
    assert isinstance(found, EngineError)
    assert "memory ran out" in found.hint
    assert "memory" not in vllm_start.start_error(RuntimeError("boom"), "", config(["cpu:0"])).hint


def test_the_tokenizer_is_the_one_that_raw_arguments_name() -> None:
    model_config = SimpleNamespace(tokenizer="org/tokenizer", tokenizer_revision="v2", trust_remote_code=True)
    assert vllm_tokenizer.tokenizer_source(model_config) == TokenizerSource("org/tokenizer", "v2", True)
    asked: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prompts, "load", lambda name, **how: asked.append((name, how)))
        engine = vllm_engine.VllmEngine(config(["cpu:0"]))
        parts = vllm_parts(config(["cpu:0"]))
        assert parts.load_prompts(engine) is None
        assert not asked, "a model without a tokenizer"
        patch.setattr(vllm_engine.VllmEngine, "tokenizer", vllm_tokenizer.tokenizer_source(model_config))
        parts.load_prompts(engine)
    assert asked == [("org/tokenizer", {"revision": "v2", "trust_remote_code": True})]


# ------------------------------------------------------------------------------------------------ settings and versions


def config(devices: list[str], **engine_args: Any) -> WorkerConfig:
    return WorkerConfig(
        name="w", devices=devices, engine_args=engine_args, slab_fd=-1, control="", bell="", supervisor_pid=0
    )


def test_settings_for_cores() -> None:
    environment = engine_environment(config(["cpu:2", "cpu:3"]), {})
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["THP_MEM_ALLOC_ENABLE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment(config(["cpu:0"]), {"VLLM_CPU_KVCACHE_SPACE": "3"})
    given = engine_environment(config(["cpu:0"], kv_cache_memory_bytes=9), {"VLLM_CPU_KVCACHE_SPACE": "3"})
    assert given["VLLM_CPU_KVCACHE_SPACE"] is None, "the argument counts"
    arguments = engine_arguments(config(["cpu:2", "cpu:3"]), "m", (0, 32, 0))
    assert (arguments["block_size"], arguments["enforce_eager"]) == (32, True)
    assert "tensor_parallel_size" not in arguments, "one engine's threads span the cores"
    assert arguments["scheduler_cls"].endswith(".DecodeFirstScheduler")


def test_settings_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_settings, "cuda_uuids", lambda: ["GPU-1", "GPU-2"])
    devices = ["GPU-1", "GPU-2"]
    environment = engine_environment(config(devices), {})
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    arguments = engine_arguments(config(devices, max_num_seqs=3), "m", (0, 24, 0))
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["max_num_seqs"] == 3, "raw arguments win"
    assert arguments["scheduler_cls"].endswith(".AsyncDecodeFirstScheduler")


def test_kernels_of_gpus_are_chosen_alike_unless_the_user_says_otherwise() -> None:
    assert engine_arguments(config(["cuda:0"]), "m", (0, 24, 0))["compilation_config"] == {
        "inductor_compile_config": DETERMINISTIC_INDUCTOR
    }
    own = {"cudagraph_capture_sizes": [1, 2], "inductor_compile_config": {"deterministic": False, "x": 1}}
    merged = engine_arguments(config(["cuda:0"], compilation_config=own), "m", (0, 24, 0))["compilation_config"]
    assert merged["cudagraph_capture_sizes"] == [1, 2]
    assert merged["inductor_compile_config"] == DETERMINISTIC_INDUCTOR | {"deterministic": False, "x": 1}
    assert engine_arguments(config(["cuda:0"], compilation_config=3), "m", (0, 24, 0))["compilation_config"] == 3
    assert "compilation_config" not in engine_arguments(config(["cpu:0"]), "m", (0, 32, 0))


def test_raw_arguments_that_contradict_the_configuration_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.model: .*Set `model`"):
        engine_arguments(config(["cpu:0"], model="other"), "m", (0, 32, 0))
    uncached = config(["cpu:0"], enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"vllm\.enable_prefix_caching"):
        engine_arguments(uncached, "m", (0, 32, 0))
    streaming = msgspec.structs.replace(uncached, session="streaming-input")
    assert engine_arguments(streaming, "m", (0, 32, 0))["enable_prefix_caching"] is False
    late = config(["cpu:0"], scheduling_policy="priority")
    with pytest.raises(ConfigError, match=r"vllm\.scheduling_policy: .*enabled = false"):
        engine_arguments(late, "m", (0, 32, 0))
    own = msgspec.structs.replace(late, decode_first=False)
    assert engine_arguments(own, "m", (0, 32, 0))["scheduling_policy"] == "priority"
    assert engine_arguments(config(["cpu:0"], scheduling_policy="fcfs"), "m", (0, 32, 0))["scheduler_cls"]


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.max_model_length: .*max_model_len"):
        check_argument_names({"max_model_length": 1}, ["max_model_len", "dtype"])


@pytest.mark.parametrize(
    ("text", "version"), [("0.32.0", (0, 32, 0)), ("0.32.0rc1+cpu", (0, 32, 0)), ("0.33", (0, 33, 0)), ("1", (1, 0, 0))]
)
def test_versions_are_read(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


def test_versions_outside_of_the_range_are_refused() -> None:
    for text in ("0.23.9", "0.34.0", "1.0"):
        with pytest.raises(ConfigError, match=rf"vLLM {text} is not supported\. Install a version from 0\.24\.0 up to"):
            check_supported(parse_version(text), text)
    for text in ("0.24.0", "0.32.0", "0.33.5"):
        check_supported(parse_version(text), text)


@pytest.mark.parametrize("has_tokens_input", [True, False])
def test_prompts_are_made_the_way_the_version_wants(monkeypatch: pytest.MonkeyPatch, has_tokens_input: bool) -> None:
    inputs = SimpleNamespace(TokensPrompt=dict)
    if has_tokens_input:
        inputs.tokens_input = lambda ids, cache_salt=None: {
            "type": "token",
            "prompt_token_ids": ids,
            "salt": cache_salt,
        }
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(inputs=inputs))
    make = prompt_maker()
    mine = [1, 2]
    prompt = make(mine, "s")
    assert prompt["prompt_token_ids"] == mine
    assert prompt["prompt_token_ids"] is not mine
    assert prompt["salt" if has_tokens_input else "cache_salt"] == "s"
    assert "cache_salt" not in make(mine, None), "no salt is not an empty one"


def test_without_decode_first_only_old_versions_get_another_scheduler() -> None:
    assert scheduler_class((0, 32, 0), asynchronous=False, decode_first=False) is None
    old = scheduler_class((0, 24, 0), asynchronous=False, decode_first=False)
    assert old == "pingpong_worker.vllm_scheduler.SessionScheduler"


# ------------------------------------------------------------------------------------------------ fixes of old versions


@pytest.mark.filterwarnings("ignore")  # what torch and vLLM say at import is not ours to mend
def test_an_old_scheduler_is_given_what_a_later_chunk_changes() -> None:
    pytest.importorskip("vllm")
    from pingpong_worker.vllm_scheduler import SessionFixes

    class Old:
        """`_update_request_as_session` of vLLM 0.24, in what matters here."""

        block_size = 4

        def _update_request_as_session(self, session: Any, update: Any) -> None:
            del session.tokens[session.num_computed_tokens :]
            session.tokens.extend(update.prompt_token_ids)
            for start in range(len(session.block_hashes) * 4, len(session.tokens) // 4 * 4, 4):
                session.block_hashes.append(tuple(session.tokens[start : start + 4]))

    class Mended(SessionFixes, Old):
        pass

    def run(scheduler: Old) -> Any:
        # Seven tokens computed; the eighth, 99, is the sample that is thrown away, and it has filled the second block.
        tokens = [1, 2, 3, 4, 5, 6, 7, 99]
        session = SimpleNamespace(
            tokens=tokens, num_computed_tokens=7, block_hashes=[tuple(tokens[:4]), tuple(tokens[4:])], max_tokens=1
        )
        scheduler._update_request_as_session(session, SimpleNamespace(prompt_token_ids=[8, 9], max_tokens=20))
        return session

    faulty = run(Old())
    assert (faulty.max_tokens, faulty.block_hashes[1]) == (1, (5, 6, 7, 99)), "what is mended"
    mended = run(Mended())
    assert mended.max_tokens == 20
    assert mended.block_hashes == [(1, 2, 3, 4), (5, 6, 7, 8)]


@pytest.mark.filterwarnings("ignore")
def test_rows_whose_sample_is_thrown_away_do_not_draw() -> None:
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    from pingpong_worker.vllm_cpu_worker import unfinished_prompts_unseeded

    generators = {row: torch.Generator().manual_seed(row) for row in (0, 2)}
    before = {row: generator.get_state() for row, generator in generators.items()}
    mask = SimpleNamespace(np=[True, True, False, True])
    runner = SimpleNamespace(discard_request_mask=mask, input_batch=SimpleNamespace(num_reqs=3, generators=generators))
    with unfinished_prompts_unseeded(runner):
        assert set(generators) == {2}
        torch.rand(1, generator=generators[2])
    assert set(generators) == {0, 2}
    assert torch.equal(generators[0].get_state(), before[0])
    assert not torch.equal(generators[2].get_state(), before[2])
    with unfinished_prompts_unseeded(SimpleNamespace()):  # the V2 runner has no such mask
        pass


@pytest.mark.filterwarnings("ignore")
def test_ranks_are_counted_without_a_compiler() -> None:
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    from vllm.v1.sample import sampler

    from pingpong_worker.vllm_cpu_worker import count_ranks_uncompiled

    module = SimpleNamespace(batched_count_greater_than=sampler.batched_count_greater_than)
    count_ranks_uncompiled(module)  # type: ignore[arg-type]
    with torch.compiler.set_stance("fail_on_recompile"):
        ranks = module.batched_count_greater_than(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[2.0]]))
    assert ranks.tolist() == [2]
    count_ranks_uncompiled(module)  # type: ignore[arg-type]  # once more does no harm
    assert module.batched_count_greater_than is not sampler.batched_count_greater_than


# ----------------------------------------------------------------------------------------------------------- the plugin


def test_the_plugin_is_inert_without_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_plugin.WORKER_PID, raising=False)
    monkeypatch.setattr(vllm_plugin, "die_with_parent", lambda pid: pytest.fail("not ours to tie"))
    vllm_plugin.register()
    monkeypatch.setenv(vllm_plugin.WORKER_PID, str(os.getpid()))
    vllm_plugin.end_with_worker()


def test_a_process_whose_worker_is_gone_ends_at_once() -> None:
    code = "from pingpong_worker.vllm_plugin import end_with_worker; end_with_worker(); print('alive')"

    def run(worker: int) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {vllm_plugin.WORKER_PID: str(worker)}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    assert run(os.getpid()).stdout == "alive\n"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    done = run(dead.pid)
    assert (done.returncode, done.stdout) == (1, "")


def test_the_first_failure_is_kept_for_the_parent(tmp_path: Path) -> None:
    file = tmp_path / "failure"
    logger = logging.Logger("engine")
    logger.addHandler(vllm_plugin.FailureHandler(file))
    logger.error("no exception, no root cause")
    assert not file.exists()
    for text in ("the root", "what followed from it"):
        try:
            raise ValueError(text)
        except ValueError:
            logger.exception("failed")
    assert file.read_text() == "ValueError: the root"
