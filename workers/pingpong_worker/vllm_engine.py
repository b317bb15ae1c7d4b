"""vLLM as an `Engine`: starting it, what it can take, and opening sessions on it.

The only file that drives vLLM's engine; `vllm_versions.py` knows what differs between its versions.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pingpong_bus.errors import ConfigError, EngineError, EngineLost, PingpongError
from pingpong_bus.messages import DecodePace, EngineLimits, Sampling, SchedulerState, SessionKind
from pingpong_worker.config import WorkerConfig
from pingpong_worker.device_kind import device_kind
from pingpong_worker.engine import Session
from pingpong_worker.model_store import resolve_model
from pingpong_worker.price_file import EngineKind, load_prices, save_prices
from pingpong_worker.step_board import STEP_BOARD, StepBoard
from pingpong_worker.vllm_guards import Reservations, session_kind
from pingpong_worker.vllm_handle import Handling, VllmHandle
from pingpong_worker.vllm_limits import engine_limits
from pingpong_worker.vllm_plugin import FAILURE_FILE, WORKER_PID
from pingpong_worker.vllm_scheduler_checks import check_scheduler
from pingpong_worker.vllm_scoring import score_next
from pingpong_worker.vllm_sessions import PrefixCacheSession, StreamingInputSession
from pingpong_worker.vllm_settings import check_argument_names, engine_arguments, engine_environment, is_decode_first
from pingpong_worker.vllm_versions import Version, installed_version, prompt_maker, refusals

_WARM_UP_TOKENS = 256
_RESET_LIMIT_S = 2.0
_REASON_CHARS = 300
"""How much of vLLM's own words an error repeats."""
_START_FAILURES = (
    OSError,
    TypeError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    AssertionError,
    ImportError,
    MemoryError,
)
"""What vLLM raises when it does not start, or does not like its configuration."""
_LOG_HINT = "The worker's log has the whole story."
_KILLED = (": -9}", ": -9,")
"""How vLLM says that a process of its own was killed as it started."""
_KILLED_HINT = "It was killed: where the kernel did that, memory ran out; lower max_model_len or the KV cache's share."
_OPTIONAL_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""What fails to be imported beside a torch that it was not built for; text models do without."""
_IMPORT_HINT = f"If these do not fit the installed torch, remove them: pip uninstall {' '.join(_OPTIONAL_PACKAGES)}."


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
    """Where an engine's tokenizer comes from: the model's own, or what raw arguments name."""

    name: str
    """A folder, or a Hugging Face name."""
    revision: str | None
    trust_remote_code: bool


class VllmEngine:
    """One vLLM engine, in processes of its own, over all devices of the group."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._llm: Any = None
        self._handle: VllmHandle | None = None
        self._reservations: Reservations | None = None
        self._tokenizer: TokenizerSource | None = None
        self._board: StepBoard | None = None
        self._kind: EngineKind | None = None

    @property
    def limits(self) -> EngineLimits:
        """See `Engine.limits`."""
        return self._running().limits

    @property
    def tokenizer(self) -> TokenizerSource | None:
        """Known once `start` has returned; None where the model has none, and takes prompts as ids only."""
        return self._tokenizer

    async def start(self) -> None:
        """See `Engine.start`. Call it from the main thread; it blocks the event loop while the engine loads.

        The engine's processes are to die with this one, and Linux binds that to the thread that starts them.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start a vLLM engine from the main thread: its processes end with the thread")
        version = installed_version()
        model = str(await asyncio.to_thread(resolve_model, self._config.model))
        for name, value in (engine_environment(self._config, os.environ) | {WORKER_PID: str(os.getpid())}).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._kind = _engine_kind(self._config, model, version)
        self._llm, self._board = _load(self._config, engine_arguments(self._config, model, version), self._kind)
        vllm_config = self._llm.vllm_config
        source = tokenizer_source(vllm_config.model_config)
        end_ids, has_tokenizer = _end_ids(vllm_config.model_config, source)
        self._tokenizer = source if has_tokenizer else None
        limits = engine_limits(vllm_config, self._config, model, version, has_tokenizer=has_tokenizer)
        self._handle = _handle(self._llm, limits, end_ids)
        self._reservations = Reservations(
            kv_tokens=limits.kv_tokens,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
        )
        await self._warm_up()

    def open(
        self,
        session_id: str,
        *,
        cache_salt: str | None,
        sampling: Sampling,
        kind: SessionKind | None = None,
        pace: DecodePace | None = None,
        grid: int | None = None,
    ) -> Session:
        """See `Engine.open`. Streaming input needs greedy sampling and room to reserve the longest request, no grid."""
        handle, reservations = self._running(), self._reservations
        assert reservations is not None  # noqa: S101  made together with the handle
        kind = session_kind(kind or self._config.session, sampling, grid)
        close = functools.partial(reservations.give_back, session_id)
        handling = Handling(cache_salt=cache_salt, pace=pace or DecodePace(), grid=grid)
        if kind == "streaming-input" and reservations.take(session_id):
            return StreamingInputSession(handle, session_id, handling, close)
        reservations.add_beside(session_id)
        return PrefixCacheSession(handle, session_id, handling, close)

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`.

        Raises:
            EngineError: requests or paused sessions still hold blocks; vLLM then forgets nothing.
        """
        llm = self._running().llm
        deadline = asyncio.get_running_loop().time() + _RESET_LIMIT_S
        while not await llm.reset_prefix_cache():  # a request just aborted holds its blocks for one step more
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError("the prefix cache is in use.", hint="Reset it when no chain runs.")
            await asyncio.sleep(0.05)

    async def score(self, ids: Sequence[int], tokens: Sequence[int], *, grid: int | None = None) -> list[float | None]:
        """See `Engine.score`. Nothing is found in the prefix cache for it."""
        return await score_next(self._running(), ids, tokens, grid)

    async def check(self) -> None:
        """See `Engine.check`."""
        self._running().check()

    def scheduler_state(self) -> SchedulerState | None:
        """See `Engine.scheduler_state`."""
        return self._board.state() if self._board else None

    async def shutdown(self) -> None:
        """See `Engine.shutdown`."""
        llm, self._llm, self._handle = self._llm, None, None
        if llm is None:
            return
        if self._board and self._kind and (prices := self._board.prices()):
            save_prices(self._kind, prices)
        llm.shutdown()
        if llm.output_handler is not None:
            await asyncio.wait([llm.output_handler])

    def _running(self) -> VllmHandle:
        if self._handle is None:
            raise EngineLost("the engine is not running.")
        return self._handle

    async def _warm_up(self) -> None:
        """Make the first requests, which are slow, so that no user's are."""
        count = max(1, min(_WARM_UP_TOKENS, self.limits.max_model_len - 16))
        for kind in self.limits.sessions:
            sampling = Sampling(max_tokens=4, ignore_eos=True)
            session = self.open(f"warm-up {kind}", cache_salt=None, sampling=sampling, kind=kind)
            ids = [index % self.limits.vocabulary_size for index in range(count)]
            await session.append(ids)
            async for _ in session.finalize([0], sampling):
                pass
        sampling = Sampling(max_tokens=2, temperature=1.0, seed=1, ignore_eos=True)
        async for _ in self.open("warm-up seeded", cache_salt=None, sampling=sampling).finalize([0], sampling):
            pass
        await self.reset_prefix_cache()


def _engine_kind(config: WorkerConfig, model: str, version: Version) -> EngineKind:
    count = len(config.devices)
    device = device_kind(config.devices)
    return EngineKind(
        device=device if count == 1 else f"{count} x {device}",
        model=model,
        dtype=config.dtype,
        engine=f"vllm {'.'.join(map(str, version))}",
    )


def _load(config: WorkerConfig, arguments: dict[str, Any], kind: EngineKind) -> tuple[Any, StepBoard]:
    """Start vLLM's processes and load the model; gives the engine and the board of its scheduler.

    Raises:
        ConfigError: an argument, the model or the memory for it is at fault.
        EngineError: the engine failed to start for another reason.
    """
    try:
        # Here, not at the top: vLLM reads its environment as it is imported, and takes seconds.
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:  # by its native libraries
        raise ConfigError(f"vLLM cannot be imported: {_shorten(str(error))}", hint=_IMPORT_HINT) from error

    check_argument_names(config.engine_args, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    if is_decode_first(config):
        check_scheduler()
    with tempfile.TemporaryDirectory(prefix="pingpong-start-") as folder:
        failure, board_path = Path(folder) / "failure", Path(folder) / "board"
        board = StepBoard(board_path)
        if prices := load_prices(kind):
            board.offer_prices(prices)
        os.environ[FAILURE_FILE], os.environ[STEP_BOARD] = str(failure), str(board_path)
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), board
        except _START_FAILURES as error:
            reason = failure.read_text("utf-8") if failure.exists() else ""
            raise _start_error(error, reason, config) from error
        finally:
            del os.environ[FAILURE_FILE], os.environ[STEP_BOARD]


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _REASON_CHARS else f"{text[:_REASON_CHARS]}..."


def _start_error(error: Exception, reason: str, config: WorkerConfig) -> PingpongError:
    """Say why vLLM did not start: `reason` is what its processes left, if anything."""
    text, field = reason or str(error), "vllm"
    if not reason and hasattr(error, "errors"):  # pydantic's: its text repeats the whole configuration
        first = error.errors()[0]
        text = first["msg"].removeprefix("Value error, ")
        if first["loc"] and first["loc"][0] in config.engine_args:
            field = f"vllm.{first['loc'][0]}"
    text = _shorten(text) or type(error).__name__
    if isinstance(error, ImportError) or any(name in text for name in _OPTIONAL_PACKAGES):
        return ConfigError(f"vLLM cannot be imported: {text}", hint=_IMPORT_HINT)
    if "memory" in text.lower() or "KV cache" in text:
        return ConfigError(
            f"the model and its KV cache do not fit in memory: {text}",
            field=field,
            hint="Lower max_model_len or the share of memory (VLLM_CPU_KVCACHE_SPACE, gpu_memory_utilization).",
        )
    if reason or isinstance(error, (RuntimeError, AssertionError)):
        killed = any(mark in text for mark in _KILLED)
        return EngineError(f"vLLM did not start: {text}", hint=_KILLED_HINT if killed else _LOG_HINT)
    if isinstance(error, OSError) or "repository" in text.lower():
        return ConfigError(
            f'the model "{config.model}" was not found: {text}',
            field="model",
            hint="Give a folder with a Hugging Face model, or a name that can be reached or is cached.",
        )
    return ConfigError(f"vLLM does not take this configuration: {text}", field=field)


def _handle(llm: Any, limits: EngineLimits, end_ids: frozenset[int]) -> VllmHandle:
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # ignore_eos: without a tokenizer vLLM knows some end ids at best; `answer_params` names them all.
    make_params = functools.partial(
        SamplingParams, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    return VllmHandle(
        llm=llm,
        limits=limits,
        end_ids=end_ids,
        make_prompt=prompt_maker(),
        make_params=make_params,
        make_chunk=StreamingInput,
        refusals=refusals(),
    )


def tokenizer_source(model_config: Any) -> TokenizerSource:
    """The tokenizer of a `ModelConfig` of vLLM."""
    return TokenizerSource(
        str(model_config.tokenizer), model_config.tokenizer_revision, bool(model_config.trust_remote_code)
    )


def _end_ids(model_config: Any, source: TokenizerSource) -> tuple[frozenset[int], bool]:
    """The model's end-of-sequence ids, from all places that name them, and whether it has a tokenizer."""
    from transformers import AutoTokenizer

    found: set[int] = set()
    for value in (
        model_config.try_get_generation_config().get("eos_token_id"),
        getattr(model_config.hf_text_config, "eos_token_id", None),
    ):
        found.update([value] if isinstance(value, int) else value or ())
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError):  # a model for prompts given as ids only
        return frozenset(found), False
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found), True
