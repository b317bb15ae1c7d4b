"""The workers: one per device group; starting them, talking to them, noticing that one is gone."""

from __future__ import annotations

import asyncio
import itertools
import os
from functools import partial
from typing import Literal, Protocol

import structlog
import zmq.asyncio

from pingpong_bus import codec
from pingpong_bus.chain import Chain
from pingpong_bus.errors import ConfigError, EngineError, MessageError, PingpongError, error_from_code
from pingpong_bus.messages import (
    EngineLimits,
    Heartbeat,
    Hello,
    Loading,
    PrefixCacheReset,
    Prepare,
    Prepared,
    PreparedAgent,
    Ready,
    RequestFailed,
    ResetPrefixCache,
    Stop,
    SupervisorMessage,
    Welcome,
    WorkerFailed,
    WorkerMessage,
    WorkerStatus,
)
from pingpong_bus.slab import Slab
from pingpong_worker.config import WorkerConfig
from pingpongd.config import DaemonConfig, GroupConfig
from pingpongd.placement import GroupView, PrefixMemory
from pingpongd.process import WorkerProcess
from pingpongd.runtime_dir import RuntimeDir
from pingpongd.sending import bind_router, send_now

_log = structlog.get_logger()
_STOP_SECONDS = 20.0  # vLLM's own shutdown takes 3.5 s
_REQUEST_SECONDS = 120.0
_LAST_MESSAGE_TRIES = 20


class FleetListener(Protocol):
    """Who hears of hops."""

    def hop_message(self, worker: Worker, message: WorkerMessage) -> None:
        """A worker reports on one of its hops."""

    def worker_lost(self, worker: Worker, why: str) -> None:
        """A worker that served is gone; its hops will never report again."""


class Worker:
    """One worker as the supervisor sees it."""

    def __init__(self, group: GroupConfig, bell: str) -> None:
        self.group = group
        self.bell = bell
        self.state: Literal["starting", "loading", "ready", "stopping", "dead"] = "starting"
        self.stage = "starting"
        self.process: WorkerProcess | None = None
        self.limits: EngineLimits | None = None
        self.failure: WorkerFailed | None = None
        self.hops: set[str] = set()
        self.memory = PrefixMemory(0)
        self.rss_bytes = 0
        self.output_tokens = 0
        self.settled = asyncio.Event()
        """Set once it is ready or has failed to start."""

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name

    def status(self) -> WorkerStatus:
        """As clients see it."""
        return WorkerStatus(
            name=self.name,
            devices=self.group.devices,
            state=self.state,
            stage=self.stage,
            pid=self.process.pid if self.process else None,
            hops=len(self.hops),
            limits=self.limits,
            rss_bytes=self.rss_bytes,
            output_tokens=self.output_tokens,
        )


class Fleet:
    """All workers, and the socket they talk to."""

    def __init__(
        self,
        config: DaemonConfig,
        model: str,
        runtime: RuntimeDir,
        slab: Slab,
        context: zmq.asyncio.Context,
        listener: FleetListener,
    ) -> None:
        self._config = config
        self._model = model
        self._runtime = runtime
        self._slab = slab
        self._listener = listener
        self._socket = bind_router(context, runtime.workers, linger_ms=0, queued_frames=0)
        self.workers = {group.name: Worker(group, runtime.bell(group.name)) for group in config.groups}
        self._requests = itertools.count(1)
        self._waiting: dict[int, tuple[Worker, asyncio.Future[WorkerMessage]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with what ends the daemon: the last engine has died, or a task of ours has failed."""

    @property
    def ready(self) -> list[Worker]:
        """The workers that serve, in the configuration's order."""
        return [worker for worker in self.workers.values() if worker.state == "ready"]

    def views(self) -> list[GroupView]:
        """The workers that serve, for placement."""
        return [GroupView(worker.name, len(worker.hops), worker.memory.held) for worker in self.ready]

    async def start(self) -> None:
        """Start every worker at the same time; returns when all serve.

        Raises:
            ConfigError: one of them can never start like this.
            EngineError: one of them failed.
        """
        self._watch_task(asyncio.create_task(self._receive(), name="fleet-receive"))
        for worker in self.workers.values():
            worker.process = WorkerProcess.spawn(self._worker_config(worker), self._environment())
            worker.process.on_line = partial(self._printed, worker)
            _log.info("worker_started", worker=worker.name, pid=worker.process.pid, devices=worker.group.devices)
            self._watch_task(asyncio.create_task(self._watch(worker), name=f"watch-{worker.name}"))
        try:
            async with asyncio.timeout(self._config.start_seconds):
                # The first failure is enough to give up: the others would load for minutes in vain.
                waits = [asyncio.create_task(worker.settled.wait()) for worker in self.workers.values()]
                try:
                    for done in asyncio.as_completed(waits):
                        await done
                        self._raise_start_failure()
                finally:
                    for wait in waits:
                        wait.cancel()
        except TimeoutError:
            stuck = next(worker for worker in self.workers.values() if worker.state != "ready")
            raise EngineError(
                f'the engine of group "{stuck.name}" did not start within {self._config.start_seconds:g} s '
                f"(it was at: {stuck.stage}).",
                hint="Raise `start_seconds`, or run with --log-level debug to see what it prints.",
            ) from None

    async def stop(self) -> None:
        """End every worker and what it started."""
        ends = []
        for worker in self.workers.values():
            serving = worker.state == "ready"
            if worker.state != "dead":
                worker.state = "stopping"
            if serving:
                self._send_or_drop(worker, Stop())
            if worker.process is not None:
                ends.append(worker.process.end(_STOP_SECONDS if serving else 0))
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, BaseException):
                _log.error("worker_not_ended", error=repr(outcome))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.broken.cancel()
        self._socket.close()

    def send(self, worker: Worker, message: SupervisorMessage) -> None:
        """Send without waiting.

        Raises:
            EngineError: the worker is gone.
        """
        if not self._send_or_drop(worker, message):
            raise EngineError(f'worker "{worker.name}" is gone.', hint="See `pingpong-client status`.")

    async def prepare(self, chain: Chain, inputs: dict[str, str]) -> list[PreparedAgent]:
        """Render and tokenize a chain on the least busy worker.

        Raises:
            PingpongError: what the worker found wrong with it.
        """
        worker = min(self.ready, key=lambda worker: len(worker.hops))
        number = next(self._requests)
        reply = await self._ask(worker, number, Prepare(request=number, chain=chain, inputs=inputs))
        assert isinstance(reply, Prepared)  # noqa: S101 - nothing else answers a Prepare
        return reply.agents

    async def reset_prefix_caches(self) -> None:
        """Empty every serving worker's prefix cache.

        Raises:
            EngineError: one of them could not.
        """
        for worker in self.ready:
            number = next(self._requests)
            await self._ask(worker, number, ResetPrefixCache(request=number))
            worker.memory.forget()

    async def _ask(self, worker: Worker, number: int, message: SupervisorMessage) -> WorkerMessage:
        future: asyncio.Future[WorkerMessage] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (worker, future)
        try:
            self.send(worker, message)
            async with asyncio.timeout(_REQUEST_SECONDS):
                reply = await future
        except TimeoutError:
            raise EngineError(
                f'worker "{worker.name}" did not answer within {_REQUEST_SECONDS:g} s.', hint="Look at its log lines."
            ) from None
        finally:
            del self._waiting[number]
        if isinstance(reply, RequestFailed):
            raise error_from_code(reply.code, reply.message, hint=reply.hint, field=reply.field)
        return reply

    def _send_or_drop(self, worker: Worker, message: SupervisorMessage) -> bool:
        """Whether the worker's socket took the message."""
        return send_now(self._socket, worker.name.encode(), codec.encode(message))

    async def _receive(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            worker = self.workers.get(identity.decode(errors="replace"))
            try:
                if worker is None or len(frames) != 1:
                    raise MessageError(f"{len(frames)} frames from {identity!r}.")
                self._handle(worker, codec.decode_worker_message(frames[0]))
            except MessageError as error:
                _log.warning("worker_message_dropped", error=str(error))
                if worker is not None and worker.state == "starting" and worker.process is not None:
                    # Its first words are not understood: a worker of another version would be waited for in vain.
                    worker.failure = WorkerFailed(
                        code="ConfigError",
                        message=error.message,
                        hint="Install pingpongd anew, in one version.",
                        permanent=True,
                    )
                    worker.process.kill()

    def _handle(self, worker: Worker, message: WorkerMessage) -> None:
        match message:
            case _ if worker.state in ("stopping", "dead") and isinstance(message, Hello | Loading | Ready):
                _log.debug("worker_message_late", worker=worker.name, message=type(message).__name__)
            case Hello():
                worker.state = "loading"
                self._send_or_drop(worker, Welcome())
            case Loading(stage=stage):
                worker.stage = stage
                _log.info("worker_loading", worker=worker.name, stage=stage)
            case Ready(limits=limits):
                worker.state, worker.stage, worker.limits = "ready", "serving", limits
                worker.memory = PrefixMemory(limits.kv_tokens)
                worker.settled.set()
                _log.info(
                    "worker_ready",
                    worker=worker.name,
                    engine=limits.engine,
                    model=limits.model,
                    max_model_len=limits.max_model_len,
                    kv_tokens=limits.kv_tokens,
                )
            case WorkerFailed():
                worker.failure = message
                if worker.state in ("starting", "loading"):
                    worker.settled.set()  # it may take its time to end, and the others need not go on loading
                _log.error("worker_failed", worker=worker.name, error=message.message, permanent=message.permanent)
            case Heartbeat():
                worker.rss_bytes = message.rss_bytes
                worker.output_tokens = message.output_tokens
            case Prepared(request=request) | RequestFailed(request=request) | PrefixCacheReset(request=request):
                entry = self._waiting.get(request)
                if entry is not None and not entry[1].done():
                    entry[1].set_result(message)
            case _:
                self._listener.hop_message(worker, message)

    async def _watch(self, worker: Worker) -> None:
        """Wait for a worker's end and tell those who wait for it."""
        assert worker.process is not None  # noqa: S101 - started before it is watched
        code = await worker.process.exited()
        for _ in range(_LAST_MESSAGE_TRIES):  # its last message, the reason, may still be on its way
            if worker.failure is not None or worker.state == "stopping":
                break
            await asyncio.sleep(0.01)
        served = worker.state == "ready"
        expected = worker.state == "stopping"
        worker.state, worker.stage = "dead", f"ended with {_exit_text(code)}"
        worker.settled.set()
        if expected:
            _log.info("worker_stopped", worker=worker.name, exit_code=code)
            return
        why = worker.failure.message if worker.failure else f"it ended with {_exit_text(code)}"
        error = EngineError(f'worker "{worker.name}" is gone: {why.rstrip(".")}.', hint="See `pingpong-client status`.")
        for owner, future in list(self._waiting.values()):
            if owner is worker and not future.done():
                future.set_exception(error)
        if served:
            self._listener.worker_lost(worker, str(error))
        await worker.process.over()
        _log.error("worker_died", worker=worker.name, exit_code=code, last_lines=list(worker.process.tail))
        if served and not self.ready and not self.broken.done():
            self.broken.set_exception(
                EngineError(f"no engine is left. {error.message}", hint="Start the daemon again.")
            )

    def _watch_task(self, task: asyncio.Task[None]) -> None:
        """Let the daemon end with a task that fails, and not go on deaf."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None and not self.broken.done():
                self.broken.set_exception(error)

        task.add_done_callback(done)
        self._tasks.append(task)

    def _raise_start_failure(self) -> None:
        for worker in self.workers.values():
            failure = worker.failure
            if worker.state != "dead" and failure is None:
                continue
            if failure is None:
                raise EngineError(
                    f'the worker of group "{worker.name}" {worker.stage} before it could serve.',
                    hint="Its last lines are in the log event worker_died.",
                )
            error: PingpongError = error_from_code(
                failure.code, f'group "{worker.name}": {failure.message}', hint=failure.hint
            )
            raise ConfigError(error.message, hint=error.hint) if failure.permanent else error

    def _printed(self, worker: Worker, line: str) -> None:
        if self._config.log_worker_output:
            _log.info("worker_output", worker=worker.name, line=line)
        else:
            _log.debug("worker_output", worker=worker.name, line=line)

    def _worker_config(self, worker: Worker) -> WorkerConfig:
        group, config = worker.group, self._config
        return WorkerConfig(
            name=group.name,
            devices=group.devices,
            cores=group.cores,
            engine=config.engine,
            model=self._model,
            dtype=config.dtype,
            session=config.session,
            engine_args=config.vllm | group.vllm,
            environment=config.environment | group.environment,
            simulated=group.simulated or config.simulated,
            slab_fd=self._slab.fd,
            control=self._runtime.workers,
            bell=worker.bell,
            supervisor_pid=os.getpid(),
        )

    def _environment(self) -> dict[str, str]:
        """Ours, with temporary files where they are cleared away with the daemon."""
        return os.environ | {"TMPDIR": str(self._runtime.temporary), "PYTHONUNBUFFERED": "1"}


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
