"""The daemon's life: start everything, serve, drain, leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import signal
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import structlog
import zmq.asyncio

from pingpong_bus.errors import ConfigError, Overloaded, PingpongError, SlabFull, UsageError
from pingpong_bus.messages import Heartbeat, Progress, StatusReply
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import Slab
from pingpongd.calls import resolve_calls
from pingpongd.chain_steps import StepTools
from pingpongd.chains import Chains
from pingpongd.config import DaemonConfig
from pingpongd.connections import raise_descriptor_limit
from pingpongd.control import Control
from pingpongd.devices import check_groups
from pingpongd.fleet import Fleet, Worker
from pingpongd.log_terminal import show_start
from pingpongd.logs import set_level, set_redactor, shown_on, tell_suppressed
from pingpongd.model import fetch_model
from pingpongd.model_names import served_models
from pingpongd.monitoring import Monitoring
from pingpongd.notify import Notifier, feed_watchdog
from pingpongd.redaction import redactor_of
from pingpongd.reload import merge
from pingpongd.runtime_dir import RuntimeDir, default_runtime_dir
from pingpongd.step_runner import StepRunner
from pingpongd.store import Store, default_state_dir
from pingpongd.sweeper import Sweeper

_log = structlog.get_logger()
_TICK_SECONDS = 1.0
_EXPIRY_SECONDS = 60.0
_COLLECT_AFTER = (10_000, 20, 50)
"""Python's thresholds for collections of garbage; its own are 700, 10, 10."""
_GRACE_SECONDS = 60.0
"""What a service manager is asked to wait further while engines load or chains finish; asked for at every tick."""


class Daemon:
    """One instance; `run` is its whole life."""

    def __init__(self, config: DaemonConfig, read_again: Callable[[], DaemonConfig] | None = None) -> None:
        """Args:
        config: how to run.
        read_again: reads the configuration anew, for SIGHUP; None: there is nothing to read.
        """
        self._config = config
        self._read_again = read_again
        self._started = time.monotonic()
        self._ready = False
        self._draining = False
        self._asked_to_end = False
        """By a client."""
        self._hurry = False
        """Whether a second signal has come."""
        self._fleet: Fleet | None = None
        self._chains: Chains | None = None
        self._monitoring: Monitoring | None = None
        self._progress: Progress | None = None
        """Of what is done before there are workers."""
        self._notifier = Notifier()
        self._stops: asyncio.Queue[float | None] = asyncio.Queue()
        """Asked-for ends, each with its deadline in seconds; None: the configuration's."""
        self._ticks = 0

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or a client's drain; what runs is finished, a second signal stops at once.

        Raises:
            PingpongError: it could not start, or cannot go on.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stops.put_nowait, None)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        config = self._config
        check_groups(config)
        path = Path(config.runtime_dir) if config.runtime_dir else default_runtime_dir(config.instance)
        state = Path(config.state_dir) if config.state_dir else default_state_dir(config.instance)
        with (
            RuntimeDir(path.absolute(), config.instance, config.client_group) as runtime,
            _create_slab(config) as slab,
        ):
            store = Store.open(state.absolute(), config.store)
            context = zmq.asyncio.Context()
            try:
                self._monitoring = Monitoring(config)
                self._monitoring.start()
                async with Sweeper(runtime) as sweeper:
                    await self._serve(runtime, slab, store, context, sweeper)
            finally:
                await store.close()
                context.term()
                if self._monitoring is not None:
                    await self._monitoring.stop()
        _log.info("daemon_stopped", instance=config.instance)

    async def _serve(
        self, runtime: RuntimeDir, slab: Slab, store: Store, context: zmq.asyncio.Context, sweeper: Sweeper
    ) -> None:
        runner = StepRunner(self._config.calls, os.environ, sweeper)
        control = Control(runtime, context)
        bell: Publisher | None = None
        try:
            bell = Publisher(context, runtime.steps_bell)
            tools = StepTools(runner, bell)
            self._chains = chains = Chains(self._config, slab, store, control.publish, self._monitoring, tools)
            chains.restore()
        except BaseException:
            control.close()  # else the context would wait for it for ever
            if bell is not None:
                bell.close()
            raise

        def status(number: int) -> StatusReply:
            return self._status(number, chains, slab, store, control)

        serving = asyncio.create_task(control.serve(chains, status, self._drain_group))
        stopped = asyncio.create_task(self._stops.get())
        starting = asyncio.create_task(self._start_fleet(runtime, slab, context, chains, sweeper))
        ticking = asyncio.create_task(self._tick(chains, lambda: status(0)))
        expiring = asyncio.create_task(_expire(chains))
        fed = asyncio.create_task(feed_watchdog(self._notifier, lambda: self._ticks))
        helping = [fed]
        if (terminal := shown_on()) is not None:
            helping.append(asyncio.create_task(show_start(terminal, lambda: status(0))))
        _log.info(
            "daemon_started",
            instance=self._config.instance,
            pid=os.getpid(),
            socket=runtime.control.removeprefix("ipc://"),
        )
        try:
            await _first(starting, stopped, serving, ticking, expiring)
            if starting.done() and not stopped.done():
                fleet = starting.result()
                self._ready = True
                _collect_seldom()
                self._notifier.ready()
                self._notifier.status(self._status_line(chains))
                self._tell_monitoring(lambda: status(0))  # who sees it ready finds /readyz so, too
                _log.info("daemon_ready", seconds=round(time.monotonic() - self._started, 1))
                await _first(stopped, serving, ticking, expiring, fleet.broken)
                if fleet.broken.done():
                    fleet.broken.result()
                if stopped.done():
                    await self._drain(chains, fleet, stopped.result())
            for task in (serving, ticking, expiring):
                if task.done():
                    task.result()
        finally:
            self._draining = True
            chains.drain()
            self._notifier.stopping()
            try:
                await _cancelled(starting)
                await chains.end_steps()
                await self._stop_fleet()
                await chains.settled()
                await _cancelled(serving, stopped, ticking, expiring, *helping)
            finally:
                control.close()
                bell.close()
                self._notifier.close()

    async def _start_fleet(
        self, runtime: RuntimeDir, slab: Slab, context: zmq.asyncio.Context, chains: Chains, sweeper: Sweeper
    ) -> Fleet:
        config = self._config
        self._notifier.status("fetching the model")
        models = served_models(config)
        if config.engine == "vllm":
            for name, wanted in models.items():
                self._progress = Progress(stage="looking for the model")
                try:
                    models[name] = await fetch_model(wanted, runtime, sweeper, self._take_progress)
                except ConfigError as error:
                    if name and error.field == "model":
                        raise ConfigError(error.message, field=f"models.{name}.model", hint=error.hint) from None
                    raise
            self._progress = None
        config = self._config  # it may have been read again meanwhile
        self._fleet = Fleet(config, models, runtime, slab, context, chains.runs, sweeper)
        self._fleet.beat_listeners.append(self._beat)
        await self._fleet.start()
        chains.serve(self._fleet)  # only now: a chain that came earlier would find half of the groups
        return self._fleet

    def _take_progress(self, progress: Progress) -> None:
        self._progress = progress

    async def _stop_fleet(self) -> None:
        """End the workers; a signal meanwhile makes short work of them."""
        if self._fleet is None:
            return
        stopping = asyncio.create_task(self._fleet.stop(fast=self._hurry))
        again = asyncio.create_task(self._stops.get())
        await _first(stopping, again)
        if not stopping.done():
            await self._fleet.stop(fast=True)
        await stopping
        await _cancelled(again)

    async def _drain(self, chains: Chains, fleet: Fleet, deadline_s: float | None) -> None:
        """Let running chains finish, up to the deadline or the next signal; the others are kept for the next start."""
        seconds = self._config.drain_seconds if deadline_s is None else deadline_s
        self._draining = True
        chains.drain()
        self._notifier.stopping()
        _log.info("daemon_draining", chains=len(chains.live()), seconds=seconds)
        again = asyncio.create_task(self._stops.get())
        idle = asyncio.create_task(chains.idle.wait())
        awaited: set[asyncio.Future[Any]] = {again, idle, fleet.broken}
        await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self._hurry = again.done()
        await _cancelled(again, idle)
        if fleet.broken.done():
            fleet.broken.result()
        if kept := len(chains.live()):
            _log.info("chains_kept", chains=kept, reason="they go on at the next start")

    async def _drain_group(self, group: str | None, deadline_s: float | None) -> None:
        """A client's `Drain`.

        Raises:
            UsageError: there is no such group.
            Overloaded: the daemon is not serving, or is being stopped.
            EngineError: no fresh worker has come to serve.
        """
        if group is None:
            if not self._asked_to_end:  # a second one is no second signal, which would make short work of all
                self._asked_to_end = True
                self._stops.put_nowait(deadline_s)
            return
        if self._draining or self._fleet is None or not self._ready:
            raise Overloaded("the daemon is not serving.", hint="See `pingpong-client status`.")
        worker = self._fleet.workers.get(group)
        if worker is None:
            known = ", ".join(self._fleet.workers)
            raise UsageError(f'there is no device group "{group}".', field="group", hint=f"There are: {known}.")
        await self._fleet.drain(worker, self._config.drain_seconds if deadline_s is None else deadline_s)

    def _reload(self) -> None:
        """SIGHUP: read the configuration again, take what can be changed, and name what cannot."""
        chains = self._chains
        if self._read_again is None or chains is None:  # at the very start it has only just been read
            return
        self._notifier.reloading()
        try:
            reload = merge(self._config, self._read_again())
            resolve_calls(reload.config.calls, os.environ)  # before anything is changed
        except PingpongError as error:
            _log.error("config_not_reloaded", error=str(error))
        else:
            self._config = reload.config
            chains.configure(reload.config)
            if self._fleet is not None:
                self._fleet.apply(reload.config)
            set_level(reload.config.log_level)
            set_redactor(redactor_of(reload.config, os.environ))
            if self._monitoring is not None:
                self._monitoring.apply(reload.config)
            _log.info("config_reloaded", changed=reload.changed, needs_restart=reload.needs_restart)
        if self._ready:
            self._notifier.ready()

    async def _tick(self, chains: Chains, status: Callable[[], StatusReply]) -> None:
        """What has to be done again and again: deadlines, the service manager's status line and patience."""
        while True:
            self._ticks += 1
            chains.tick()
            tell_suppressed()
            self._tell_monitoring(status)
            self._notifier.status(self._status_line(chains))
            if self._draining or not self._ready:
                self._notifier.extend(_GRACE_SECONDS)
            await asyncio.sleep(_TICK_SECONDS)

    def _tell_monitoring(self, status: Callable[[], StatusReply]) -> None:
        if self._monitoring is not None:
            self._monitoring.tick(status, self._overdue_s)

    def _overdue_s(self) -> dict[str, float]:
        return self._fleet.overdue_s() if self._fleet is not None else {}

    def _beat(self, worker: Worker, message: Heartbeat) -> None:
        if self._monitoring is not None:
            self._monitoring.beat(worker.name, worker.number, message)

    @property
    def _state(self) -> Literal["starting", "ready", "degraded", "draining"]:
        if self._draining:
            return "draining"
        if not self._ready or self._fleet is None:
            return "starting"
        return "ready" if len(self._fleet.ready) == len(self._fleet.workers) else "degraded"

    def _status_line(self, chains: Chains) -> str:
        """One line for people, such as ``systemctl status`` shows."""
        counts = chains.counts()
        work = f"{counts.get('running', 0)} chains running, {counts.get('queued', 0)} waiting"
        workers = self._fleet.workers.values() if self._fleet is not None else ()
        absent = ", ".join(f"{worker.name}: {worker.stage}" for worker in workers if worker.state != "ready")
        return f"{self._state}; {work}" + (f"; {absent}" if absent else "")

    def _status(self, request: int, chains: Chains, slab: Slab, store: Store, control: Control) -> StatusReply:
        fleet = self._fleet
        return StatusReply(
            request=request,
            instance=self._config.instance,
            version=version("pingpongd"),
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started, 1),
            state=self._state,
            slots_free=slab.free_slots,
            slots_total=slab.slots,
            slot_capacity=slab.capacity,
            workers=[worker.status() for worker in fleet.workers.values()] if fleet else [],
            chains=chains.counts(),
            store=store.status(),
            refused_frames={"control": control.refused_frames, "workers": fleet.refused_frames if fleet else 0},
            python=platform.python_version(),
            exactness=self._config.exactness,
            progress=self._progress,
        )


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their ends; what they raised has been seen, or is moot now."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _expire(chains: Chains) -> None:
    """Drop ended chains whose time is over; apart from the ticks, for a disk may keep it waiting."""
    while True:
        await chains.expire()
        await asyncio.sleep(_EXPIRY_SECONDS)


def _collect_seldom() -> None:
    """Have Python look for garbage seldom, and never among what the start has left.

    A full collection walks every list of tokens: with 256 chains of 20,000 it was measured to hold the event loop up
    for 95 ms, 235 at most, some times a minute. Next to nothing here is in cycles, so it finds next to nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def _create_slab(config: DaemonConfig) -> Slab:
    """The token slab; memory for it that is not there is a matter of the configuration."""
    try:
        return Slab.create(config.slots, config.log_capacity)
    except SlabFull as error:
        raise ConfigError(error.message, field="slots", hint=error.hint) from None


def run_daemon(config: DaemonConfig, read_again: Callable[[], DaemonConfig] | None = None) -> None:
    """Run a daemon in this process; see `Daemon`."""
    try:
        raise_descriptor_limit()
        asyncio.run(Daemon(config, read_again).run())
    except PingpongError as error:
        _log.error("daemon_failed", code=error.code, error=str(error))
        raise
