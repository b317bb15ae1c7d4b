"""vLLM as an `Engine`: starting it, and opening sessions on it.

`vllm_versions.py` knows what differs between vLLM's versions.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pingpong_bus.errors import EngineError, EngineLost
from pingpong_bus.messages import (
    DecodePace,
    EngineLimits,
    KeptPrefix,
    Progress,
    Sampling,
    SchedulerState,
    SessionKind,
    TokenizerSource,
)
from pingpong_worker.cache_files import EngineKind
from pingpong_worker.config import WorkerConfig
from pingpong_worker.device_kind import device_kind
from pingpong_worker.engine import Session
from pingpong_worker.model_store import resolve_model
from pingpong_worker.price_file import save_prices
from pingpong_worker.step_board import StepBoard
from pingpong_worker.vllm_abilities import IDLE_SESSIONS_GIVE_WAY, check_patched_whole, installed_abilities
from pingpong_worker.vllm_guards import Reservations, session_kind
from pingpong_worker.vllm_guessing import guessed_for, guesses, known_runs
from pingpong_worker.vllm_handle import Handling, VllmHandle
from pingpong_worker.vllm_limits import engine_limits, grid_refusal
from pingpong_worker.vllm_marks import GUESS_VARIABLE
from pingpong_worker.vllm_plugin import WORKER_PID
from pingpong_worker.vllm_scoring import score_next
from pingpong_worker.vllm_sessions import PrefixCacheSession, StreamingInputSession
from pingpong_worker.vllm_settings import engine_arguments, engine_environment
from pingpong_worker.vllm_start import load
from pingpong_worker.vllm_tokenizer import end_ids_of, tokenizer_source
from pingpong_worker.vllm_versions import installed_version, prompt_maker, refusals
from pingpong_worker.warm_up import warm_up

_RESET_LIMIT_S = 2.0


class VllmEngine:
    """One vLLM engine, in processes of its own, over all devices of the group."""

    def __init__(self, config: WorkerConfig, on_progress: Callable[[Progress], object] = lambda _: None) -> None:
        """Args:
        config: of the worker.
        on_progress: is told how far the start has come; in another thread while the event loop is blocked.
        """
        self._config = config
        self._on_progress = on_progress
        self._llm: Any = None
        self._handle: VllmHandle | None = None
        self._reservations: Reservations | None = None
        self._tokenizer: TokenizerSource | None = None
        self._board: StepBoard | None = None
        self._kind: EngineKind | None = None
        self._guess_tokens = 0

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
        check_patched_whole(".".join(map(str, version)))
        model = str(await asyncio.to_thread(resolve_model, self._config.model))
        environment = engine_environment(self._config, os.environ)
        self._guess_tokens = guesses(self._config, version)
        environment |= {WORKER_PID: str(os.getpid()), GUESS_VARIABLE: str(self._guess_tokens)}
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._kind = EngineKind(
            device=device_kind(self._config.devices),
            model=model,
            dtype=self._config.dtype,
            engine=f"vllm {'.'.join(map(str, version))}",
        )
        self._llm, self._board = load(
            self._config, engine_arguments(self._config, model, version), self._kind, self._on_progress
        )
        vllm_config = self._llm.vllm_config
        source = tokenizer_source(vllm_config.model_config)
        end_ids, tokenizer = end_ids_of(vllm_config.model_config, source)
        self._tokenizer = source if tokenizer is not None else None
        limits = engine_limits(vllm_config, self._config, model, version, tokenizer=tokenizer)
        limits = msgspec.structs.replace(limits, abilities=installed_abilities())
        self._handle = _handle(self._llm, limits, end_ids)
        self._reservations = Reservations(
            kv_tokens=limits.kv_tokens,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            # A KV connector may be at work on a session's blocks: they are not taken then.
            give_way=IDLE_SESSIONS_GIVE_WAY in limits.abilities and vllm_config.kv_transfer_config is None,
        )
        self._on_progress(Progress(stage="warming up"))
        await warm_up(self)

    def open(
        self,
        session_id: str,
        *,
        cache_salt: str | None,
        sampling: Sampling,
        kind: SessionKind | None = None,
        pace: DecodePace | None = None,
        grid: int | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
        keep: KeptPrefix | None = None,
    ) -> Session:
        """See `Engine.open`. Streaming input needs greedy sampling or appends without samples, no grid, no guesses, no
        host memory for prefixes, and room to reserve the longest request.

        Raises:
            EngineLost: the engine is not running.
            EngineError: it cannot be held to this grid.
        """
        handle, reservations = self._running(), self._reservations
        self._check_grid(grid)
        assert reservations is not None  # noqa: S101  made together with the handle
        guessed = drafts is not None and self._guess_tokens > 0 and guessed_for(sampling, grid)
        kind = session_kind(
            kind or self._config.session,
            sampling,
            grid,
            guessed=guessed,
            appends_sample=handle.appends_sample,
        )
        close = functools.partial(reservations.give_back, session_id)
        host_cache = self._config.host_cache_gib > 0
        handling = Handling(
            cache_salt=cache_salt, pace=pace or DecodePace(), grid=grid, keep=keep, host_cache=host_cache
        )
        if guessed:
            runs = known_runs(drafts or (), handle.limits.vocabulary_size)
            handling = msgspec.structs.replace(handling, drafts=runs, draft_tokens=self._guess_tokens)
        if kind == "streaming-input" and not host_cache and reservations.take(session_id):
            return StreamingInputSession(handle, session_id, handling, close)
        reservations.add_beside(session_id)
        return PrefixCacheSession(handle, session_id, msgspec.structs.replace(handling, session=session_id), close)

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
        handle = self._running()
        self._check_grid(grid)
        return await score_next(handle, ids, tokens, grid)

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

    def _check_grid(self, grid: int | None) -> None:
        if grid is not None and (refusal := grid_refusal(self._llm.vllm_config, self._config, grid)):
            raise EngineError(f"the engine cannot be held to a grid of {grid} tokens: {refusal}")

    def _running(self) -> VllmHandle:
        if self._handle is None:
            raise EngineLost("the engine is not running.")
        return self._handle


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
