"""The simulated engine's model on a clock of its own: steps take no time but the clock's, so that times are exact."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

from pingpong_bus.errors import EngineLost
from pingpong_worker.config import SimulatedSettings, WorkerConfig
from pingpong_worker.simulated_engine import SimulatedEngine
from pingpong_worker.simulated_messages import (
    Abort,
    CacheReset,
    Chunk,
    Command,
    Configure,
    Reply,
    ResetCache,
    Scheduled,
    Started,
)
from pingpong_worker.simulated_scheduler import SimulatedScheduler

_TURNS = 12
"""Turns of the event loop in which all who wait for a step's replies have done what they do next."""


class VirtualModel:
    """Speaks the `Model` protocol."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pid = os.getpid()
        self._scheduler: SimulatedScheduler | None = None
        self._commands: asyncio.Queue[Command | None] = asyncio.Queue()

    def monotonic(self) -> float:
        """In place of `time.monotonic`."""
        return self.now

    async def start(self) -> VirtualModel:
        return self

    def send(self, command: Command) -> None:
        self._commands.put_nowait(command)

    async def receive(self) -> list[Reply]:
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            replies: list[Reply] = []
            while not self._commands.empty():
                replies += self._take(self._commands.get_nowait())
            step = self._scheduler.plan() if self._scheduler and not replies else None
            if step is not None:
                assert self._scheduler is not None
                self.now += step.duration_s
                replies += self._scheduler.commit(step)
                if step.state is not None:
                    replies.append(Scheduled(step.state))
            if replies:
                return replies
            if step is None:
                self._commands.put_nowait(await self._commands.get())

    async def end(self) -> None:
        self._commands.put_nowait(None)

    def _take(self, command: Command | None) -> list[Reply]:
        match command, self._scheduler:
            case None, _:
                raise EngineLost("it was ended.")
            case Configure(), _:
                self._scheduler = SimulatedScheduler(command.settings, decode_first=command.decode_first)
                return [Started()]
            case Chunk(), SimulatedScheduler() as scheduler:
                scheduler.add(command)
            case Abort(request), SimulatedScheduler() as scheduler:
                scheduler.abort(request)
            case ResetCache(), SimulatedScheduler() as scheduler:
                scheduler.reset_prefix_cache()
                return [CacheReset()]
        return []


def worker_config(settings: SimulatedSettings, **changes: Any) -> WorkerConfig:
    """Of a worker with a simulated engine."""
    values: dict[str, Any] = {
        "name": "g0",
        "devices": ["cpu:0"],
        "engine": "simulated",
        "simulated": settings,
        "slab_fd": -1,
        "control": "",
        "bell": "",
        "supervisor_pid": os.getpid(),
        **changes,
    }
    return WorkerConfig(**values)


@asynccontextmanager
async def virtual_engine(
    settings: SimulatedSettings, model: VirtualModel | None = None, **changes: Any
) -> AsyncIterator[SimulatedEngine]:
    """An engine by whose clock calibrations go."""
    model = model or VirtualModel()
    engine = SimulatedEngine(worker_config(settings, **changes), model.start)
    await engine.start()
    with (
        mock.patch("pingpong_worker.timed_answer.time", model),
        mock.patch("pingpong_worker.calibration.time", model),
    ):
        yield engine
    await engine.shutdown()
