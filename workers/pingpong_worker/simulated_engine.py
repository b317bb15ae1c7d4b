"""An engine without a model: a timing model and a rule for the next token, in a child process like a real engine's.

For tests that need many starts, for fault tests, and for trying placements on more devices than there are. What it
answers is a pure function of the prompt ids, so runs can be compared id by id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pingpong_bus.errors import ConfigError, EngineError, EngineLost
from pingpong_bus.messages import DecodePace, EngineLimits, KeptPrefix, Progress, Sampling, SchedulerState, SessionKind
from pingpong_worker.config import SimulatedSettings, WorkerConfig
from pingpong_worker.simulated_child import Model, ModelProcess
from pingpong_worker.simulated_messages import (
    Abort,
    CacheReset,
    Chunk,
    Command,
    Computed,
    Configure,
    Loaded,
    Reply,
    ResetCache,
    Sampled,
    Scheduled,
    Started,
)
from pingpong_worker.simulated_prompts import PAIRS, simulated_prompts
from pingpong_worker.simulated_request import EOS, next_logprob
from pingpong_worker.simulated_sessions import Inbox, PrefixSession, SimulatedSession, StreamingSession

_GRID_TOKENS = 256
"""The cell that it offers, where a step can hold one; the whole blocks that a step can hold where it cannot."""


class SimulatedEngine:
    """Speaks the `Engine` protocol; the model's child process dies with this one."""

    def __init__(
        self,
        config: WorkerConfig,
        start_model: Callable[[], Awaitable[Model]] = ModelProcess.start,
        on_progress: Callable[[Progress], object] = lambda _: None,
    ) -> None:
        """Args:
        config: of the worker.
        start_model: starts the model; by default in a child process, as a real engine's.
        on_progress: is told how far the start has come.
        """
        self._config = config
        self._settings = config.simulated
        self._default_kind: SessionKind = config.session
        self._start_model = start_model
        self._on_progress = on_progress
        self._model: Model | None = None
        self._reader: asyncio.Task[None] | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._started = asyncio.Event()
        self._resets: list[asyncio.Future[None]] = []
        self._error: EngineLost | None = None
        self._state: SchedulerState | None = None

    @property
    def limits(self) -> EngineLimits:
        """The settings, as an engine would report them."""
        settings, config = self._settings, self._config
        refusal = grid_refusal(config)
        return EngineLimits(
            engine="simulated 1",
            model=PAIRS if config.model == PAIRS else "simulated",
            max_model_len=settings.max_model_len,
            vocabulary_size=settings.vocabulary_size,
            block_size=settings.block_size,
            kv_tokens=settings.kv_tokens,
            max_num_seqs=settings.max_num_seqs,
            sessions=("prefix-cache", "streaming-input"),
            dtype="none",
            device="simulated",
            tokenizer=simulated_prompts(config.model).tokenizer,
            grid_tokens=0 if refusal else grid_tokens(config),
            grid_refusal=refusal,
            speculation_refusal="the simulated engine guesses no tokens." if config.speculation_tokens else "",
            batch_invariant=config.batch_invariant,
            decode_first=config.decode_first,
            overlap=config.decode_first,
            keep_tokens=int(self._keep * (settings.kv_tokens // settings.block_size)) * settings.block_size,
        )

    @property
    def _keep(self) -> float:
        """As in our schedulers for vLLM, nothing is kept where decodes do not go first."""
        return self._config.keep_prefixes if self._config.decode_first else 0.0

    @property
    def pid(self) -> int | None:
        """The child process, once started."""
        return self._model.pid if self._model else None

    async def start(self) -> None:
        """Start the child process and wait until it serves.

        Raises:
            ConfigError: settings that can never work.
            EngineError: the child ended.
        """
        check_settings(self._settings)
        self._model = model = await self._start_model()
        self._reader = asyncio.create_task(self._read(model))
        self._send(Configure(self._settings, self._config.decode_first, self._keep))
        await self._started.wait()
        await self.check()

    def open(
        self,
        session_id: str,
        *,
        cache_salt: str | None,
        sampling: Sampling,  # noqa: ARG002  of no matter here
        kind: SessionKind | None = None,
        pace: DecodePace | None = None,
        grid: int | None = None,
        drafts: Sequence[Sequence[int]] | None = None,  # noqa: ARG002
        keep: KeptPrefix | None = None,
    ) -> SimulatedSession:
        """A new session of the kind wished for; both take any sampling, and only one is held to a grid."""
        if (kind or self._default_kind) == "streaming-input" and grid is None:
            return StreamingSession(self, session_id, cache_salt, pace, keep=keep)
        return PrefixSession(self, session_id, cache_salt, pace, grid, keep)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached block."""
        await self.check()
        done = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self._send(ResetCache())
        await done

    async def score(self, ids: Sequence[int], tokens: Sequence[int], *, grid: int | None = None) -> list[float | None]:
        """See `Engine.score`. Probabilities are made up: those of a rule are 1 and 0."""
        await self.check()
        self.check_prompt(ids, 1, grid)
        return [next_logprob(ids, token) for token in tokens]

    def scheduler_state(self) -> SchedulerState | None:
        """See `Engine.scheduler_state`."""
        return self._state

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._error:
            raise self._error

    async def shutdown(self) -> None:
        """End the child process; safe to call twice."""
        if self._model is not None and self._reader is not None:
            await self._model.end()
            await self._reader

    def submit(self, chunk: Chunk, inbox: Inbox) -> None:
        """Hand a chunk to the model; what becomes of its request arrives in `inbox`.

        Raises:
            EngineLost: the child is gone.
        """
        if self._error:
            raise self._error
        self._inboxes[chunk.request] = inbox
        self._send(chunk)

    def forget(self, request: str) -> None:
        """Abort a request, if the engine still knows it."""
        if self._inboxes.pop(request, None) is not None and not self._error:
            self._send(Abort(request))

    def check_prompt(self, ids: Sequence[int], max_tokens: int, grid: int | None = None) -> None:
        """Refuse what can never run.

        Raises:
            EngineError: with the numbers.
        """
        settings = self._settings
        limit = min(settings.max_model_len, settings.kv_tokens)
        if len(ids) + max_tokens > limit:
            raise EngineError(f"{len(ids)} prompt tokens and {max_tokens} to write pass the engine's {limit}.")
        if ids and max(ids) >= settings.vocabulary_size:
            raise EngineError(f"token {max(ids)} is not below the vocabulary's size, {settings.vocabulary_size}.")
        if grid is not None and (refusal := grid_refusal(self._config, grid)):
            raise EngineError(f"a grid of {grid} tokens cannot be held: {refusal}.")

    def _send(self, command: Command) -> None:
        if self._model is None:
            raise EngineLost("the engine is not running.")
        self._model.send(command)

    async def _read(self, model: Model) -> None:
        """Hand replies to their requests until the model ends."""
        try:
            while True:
                for reply in await model.receive():
                    self._deliver(reply)
        except EngineLost as error:
            self._fail(error)

    def _deliver(self, reply: Reply) -> None:
        match reply:
            case Loaded(shards, of):
                self._on_progress(Progress(stage="loading the weights", done=shards, total=of, unit="shards"))
            case Started():
                self._started.set()
            case Scheduled(state):
                self._state = state
            case CacheReset():
                done = self._resets.pop(0)
                if not done.done():  # nobody waits for it any more
                    done.set_result(None)
            case Computed(request):
                if inbox := self._inboxes.get(request):
                    inbox.put_nowait(reply)
            case Sampled(request, finish_reason=finish_reason):
                if inbox := self._inboxes.get(request):
                    inbox.put_nowait(reply)
                    if finish_reason is not None:
                        del self._inboxes[request]

    def _fail(self, error: EngineLost) -> None:
        self._error = error
        self._started.set()
        for inbox in self._inboxes.values():
            inbox.put_nowait(error)
        self._inboxes.clear()
        for done in self._resets:
            if not done.done():
                done.set_exception(error)
        self._resets.clear()


def grid_tokens(config: WorkerConfig) -> int:
    """The cell that an engine of these settings offers, in tokens."""
    settings = config.simulated
    largest = min(_GRID_TOKENS, settings.max_num_batched_tokens)
    return config.grid_tokens or largest - largest % settings.block_size


def grid_refusal(config: WorkerConfig, grid: int | None = None) -> str:
    """Why prompts cannot be cut at a grid, by default the one that it offers; empty where they can."""
    settings = config.simulated
    grid = grid_tokens(config) if grid is None else grid
    if not config.decode_first:
        return "decode-first scheduling is switched off, and its scheduler is what cuts prompts"
    if grid == 0 or grid % settings.block_size:
        return f"a cell is made of whole blocks of {settings.block_size} tokens, and {grid} is no multiple"
    if grid > settings.max_num_batched_tokens:
        return f"a step holds {settings.max_num_batched_tokens} tokens"
    return ""


def check_settings(settings: SimulatedSettings) -> None:
    """Refuse settings that can never work.

    Raises:
        ConfigError: naming the setting.
    """
    for name in ("max_model_len", "block_size", "kv_tokens", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{getattr(settings, name)} is below 1.", field=f"simulated.{name}")
    if settings.vocabulary_size <= EOS:
        raise ConfigError(
            f"{settings.vocabulary_size} ids are too few.",
            field="simulated.vocabulary_size",
            hint=f"The simulated tokenizer needs more than {EOS}.",
        )
    for name in ("step_ms", "row_us", "context_ns", "decode_context_ns", "request_ms", "request_us", "start_ms"):
        if (getattr(settings, name) or 0.0) < 0:
            raise ConfigError(f"{getattr(settings, name)} is below 0.", field=f"simulated.{name}")
    if settings.time_scale <= 0:
        raise ConfigError(f"{settings.time_scale} is not above 0.", field="simulated.time_scale")
    if settings.decode_context_ns is not None and settings.context_ns == 0:
        raise ConfigError("it takes a context_ns above 0.", field="simulated.decode_context_ns")
    rows = [rows for rows, _ in settings.step_rows]
    if rows != sorted(set(rows)) or any(ms < 0 for _, ms in settings.step_rows):
        raise ConfigError("its rows have to rise, and no ms may be below 0.", field="simulated.step_rows")
