"""One device group's worker as the supervisor sees it. The same object stands for all its successive processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, MutableSet
from typing import Literal

import msgspec

from pingpong_bus.messages import (
    DeviceState,
    EngineFigures,
    EngineLimits,
    GroupHealth,
    HostState,
    ItlSummary,
    Progress,
    SchedulerState,
    WorkerFailed,
    WorkerState,
    WorkerStatus,
)
from pingpongd.clock_join import ClockBounds
from pingpongd.config import GroupConfig
from pingpongd.placement import GroupView, PrefixMemory
from pingpongd.process import WorkerProcess
from pingpongd.watchdog import Serving, Starting


class EndOrder(msgspec.Struct, frozen=True):
    """A worker's process shall end."""

    how: Literal["ask", "wait", "terminate", "kill"]
    """"ask": by the message `Stop`. "wait": it is ending by itself. "terminate": by SIGTERM, for it is hung. "kill":
    at once. Whatever is still there a while later is killed."""
    why: str
    """A clause for people."""
    expected: bool = False
    """It was wanted, and is no failure of the worker's."""


class HopSet(MutableSet[str]):
    """The hops that a worker runs; tells of every change, so that its drain need not poll."""

    def __init__(self, changed: Callable[[], None], hops: Iterable[str] = ()) -> None:
        self._changed = changed
        self._hops = set(hops)

    def add(self, value: str) -> None:
        """It runs one more."""
        self._hops.add(value)
        self._changed()

    def discard(self, value: str) -> None:
        """That one is over; harmless where it is unknown."""
        self._hops.discard(value)
        self._changed()

    def __contains__(self, value: object) -> bool:
        return value in self._hops

    def __iter__(self) -> Iterator[str]:
        return iter(self._hops)

    def __len__(self) -> int:
        return len(self._hops)

    def __repr__(self) -> str:
        return f"HopSet({sorted(self._hops)})"


class Worker:
    """A group's worker, through all its starts; belongs to one event loop."""

    def __init__(self, group: GroupConfig, bell: str) -> None:
        """Args:
        group: the devices that it spans.
        bell: the endpoint at which each of its processes rings.
        """
        self.group = group
        self.bell = bell
        self.stage = "starting"
        self.number = 0
        """Of the start, counted from 1; 0 before the first."""
        self.process: WorkerProcess | None = None
        self.heartbeat_s = 0.0
        """What the running process was told."""
        self.limits: EngineLimits | None = None
        """Of the engine that serves, or served last."""
        self.figures: EngineFigures | None = None
        """The same; None where it was not measured."""
        self.served = False
        """Whether this start's process has served."""
        self.failure: WorkerFailed | None = None
        """Why this start's process ends, in its own words."""
        self.order: EndOrder | None = None
        """Why this start's process has to end, in ours."""
        self.watch: Starting | Serving | None = None
        """What the watchdog knows of it; None where it is not watched."""
        self.hops = HopSet(self.wake)
        self.memory = PrefixMemory(0)
        self.rss_bytes = 0
        self.output_tokens = 0
        self.scheduler: SchedulerState | None = None
        self.clock = ClockBounds()
        """What is known of its clock, for every process anew."""
        self.health = GroupHealth()
        self.itl = ItlSummary()
        self.host: HostState | None = None
        self.gpus: list[DeviceState] = []
        self.progress: Progress | None = None
        """Of the start."""
        self.kv_held_tokens = 0
        """Set aside for the full lengths of its hops."""
        self.last_failure = ""
        """Why the last process ended that was not asked to."""
        self._state: WorkerState = "starting"
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name

    @property
    def model(self) -> str:
        """The name of the model that it serves; empty: the default one."""
        return self.group.model or ""

    @property
    def identity(self) -> bytes:
        """Of this start's connection: what a dead process has sent is never taken for its successor's."""
        return f"{self.name}.{self.number}".encode()

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""
        return self._state

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._state = state
        self.wake()

    def begin(self, watch: Starting, heartbeat_s: float) -> None:
        """A new start: nothing of the last process counts any more."""
        self.number += 1
        self.served, self.failure, self.order = False, None, None
        self.rss_bytes, self.output_tokens, self.scheduler = 0, 0, None
        self.itl, self.host, self.gpus, self.progress = ItlSummary(), None, [], None
        self.kv_held_tokens = 0
        self.clock = ClockBounds()
        self.memory.forget()
        self.watch, self.heartbeat_s = watch, heartbeat_s
        self.state, self.stage = "starting", "starting"

    def end(self, order: EndOrder) -> None:
        """Have its process end; the first order stands."""
        if self.order is None and self._state not in ("dead", "waiting", "failed"):
            self.order, self.watch = order, None
            self.state, self.stage = "stopping", f"stopping: {order.why}"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is asked anew after each change of the state, the order or the hops."""
        while not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def view(self, *, held: bool = True) -> GroupView:
        """As placement sees it; with `held`, also what its prefix cache holds."""
        limits, prefixes = self.limits, self.memory.held if held else frozenset[str]()
        if limits is None:
            return GroupView(self.name, len(self.hops), prefixes, model=self.model)
        health = self.health
        return GroupView(
            self.name,
            len(self.hops),
            prefixes,
            limits.overlap,
            self.figures,
            paced=limits.decode_first,
            degraded=health.state != "healthy",
            slowdown=health.slowdown,
            cause=health.cause,
            model=self.model,
        )

    def status(self) -> WorkerStatus:
        """As clients see it."""
        running = self.process is not None and self.process.exit_code is None
        return WorkerStatus(
            name=self.name,
            devices=self.group.devices,
            state=self.state,
            stage=self.stage,
            pid=self.process.pid if self.process is not None and running else None,
            hops=len(self.hops),
            limits=self.limits,
            rss_bytes=self.rss_bytes,
            output_tokens=self.output_tokens,
            restarts=max(0, self.number - 1),
            failure=self.last_failure,
            scheduler=self.scheduler,
            figures=self.figures,
            health=self.health,
            itl=self.itl,
            host=self.host,
            gpus=self.gpus,
            progress=self.progress if self.state == "loading" else None,
            kv_held_tokens=self.kv_held_tokens,
            model=self.model,
        )

    def wake(self) -> None:
        """Something has changed: ask the conditions anew that `until` waits for."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
