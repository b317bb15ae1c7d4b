"""Has engines measured anew that do not take any more what they were measured to take, when nothing runs on them."""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from pingpong_bus.errors import PingpongError
from pingpongd.fleet import Fleet, Worker
from pingpongd.planner import Planner

_log = structlog.get_logger()

PAUSE_S = 300.0
"""Between two measurements of a group, and after one that gave way to a chain."""


class Recalibration:
    """Belongs to the running event loop."""

    def __init__(self, planner: Planner) -> None:
        """Args:
        planner: says which groups have drifted, and hears that they were measured.
        """
        self._planner = planner
        self._not_before: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def tick(self, fleet: Fleet) -> None:
        """Begin where it is due; to be called now and then."""
        now = asyncio.get_running_loop().time()
        for group in self._planner.drifted:
            worker = fleet.workers.get(group)
            # What an engine takes while its device is slowed down is not what it takes.
            well = worker is not None and worker.state == "ready" and worker.health.state == "healthy"
            idle = well and worker is not None and not worker.hops
            if worker is None or not idle or group in self._tasks or now < self._not_before.get(group, 0.0):
                continue
            self._not_before[group] = now + PAUSE_S
            task = asyncio.create_task(self._measure(fleet, worker), name=f"recalibration of {group}")
            self._tasks[group] = task
            task.add_done_callback(partial(self._over, group))

    def _over(self, group: str, _: asyncio.Task[None]) -> None:
        del self._tasks[group]

    async def _measure(self, fleet: Fleet, worker: Worker) -> None:
        _log.info("recalibration_began", worker=worker.name)
        try:
            with self._planner.measuring(worker.name):
                await fleet.calibrate(worker)
        except PingpongError as error:
            _log.info("recalibration_given_up", worker=worker.name, reason=str(error))
            return
        self._planner.measured(worker.name)
        _log.info("recalibration_done", worker=worker.name)
