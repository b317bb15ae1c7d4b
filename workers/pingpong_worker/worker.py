"""The worker's life and its conversation with the supervisor."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio

from pingpong_bus.codec import MAX_WORKER_BYTES, decode_supervisor_message, encode
from pingpong_bus.errors import ConfigError, EngineError, EngineLost, MessageError, PingpongError
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    AbortHop,
    Calibrate,
    Crossing,
    EngineFigures,
    Hello,
    HopEnded,
    HopSpec,
    Loading,
    Prepare,
    Progress,
    Ready,
    ReleaseHop,
    RequestFailed,
    ResetPrefixCache,
    ScoreNext,
    StartHop,
    Stop,
    SupervisorMessage,
    Welcome,
    WorkerFailed,
    WorkerMessage,
)
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_worker.calibration import MEASURING
from pingpong_worker.calibrator import Calibrator
from pingpong_worker.config import WorkerConfig
from pingpong_worker.engine import Engine
from pingpong_worker.heartbeat import Pulse
from pingpong_worker.hops import Hops
from pingpong_worker.prompt import PromptCodec
from pingpong_worker.request_trace import traced_report
from pingpong_worker.surroundings import Surroundings
from pingpong_worker.text_source import LoadCodec, TokenizerShelf, no_other_tokenizers
from pingpong_worker.worker_requests import Requests, Serving, cancel_all

_LINGER_MS = 2000
_log = logging.getLogger("pingpong_worker")
E = TypeVar("E", bound=Engine)


@dataclass(frozen=True)
class Parts(Generic[E]):
    """How a worker gets what it hosts; each is called once, when the supervisor has answered."""

    pin: Callable[[], None]
    """Takes the process to its devices; may raise ConfigError."""
    make_engine: Callable[[Callable[[Progress], object]], E]
    """Called on the main thread: an engine's processes die with the thread that starts them. It gets what it may tell
    how far its start has come: on this thread, or on another one while it blocks this one."""
    load_prompts: Callable[[E], PromptCodec | None]
    """Called in a thread, once the engine serves; None where the model has no tokenizer."""
    load_tokenizer: LoadCodec = no_other_tokenizers
    """Loads the tokenizer of a model that another worker runs, to read what it wrote."""


class Worker:
    """One engine and its hops; belongs to one event loop."""

    def __init__(self, config: WorkerConfig, parts: Parts[Any]) -> None:
        self._config = config
        self._parts = parts
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, (config.identity or config.name).encode())
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_WORKER_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a supervisor that is busy must not stall tokens
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        """The loop's."""
        self._welcome = asyncio.Event()
        self._crossing: Crossing | None = None
        """How the welcome came."""
        self._stop = asyncio.Event()
        self._serving: Serving | None = None
        self._garbage_frames = 0
        self._failed = False
        self._requests = Requests(self._send)

    def stop(self) -> None:
        """End the worker; what the message `Stop` does."""
        self._stop.set()

    async def run(self) -> int:
        """Serve until told to stop; returns the process's exit code."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._socket.connect(self._config.control)
        hello = Hello(
            version=PROTOCOL_VERSION,
            worker=self._config.name,
            pid=os.getpid(),
            bell=self._config.bell,
            at_ns=time.monotonic_ns(),
        )
        self._send(hello)
        tasks: set[asyncio.Task[object]] = {
            asyncio.create_task(self._stop.wait(), name="stop"),
            asyncio.create_task(self._receive(), name="receive"),
            asyncio.create_task(self._live(), name="live"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except PingpongError as error:
            self._report_failure(error)
            return error.exit_code
        finally:
            await cancel_all(tasks)
            await self._requests.close()
            self._socket.close()
            self._context.term()
        return 0

    async def _live(self) -> None:
        """Wait for the supervisor, start everything, and beat until the engine is dead.

        Raises:
            PingpongError: the worker cannot go on.
        """
        await self._welcome.wait()
        self._parts.pin()
        slab = Slab.attach(self._config.slab_fd)
        publisher = Publisher(self._context, self._config.bell)
        subscriber = Subscriber(self._context, slab)
        publisher.local = subscriber
        try:
            self._send(Loading(stage="loading the model", welcome=self._crossing))
            engine: Engine = self._parts.make_engine(self._tell_progress)
            try:
                await engine.start()
                self._send(Loading(stage="loading the tokenizer"))
                prompts = await asyncio.to_thread(self._parts.load_prompts, engine)
                report = traced_report(self._send, subscriber)
                tokenizers = TokenizerShelf(self._parts.load_tokenizer)
                await self._serve(
                    Surroundings(engine, prompts, slab, subscriber, publisher, report, tokenizers=tokenizers)
                )
            except PingpongError as error:
                self._report_failure(error)  # now: to shut a dead engine down can take seconds, without a heartbeat
                raise
            finally:
                await engine.shutdown()
        finally:
            await subscriber.close()
            publisher.close()
            slab.close()

    async def _serve(self, surroundings: Surroundings) -> None:
        engine = surroundings.engine
        hops = Hops(surroundings, on_engine_error=lambda: pulse.check_now())
        pulse = Pulse(
            engine,
            self._config.heartbeat_s,
            hops.load,
            surroundings.meter,
            surroundings.subscriber.state,
            self._send,
        )
        # A collection of all that loading has left would stall tokens for 100 ms and more (sgl-project/sglang#9241).
        gc.collect()
        gc.freeze()
        calibrator = Calibrator(engine, self._config)
        figures = await self._figures(calibrator) if self._config.calibrate else None
        self._serving = Serving(engine, surroundings.prompts, hops, surroundings.meter, calibrator)
        self._send(Ready(limits=engine.limits, figures=figures))
        reason: EngineError | None = None
        try:
            await pulse.run()
        except EngineError as error:
            reason = error
            raise
        finally:
            self._serving = None
            await hops.close(reason)

    def _tell_progress(self, progress: Progress) -> None:
        """Say how far the start has come."""
        message = Loading(stage=progress.stage, progress=progress)
        if threading.get_ident() == self._thread:
            self._send(message)
            return
        # The event loop's thread is blocked in the engine's start, and waits for this one before it goes on: until then
        # the socket belongs to this one. Sending past the loop's wrapper may swallow the edge that tells of a message
        # that has come, so the wrapper looks for itself afterwards.
        zmq.Socket.shadow(self._socket.underlying).send(encode(message), zmq.NOBLOCK)
        assert self._loop is not None  # noqa: S101  set by `run`
        self._loop.call_soon_threadsafe(self._socket.get, zmq.EVENTS)

    async def _figures(self, calibrator: Calibrator) -> EngineFigures | None:
        """What the engine takes, from a file or measured now."""
        if (kept := calibrator.kept()) is not None:
            return kept
        self._send(Loading(stage=MEASURING))
        return await calibrator.at_start(self._tell_progress)

    def _report_failure(self, error: PingpongError) -> None:
        """Say why the worker ends, once."""
        if self._failed:
            return
        self._failed = True
        self._send(
            WorkerFailed(
                code=error.code,
                message=f"{error.field}: {error.message}" if error.field else error.message,
                hint=error.hint,
                permanent=isinstance(error, ConfigError),
            )
        )

    async def _receive(self) -> None:
        """Take messages until `Stop`."""
        while True:
            frame = await self._socket.recv()
            try:
                message = decode_supervisor_message(frame)
            except MessageError as error:
                if not self._welcome.is_set():
                    raise  # a supervisor of another version: nothing that it says later will be better
                self._drop(error)
                continue
            if isinstance(message, Stop):
                return
            if isinstance(message, Welcome):
                self._crossing = Crossing(sent_ns=message.at_ns, received_ns=time.monotonic_ns())
                self._welcome.set()
            else:
                self._handle(message)

    def _drop(self, error: MessageError) -> None:
        """Count a frame that makes no sense; the 1st, 2nd, 4th, 8th ... is logged."""
        self._garbage_frames += 1
        if self._garbage_frames & (self._garbage_frames - 1) == 0:
            _log.warning("%d frames made no sense, the latest: %s", self._garbage_frames, error)

    def _handle(self, message: SupervisorMessage) -> None:
        serving = self._serving
        if serving is None:
            self._refuse(message)
            return
        match message:
            case StartHop(spec=spec):
                serving.calibrator.give_way()
                serving.hops.start(spec)
            case AbortHop(hop=hop):
                serving.hops.abort(hop)
            case ReleaseHop(hop=hop):
                serving.hops.release(hop)
            case Prepare() | ResetPrefixCache() | ScoreNext() | Calibrate():
                self._requests.take(serving, message)

    def _refuse(self, message: SupervisorMessage) -> None:
        """Answer what only a serving worker can do; there is such a message where a worker fails just then.

        Not so `ReleaseHop`: the hop is lost just now, and says so itself. "aborted" would be the end of its chain.
        """
        why = "the worker does not serve."
        match message:
            case StartHop(spec=HopSpec(hop=hop)):
                at = time.monotonic_ns()
                self._send(HopEnded(hop=hop, state="lost", at_ns=at, code=EngineLost.__name__, message=why))
            case AbortHop(hop=hop):
                self._send(HopEnded(hop=hop, state="aborted", at_ns=time.monotonic_ns()))
            case (
                Prepare(request=request)
                | ResetPrefixCache(request=request)
                | ScoreNext(request=request)
                | Calibrate(request=request)
            ):
                self._send(RequestFailed(request=request, code=EngineLost.__name__, message=why))

    def _send(self, message: WorkerMessage) -> None:
        # Without a high-water mark the socket takes it at once, so the future that comes back is done.
        self._socket.send(encode(message))
