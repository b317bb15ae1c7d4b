"""The daemon's life: start everything, serve, drain, leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import structlog
import zmq.asyncio

from pingpong_bus.errors import ConfigError, PingpongError, SlabFull
from pingpong_bus.messages import StatusReply
from pingpong_bus.slab import Slab
from pingpong_worker.pinning import check_cores, check_devices, cuda_uuids, parse_device, present_cores
from pingpongd.chains import Chains
from pingpongd.config import DaemonConfig
from pingpongd.control import Control
from pingpongd.fleet import Fleet
from pingpongd.model import fetch_model
from pingpongd.runtime_dir import RuntimeDir, default_runtime_dir

_log = structlog.get_logger()
_CANCEL_SECONDS = 5.0


class Daemon:
    """One instance; `run` is its whole life."""

    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._started = time.monotonic()
        self._state: Literal["starting", "ready", "draining"] = "starting"
        self._fleet: Fleet | None = None
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; the first drains, a second one cancels what still runs.

        Raises:
            PingpongError: it could not start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        config = self._config
        _check_devices(config)
        path = Path(config.runtime_dir) if config.runtime_dir else default_runtime_dir(config.instance)
        with (
            RuntimeDir(path.absolute(), config.instance) as runtime,
            _create_slab(config) as slab,
        ):
            context = zmq.asyncio.Context()
            try:
                await self._serve(runtime, slab, context)
            finally:
                context.term()
        _log.info("daemon_stopped", instance=config.instance)

    async def _serve(self, runtime: RuntimeDir, slab: Slab, context: zmq.asyncio.Context) -> None:
        control = Control(runtime.control, context)
        chains = Chains(self._config, slab, control.publish)
        serving = asyncio.create_task(control.serve(chains, lambda number: self._status(number, chains, slab)))
        signalled = asyncio.create_task(self._signals.get())
        starting = asyncio.create_task(self._start_fleet(runtime, slab, context, chains))
        _log.info(
            "daemon_started",
            instance=self._config.instance,
            pid=os.getpid(),
            socket=runtime.control.removeprefix("ipc://"),
        )
        try:
            await _first(starting, signalled, serving)
            if starting.done() and not signalled.done():
                fleet = starting.result()
                self._state = "ready"
                _log.info("daemon_ready", seconds=round(time.monotonic() - self._started, 1))
                await _first(signalled, serving, fleet.broken)
                if fleet.broken.done():
                    fleet.broken.result()
                if signalled.done():
                    await self._drain(chains)
            if serving.done():
                serving.result()
        finally:
            self._state = "draining"
            try:
                await _cancelled(starting)
                if self._fleet is not None:
                    await self._fleet.stop()
                await _cancelled(serving, signalled)
            finally:
                control.close()

    async def _start_fleet(
        self, runtime: RuntimeDir, slab: Slab, context: zmq.asyncio.Context, chains: Chains
    ) -> Fleet:
        config = self._config
        model = await fetch_model(config.model) if config.engine == "vllm" else config.model
        self._fleet = Fleet(config, model, runtime, slab, context, chains)
        await self._fleet.start()
        chains.fleet = self._fleet  # only now: a chain that came earlier would find half of the groups
        return self._fleet

    async def _drain(self, chains: Chains) -> None:
        """Let running chains finish; cancel them at the deadline or at a second signal."""
        self._state, chains.draining = "draining", True
        _log.info("daemon_draining", chains=len(chains.live()), seconds=self._config.drain_seconds)
        again = asyncio.create_task(self._signals.get())
        idle = asyncio.create_task(chains.idle.wait())
        await asyncio.wait({again, idle}, timeout=self._config.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for record in chains.live():
            chains.cancel(record.id, "the daemon was stopped")
        await asyncio.wait({idle}, timeout=_CANCEL_SECONDS)
        for task in (again, idle):
            task.cancel()

    def _status(self, request: int, chains: Chains, slab: Slab) -> StatusReply:
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
        )


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their ends; what they raised has been seen, or is moot now."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _create_slab(config: DaemonConfig) -> Slab:
    """The token slab; memory for it that is not there is a matter of the configuration."""
    try:
        return Slab.create(config.slots, config.log_capacity)
    except SlabFull as error:
        raise ConfigError(error.message, field="slots", hint=error.hint) from None


def _check_devices(config: DaemonConfig) -> None:
    """Raise ConfigError for a device that is not there or is claimed twice, before anything is started."""
    owners: dict[str, str] = {}
    for index, group in enumerate(config.groups):
        try:
            if config.engine == "vllm":
                check_devices(group.devices, present_cores(), cuda_uuids)
                for device in claimed(group.devices, cuda_uuids):
                    if device in owners:
                        raise ConfigError(
                            f'{device} is in group "{owners[device]}" already.',
                            field="devices",
                            hint="An engine wants its devices for itself.",
                        )
                    owners[device] = group.name
            check_cores(group.cores, present_cores(), "cores")
        except ConfigError as error:
            raise ConfigError(error.message, hint=error.hint, field=f"groups[{index}].{error.field}") from None


def claimed(devices: Sequence[str], uuids: Callable[[], Sequence[str]]) -> list[str]:
    """Every core and GPU of a group by one name, however the configuration names it.

    Args:
        devices: that have been checked.
        uuids: lists this machine's GPUs; called only where a GPU is named by its index.
    """
    found: list[str] = []
    for device in devices:
        parsed = parse_device(device)
        if isinstance(parsed, list):
            found += [f"core {core}" for core in parsed]
        else:
            found.append(uuids()[parsed] if isinstance(parsed, int) else parsed)
    return found


def run_daemon(config: DaemonConfig) -> None:
    """Run a daemon in this process; see `Daemon.run`."""
    try:
        asyncio.run(Daemon(config).run())
    except PingpongError as error:
        _log.error("daemon_failed", code=error.code, error=str(error))
        raise
