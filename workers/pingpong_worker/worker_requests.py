"""What the supervisor asks of a serving worker beside hops: each request is answered, whatever becomes of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pingpong_bus.codec import MAX_WORKER_BYTES, encode
from pingpong_bus.errors import ChainError, EngineError, PingpongError
from pingpong_bus.messages import (
    Calibrate,
    Calibrated,
    NextScored,
    PrefixCacheReset,
    Prepare,
    Prepared,
    PreparedAgent,
    RequestFailed,
    ResetPrefixCache,
    ScoreNext,
    WorkerMessage,
)
from pingpong_worker.calibrator import Calibrator
from pingpong_worker.engine import Engine
from pingpong_worker.hops import Hops
from pingpong_worker.prompt import PromptCodec, Prompts, prepare_ids
from pingpong_worker.step_meter import StepMeter

_log = logging.getLogger("pingpong_worker")
T = TypeVar("T")

Request = Prepare | ResetPrefixCache | ScoreNext | Calibrate


@dataclass(frozen=True)
class Serving:
    """What a worker has once its engine serves."""

    engine: Engine
    prompts: PromptCodec | None
    hops: Hops
    meter: StepMeter
    calibrator: Calibrator


class Requests:
    """The requests of one worker that are under way.

    Args:
        send: a message to the supervisor.
    """

    def __init__(self, send: Callable[[WorkerMessage], None]) -> None:
        self._send = send
        self._tasks: set[asyncio.Task[WorkerMessage]] = set()
        self._scoring = asyncio.Lock()

    def take(self, serving: Serving, message: Request) -> None:
        """Begin a request; the conversation goes on meanwhile."""
        match message:
            case Prepare(request=request):
                self._answer(request, self._prepare(serving, message))
            case ResetPrefixCache(request=request):
                self._answer(request, self._reset(serving, request))
            case ScoreNext(request=request):
                self._answer(request, self._score(serving, message))
            case Calibrate(request=request):
                self._answer(request, self._calibrate(serving, request))

    async def close(self) -> None:
        """Give up what is under way: the worker ends."""
        await cancel_all(self._tasks)

    def _answer(self, request: int, work: Coroutine[None, None, WorkerMessage]) -> None:
        """Answer a request when its work is done, whatever becomes of it."""

        def answer(task: asyncio.Task[WorkerMessage]) -> None:
            self._tasks.discard(task)
            if task.cancelled():  # the worker ends
                return
            error = task.exception()
            if error is None:
                reply = task.result()
                size = len(encode(reply))
                if size <= MAX_WORKER_BYTES:
                    self._send(reply)
                    return
                error = ChainError(
                    f"its prompts take {size} bytes as token ids, and {MAX_WORKER_BYTES} are allowed.",
                    hint="Put less text into one chain.",
                )
            if not isinstance(error, PingpongError):
                _log.error("request %s failed", request, exc_info=error)
                error = PingpongError(f"the worker failed: {type(error).__name__}: {error}")
            self._send(
                RequestFailed(
                    request=request, code=error.code, message=error.message, hint=error.hint, field=error.field
                )
            )

        task = asyncio.create_task(work, name=f"request {request}")
        self._tasks.add(task)
        task.add_done_callback(answer)

    async def _prepare(self, serving: Serving, message: Prepare) -> WorkerMessage:
        """Tokenize in a thread: tokens of running hops are never held up."""
        vocabulary = serving.engine.limits.vocabulary_size
        wanted = message.agents
        if serving.prompts is None:
            return Prepared(request=message.request, agents=prepare_ids(message.chain, vocabulary, wanted))
        agents = await asyncio.to_thread(serving.prompts.prepare, message.chain, message.inputs, vocabulary, wanted)
        if message.as_text and isinstance(serving.prompts, Prompts):
            why = serving.prompts.obstacle
            text = {at for at, index in enumerate(wanted or range(len(agents))) if index in message.as_text}
            if why:
                agents = [_not_ahead(agent, why) if at in text else agent for at, agent in enumerate(agents)]
        return Prepared(request=message.request, agents=agents)

    async def _reset(self, serving: Serving, request: int) -> WorkerMessage:
        await serving.calibrator.make_room()
        await serving.engine.reset_prefix_cache()
        return PrefixCacheReset(request=request)

    async def _calibrate(self, serving: Serving, request: int) -> WorkerMessage:
        if serving.hops.load()[0]:
            raise EngineError("hops run on the engine.", hint="Measure it when none does.")
        if self._scoring.locked():
            raise EngineError("tokens are scored on the engine.", hint="Measure it when none are.")
        return Calibrated(request=request, figures=await serving.calibrator.measure())

    async def _score(self, serving: Serving, message: ScoreNext) -> WorkerMessage:
        """One at a time: what is scored together, or beside what is measured, would round differently."""
        async with self._scoring:
            await serving.calibrator.make_room()
            meter = serving.meter
            submission = meter.submitted(len(message.ids), time.monotonic())
            try:
                logprobs = await serving.engine.score(message.ids, message.tokens, grid=message.grid)
                meter.output(submission, time.monotonic(), computed=len(message.ids))
            finally:
                meter.ended(submission, time.monotonic())
        return NextScored(request=message.request, logprobs=logprobs)


def _not_ahead(agent: PreparedAgent, why: str) -> PreparedAgent:
    """The prompt, with a note that nothing is read ahead of an output that is joined as text; `why` is a clause."""
    note = agent.note or f"outputs are joined as text, which this tokenizer takes whole: {why}"
    return msgspec.structs.replace(agent, note=note)


async def cancel_all(tasks: set[asyncio.Task[T]]) -> None:
    """Cancel tasks and wait until they are over."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
