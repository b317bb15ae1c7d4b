"""The workers: one per device group; starting them, talking to them, replacing one that died or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
import structlog
import zmq.asyncio

from pingpong_bus.chain import Chain
from pingpong_bus.errors import ConfigError, EngineError, Overloaded, PingpongError
from pingpong_bus.messages import (
    Calibrate,
    Heartbeat,
    NextScored,
    Prepare,
    Prepared,
    PreparedAgent,
    ResetPrefixCache,
    ScoreNext,
    StartHop,
    SupervisorMessage,
    TokenizerSource,
    WorkerFailed,
    WorkerMessage,
)
from pingpong_bus.slab import Slab
from pingpongd.config import DaemonConfig
from pingpongd.group_life import GroupLife
from pingpongd.jitter_watch import JitterWatch
from pingpongd.last_words import log_folder, warn_of_folder
from pingpongd.model_names import engine_arguments
from pingpongd.placement import GroupView
from pingpongd.process import Guard, WorkerProcess
from pingpongd.restart import GiveUp
from pingpongd.runtime_dir import RuntimeDir
from pingpongd.worker_drain import finish_hops
from pingpongd.worker_end import kill_group
from pingpongd.worker_handle import EndOrder, Worker
from pingpongd.worker_link import WorkerLink, lost
from pingpongd.worker_spawn import WorkerSpawn
from pingpongd.worker_talk import WorkerTalk
from pingpongd.worker_watch import WorkerWatch

__all__ = ["Fleet", "FleetListener", "Worker"]

_log = structlog.get_logger()
_LONGEST_STOP_SECONDS = 30.0
"""For all workers together. A process that SIGKILL does not end within it hangs in a driver; nothing can end it."""


class FleetListener(Protocol):
    """Who hears of hops and of the workers that run them."""

    def hop_message(self, worker: Worker, message: WorkerMessage) -> None:
        """A worker reports on one of its hops."""

    def worker_ready(self, worker: Worker) -> None:
        """A worker serves, for the first time or again."""

    def worker_lost(self, worker: Worker, why: str) -> None:
        """A worker that served was reaped: nobody writes its hops' logs any more, and they never report again.

        `worker.hops` still names them; the listener clears it.
        """

    def group_failed(self, worker: Worker, why: str) -> None:
        """A group is given up; no other worker will be tried."""


class Fleet:
    """All workers, and the socket they talk to; belongs to the running event loop."""

    def __init__(
        self,
        config: DaemonConfig,
        models: Mapping[str, str],
        runtime: RuntimeDir,
        slab: Slab,
        context: zmq.asyncio.Context,
        listener: FleetListener,
        guard: Guard | None = None,
    ) -> None:
        """Bind the workers' socket; nothing is started yet.

        Args:
            config: the daemon's; see `apply`.
            models: a name or folder that engines can load, by the names of the models that groups serve.
            runtime: where the sockets are.
            slab: of the token logs.
            context: of the process.
            listener: hears of hops and workers.
            guard: ends workers where this process cannot.

        Raises:
            ConfigError: the socket cannot be bound.
        """
        self._config = config
        self._listener = listener
        self._link = WorkerLink(context, runtime.workers)
        self.models = models
        self.workers = {group.name: Worker(group, runtime.bell(group.name)) for group in config.groups}
        self.health_listeners: list[Callable[[Worker], None]] = []
        """Called with each group whose health has changed its state."""
        self._jitter = JitterWatch(self.workers, lambda: self._config, self._health_changed)
        start = WorkerSpawn(lambda: self._config, models, runtime, slab, guard)

        def spawn(worker: Worker) -> WorkerProcess:
            self._jitter.begins(worker)
            return start(worker)

        self._lives = {
            worker.name: GroupLife(worker, self._link, lambda: self._config, spawn, self)
            for worker in self.workers.values()
        }
        self._watch = WorkerWatch(list(self.workers.values()), lambda: self._config, self.too_slow)
        self.beat_listeners: list[Callable[[Worker, Heartbeat], None]] = [self._jitter.beat]
        """Called with every heartbeat, once it has been taken."""
        self._stopping = False
        self._life_tasks: list[asyncio.Task[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        self._all_served: asyncio.Future[None] = loop.create_future()
        """Done when each has served; fails where one is given up before."""
        self.broken: asyncio.Future[None] = loop.create_future()
        """Fails with what ends the daemon: the last group is given up, or a task of ours has failed."""

    @property
    def ready(self) -> list[Worker]:
        """The workers that take hops, in the configuration's order."""
        return [worker for worker in self.workers.values() if worker.state == "ready"]

    @property
    def refused_frames(self) -> int:
        """Frames on the workers' socket that made no sense, since the start."""
        return self._link.refusals.count

    def tokenizer_source(self, model: str) -> TokenizerSource:
        """Where a model's tokenizer is loaded from: its own, or what raw vLLM arguments name.

        Args:
            model: that groups serve, by name; empty: the default one.
        """
        group = next(worker.group for worker in self.workers.values() if worker.model == model)
        arguments = engine_arguments(self._config, group)
        return TokenizerSource(
            model=str(arguments.get("tokenizer") or self.models[model]),
            revision=arguments.get("tokenizer_revision") or arguments.get("revision"),
            trust_remote_code=bool(arguments.get("trust_remote_code", False)),
        )

    def views(self) -> list[GroupView]:
        """The workers that take hops, for placement."""
        return [worker.view() for worker in self.ready]

    def apply(self, config: DaemonConfig) -> None:
        """Take from a re-read configuration what can change: `decode_first`, `jitter`, `watch`, `restart`,
        `start_seconds`, `log_dir`, `log_worker_output`. A new `heartbeat_s` is for workers that start from now on."""
        self._config = msgspec.structs.replace(
            self._config,
            decode_first=config.decode_first,
            jitter=config.jitter,
            watch=config.watch,
            restart=config.restart,
            start_seconds=config.start_seconds,
            log_dir=config.log_dir,
            log_worker_output=config.log_worker_output,
        )
        self._jitter.apply()
        warn_of_folder(log_folder(self._config.log_dir))

    # --------------------------------------------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Start every worker at the same time; returns when all have served.

        One that dies while it loads is started again, as `restart` says.

        Raises:
            ConfigError: one of them can never start like this.
            EngineError: one of them took too long, or died again and again.
        """
        talk = WorkerTalk(self._link, self._watch, self)
        self._run(self._tasks, self._link.receive(talk.handle, talk.unreadable), "fleet-receive")
        self._run(self._tasks, self._watch.serving(), "fleet-watch-serving")
        self._run(self._tasks, self._watch.starting(), "fleet-watch-starting")
        self._run(self._tasks, self._jitter.run(), "fleet-jitter")
        warn_of_folder(log_folder(self._config.log_dir))
        for worker in self.workers.values():
            self._live(worker)
        await asyncio.wait({self._all_served, self.broken}, return_when=asyncio.FIRST_COMPLETED)
        (self._all_served if self._all_served.done() else self.broken).result()

    async def stop(self, *, fast: bool = False) -> None:
        """End every worker and what it started; may be called again, with `fast`, while it is under way.

        Args:
            fast: do not ask, kill.
        """
        self._stopping = True
        for life in self._lives.values():
            life.stop()
        for worker in self.workers.values():
            if worker.process is not None and fast:
                kill_group(worker.process)
            elif worker.process is not None and worker.order is not None:
                worker.process.kill()  # it hangs, or is ending: no more patience with it
            how: Literal["ask", "kill"] = "ask" if self._watch.beats(worker) else "kill"
            worker.end(EndOrder(how, "the daemon stops", expected=True))
            worker.wake()
        if self._life_tasks:
            _, left = await asyncio.wait(self._life_tasks, timeout=_LONGEST_STOP_SECONDS)
            if left:
                _log.error("worker_not_ended", tasks=[task.get_name() for task in left])
        tasks = [*self._tasks, *self._life_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._jitter.close)
        for future in (self._all_served, self.broken):
            if not future.cancel() and not future.cancelled():
                future.exception()  # seen by now, or of no matter: the fleet is over
        self._link.close()

    async def drain(self, worker: Worker, deadline_s: float) -> None:
        """Let a worker finish its hops, and replace it by a fresh one; returns when that serves.

        Hops that run at the deadline are cut off there, and the listener is told that they are lost. A group that was
        given up begins anew, and its past ends count no more.

        Args:
            worker: one that serves, or is about to, or has failed for good.
            deadline_s: how long its hops may take.

        Raises:
            EngineError: it is being drained already, or no fresh one has come to serve.
        """
        if worker.state == "draining":
            raise EngineError(f'worker "{worker.name}" is being drained already.', hint="Wait for that.")
        fresh = worker.number
        if worker.state == "ready":
            fresh += 1
            await finish_hops(worker, deadline_s)
        elif worker.state == "failed" and not self._stopping:
            _log.info("group_begins_anew", worker=worker.name)
            worker.state, worker.stage = "waiting", "starts again: it was drained"
            self._live(worker)
        await worker.until(
            lambda: worker.state == "failed" or (worker.state == "ready" and worker.number >= fresh) or self._stopping
        )
        if worker.state != "ready":
            why = worker.last_failure if worker.state == "failed" else "the daemon stops"
            raise EngineError(
                f'no fresh worker serves group "{worker.name}": {why}.', hint="See `pingpong-client status`."
            )

    # --------------------------------------------------------------------------------------------------------- messages

    def send(self, worker: Worker, message: SupervisorMessage) -> None:
        """Send without waiting.

        Raises:
            EngineLost: the worker is gone, or takes no new hops.
        """
        if isinstance(message, StartHop) and worker.state != "ready":
            raise lost(worker, f"it is {worker.state}")
        if not self._link.send(worker, message):
            if worker.state == "ready":
                # What it was sent before may be lost, too, and nothing would ever say so: it must not go on.
                worker.end(EndOrder("terminate", "its connection is broken"))
            raise lost(worker, "nobody is at its end of the socket")

    async def prepare(
        self,
        chain: Chain,
        inputs: dict[str, str],
        model: str | None = None,
        agents: Sequence[int] | None = None,
        as_text: Sequence[int] = (),
    ) -> list[PreparedAgent]:
        """Render and tokenize a chain on the least busy worker; where that fails, on another.

        Args:
            chain: validated.
            inputs: a value for each of its inputs.
            model: whose tokenizer it takes, by name; empty: the default model. None: any worker's.
            agents: those to prepare, in order; None: all.
            as_text: of them, those whose upstream outputs are joined as text.

        Raises:
            Overloaded: no worker can, for now.
            PingpongError: what the worker found wrong with it.
        """
        tried: set[bytes] = set()
        why = "all groups are starting"
        wanted = None if agents is None else list(agents)
        while workers := [
            worker for worker in self.ready if worker.identity not in tried and model in (None, worker.model)
        ]:
            worker = min(workers, key=lambda worker: len(worker.hops))
            tried.add(worker.identity)
            try:
                reply = await self._link.ask(
                    worker,
                    lambda request: Prepare(
                        request=request, chain=chain, inputs=inputs, agents=wanted, as_text=list(as_text)
                    ),
                )
            except EngineError as error:
                why = error.message.rstrip(".")
                continue
            assert isinstance(reply, Prepared)  # noqa: S101 - nothing else answers a Prepare
            return reply.agents
        whose = f' the model "{model}"' if model else ""
        raise Overloaded(f"no engine serves{whose} now: {why}.", hint="Watch `pingpong-client status` until one does.")

    async def score(
        self, worker: Worker, ids: Sequence[int], tokens: Sequence[int], grid: int | None
    ) -> list[float | None]:
        """Ask a worker how likely tokens are to follow `ids`.

        Raises:
            EngineError: its engine has failed, or it is gone.
        """
        reply = await self._link.ask(
            worker, lambda request: ScoreNext(request=request, ids=list(ids), tokens=list(tokens), grid=grid)
        )
        assert isinstance(reply, NextScored)  # noqa: S101 - nothing else answers a ScoreNext
        return reply.logprobs

    async def reset_prefix_caches(self) -> None:
        """Empty every serving worker's prefix cache.

        Raises:
            EngineError: one of them could not.
        """
        for worker in self.ready:
            await self._link.ask(worker, lambda request: ResetPrefixCache(request=request))
            worker.memory.forget()

    async def calibrate(self, worker: Worker) -> None:
        """Have an engine on which nothing runs measured anew; its prefix cache is empty then.

        Raises:
            EngineError: it gave way to a hop, could not be measured, or is gone.
        """
        worker.memory.forget()
        await self._link.ask(worker, lambda request: Calibrate(request=request))

    # ------------------------------------------------------------------------------------------ what becomes of workers

    def serves(self, worker: Worker) -> None:
        """A worker has just come to serve."""
        if not self._all_served.done() and all(worker.limits is not None for worker in self.workers.values()):
            self._all_served.set_result(None)
        self._listener.worker_ready(worker)

    def hop_message(self, worker: Worker, message: WorkerMessage) -> None:
        """A worker reports on one of its hops."""
        self._listener.hop_message(worker, message)

    def beat(self, worker: Worker, message: Heartbeat) -> None:
        """A worker's heartbeat has been taken."""
        for listener in self.beat_listeners:
            listener(worker, message)

    def overdue_s(self) -> dict[str, float]:
        """By how much groups that serve are past what the watchdog allows; it replaces them before long."""
        return {worker.name: self._watch.overdue_s(worker) for worker in self.ready}

    def cannot_start(self, worker: Worker, failure: WorkerFailed) -> None:
        """No start of a worker can work; it may take its time to end, and the others need not go on loading."""
        if not self._all_served.done():
            self._all_served.set_exception(ConfigError(_of_group(worker, failure.message), hint=failure.hint))

    def too_slow(self, worker: Worker, stage: str) -> None:
        """A worker's start has taken too long; at the daemon's own start another try would only take as long."""
        if not self._all_served.done():
            self._all_served.set_exception(
                EngineError(
                    f'the engine of group "{worker.name}" did not start within {self._config.start_seconds:g} s '
                    f"(it was at: {stage}).",
                    hint="Raise `start_seconds`, or run with --log-level debug to see what it prints.",
                )
            )

    def lost(self, worker: Worker, why: str) -> None:
        """A worker that served was reaped."""
        self._jitter.gone(worker)
        self._listener.worker_lost(worker, f'worker "{worker.name}" is gone: {why}.')
        worker.hops.clear()

    def given_up(self, worker: Worker, decision: GiveUp, hint: str) -> None:
        """No other worker will be tried in this group."""
        message, hint = _of_group(worker, f"{decision.why}."), hint or "The log events worker_died hold its last lines."
        error: PingpongError = (ConfigError if decision.permanent else EngineError)(message, hint=hint)
        if not self._all_served.done():
            self._all_served.set_exception(error)
            return
        self._listener.group_failed(worker, message)
        if all(worker.state == "failed" for worker in self.workers.values()) and not self.broken.done():
            self.broken.set_exception(error)

    def _health_changed(self, worker: Worker) -> None:
        for listener in self.health_listeners:
            listener(worker)

    def _live(self, worker: Worker) -> None:
        self._run(self._life_tasks, self._lives[worker.name].run(), f"group-{worker.name}")

    def _run(self, tasks: list[asyncio.Task[None]], work: Coroutine[None, None, None], name: str) -> None:
        """Run a task, and let the daemon end with one that fails, and not go on deaf."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None and not self.broken.done():
                self.broken.set_exception(error)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(done)
        tasks.append(task)


def _of_group(worker: Worker, what: str) -> str:
    return f'group "{worker.name}": {what}'
