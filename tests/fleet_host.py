"""A fleet of simulated workers in this process's event loop, for tests: real processes, and a listener that notes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq.asyncio

from daemon_process import until
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import HopEnded, HopSpec, Literals, Sampling, StartHop, WorkerMessage
from pingpong_bus.slab import Slab
from pingpongd.config import DaemonConfig, parse_config
from pingpongd.fleet import Fleet, Worker
from pingpongd.runtime_dir import RuntimeDir

FAST: dict[str, Any] = {
    "engine": "simulated",
    "calibrate": False,
    "slots": 64,
    "simulated": {"step_ms": 2.0, "row_us": 1.0},
    "restart": {"backoff_s": 0.05, "backoff_max_s": 0.2},
}
"""Quick replacements; heartbeats at their usual pace, for the machine may be busy."""
CHAIN = Chain(name="c", agents=[Agent(name="one", raw_prompt="hello there", max_tokens=4)])


def fleet_config(groups: str = "a", **changes: Any) -> DaemonConfig:
    """One simulated group for each letter; `changes` are merged into `FAST`."""
    document = dict(FAST)
    for key, value in changes.items():
        document[key] = document[key] | value if isinstance(document.get(key), dict) else value
    document["groups"] = [{"name": name, "devices": ["cpu:0"]} for name in groups]
    return parse_config(document)


class Notes:
    """A listener that writes down what it hears, and clears the hops of lost workers."""

    def __init__(self) -> None:
        self.ready: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.failed: list[tuple[str, str]] = []
        self.hops: list[WorkerMessage] = []
        self.alive_when_lost: list[bool] = []

    def hop_message(self, worker: Worker, message: WorkerMessage) -> None:
        self.hops.append(message)
        if isinstance(message, HopEnded):
            worker.hops.discard(message.hop)

    def worker_ready(self, worker: Worker) -> None:
        self.ready.append(worker.name)

    def worker_lost(self, worker: Worker, why: str) -> None:
        assert worker.process is not None
        self.alive_when_lost.append(psutil.pid_exists(worker.process.pid))
        self.lost.append((worker.name, why))
        worker.hops.clear()

    def group_failed(self, worker: Worker, why: str) -> None:
        self.failed.append((worker.name, why))

    def ended(self) -> list[HopEnded]:
        return [message for message in self.hops if isinstance(message, HopEnded)]


class FleetHost:
    """A fleet, and everything around it that a daemon would give it."""

    def __init__(self, config: DaemonConfig, folder: Path) -> None:
        self.runtime = RuntimeDir(folder, "default")
        self.slab = Slab.create(config.slots, config.log_capacity)
        self.context = zmq.asyncio.Context()
        self.notes = Notes()
        self.fleet = Fleet(config, {"": ""}, self.runtime, self.slab, self.context, self.notes)
        self.seen: set[psutil.Process] = set()
        self._hops = 0

    def __getitem__(self, name: str) -> Worker:
        return self.fleet.workers[name]

    def pid(self, name: str = "a") -> int:
        """Of the group's present process."""
        process = self[name].process
        assert process is not None
        return process.pid

    def engine_pid(self, name: str = "a") -> int:
        """Of the simulated engine under the group's worker."""
        (child,) = psutil.Process(self.pid(name)).children()
        return child.pid

    def signal(self, number: signal.Signals, name: str = "a") -> None:
        self.note()
        psutil.Process(self.pid(name)).send_signal(number)

    def note(self) -> None:
        """Remember every process there is by now."""
        self.seen |= set(psutil.Process().children(recursive=True))

    def start_hop(self, name: str = "a", *, max_tokens: int = 8) -> str:
        """Run a hop on a worker."""
        self._hops += 1
        hop = f"chain/0/{self._hops}"
        self.fleet.send(self[name], StartHop(spec=self.spec(name, hop, max_tokens=max_tokens)))
        self[name].hops.add(hop)
        return hop

    def spec(self, name: str, hop: str, *, max_tokens: int = 8) -> HopSpec:
        return HopSpec(
            hop=hop,
            output=msgspec.structs.replace(self.slab.allocate(), bell=self[name].bell),
            segments=[Literals(ids=[5, 6, 7])],
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        )

    def start(self) -> asyncio.Task[None]:
        """Start the fleet; the task ends when all have served."""

        async def start() -> None:
            async with asyncio.timeout(60):
                await self.fleet.start()

        return asyncio.create_task(start())

    async def serves_again(self, name: str = "a", *, after: int = 1) -> None:
        """Wait until a later start of the worker than that one serves."""
        worker = self[name]
        await until(lambda: worker.state == "ready" and worker.number > after, f"{name} serves again")
        self.note()

    async def kill_until_given_up(self, name: str) -> None:
        """Kill a worker at each of its starts, until no other comes."""
        worker = self[name]
        while worker.state != "failed":
            start = worker.number
            self.signal(signal.SIGKILL, name)
            await self.until(
                lambda start=start: worker.state == "failed" or (worker.state == "ready" and worker.number > start),  # type: ignore[misc]
                "another start",
            )

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await until(condition, what, 60)

    async def close(self) -> None:
        self.note()
        await self.fleet.stop()
        self.context.term()
        self.slab.close()
        self.runtime.__exit__(None, None, None)
        await until(lambda: not running(self.seen), "the end of every process", 20)


def running(processes: Sequence[psutil.Process] | set[psutil.Process]) -> list[psutil.Process]:
    """Those that are there and no zombies."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.asynccontextmanager
async def fleet_host(folder: Path, config: DaemonConfig, *, start: bool = True) -> AsyncIterator[FleetHost]:
    """A fleet that is ended with the block, however that ends."""
    host = FleetHost(config, folder)
    try:
        if start:
            await host.start()
            host.note()
        yield host
    finally:
        await host.close()
