"""Tells the supervisor every second that the worker lives, and what its engine does.

The beat asks nothing of the engine and waits for nothing, so that it goes on while the engine is busy or hung: whether
that is so can be seen in what the beat says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

from pingpong_bus.messages import Heartbeat, WorkerMessage
from pingpong_worker.engine import Engine
from pingpong_worker.step_meter import StepMeter

_FAMILY_BEATS = 30
"""Beats between two looks for new engine processes: that look reads all of /proc."""


class Pulse:
    """Beats until the engine is dead.

    Args:
        engine: checked at every beat.
        interval_s: between beats.
        load: gives the open hops, and the tokens written since the start.
        meter: of the engine.
        report: sends a message to the supervisor.
    """

    def __init__(
        self,
        engine: Engine,
        interval_s: float,
        load: Callable[[], tuple[int, int]],
        meter: StepMeter,
        report: Callable[[WorkerMessage], None],
    ) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._load = load
        self._meter = meter
        self._report = report
        self._family: list[psutil.Process] = []
        self._beats = 0
        self._hurry = asyncio.Event()

    def check_now(self) -> None:
        """Do not wait for the next beat: something suggests that the engine is dead."""
        self._hurry.set()

    async def run(self) -> None:
        """Beat for ever.

        Raises:
            EngineLost: the engine is dead.
        """
        while True:
            await self._engine.check()
            self._beat()
            try:
                await asyncio.wait_for(self._hurry.wait(), self._interval_s)
            except TimeoutError:
                continue
            self._hurry.clear()

    def _beat(self) -> None:
        open_hops, output_tokens = self._load()
        self._report(
            Heartbeat(
                at_ns=time.monotonic_ns(),
                open_hops=open_hops,
                output_tokens=output_tokens,
                rss_bytes=self._rss_bytes(),
                steps=self._meter.steps,
                waiting=self._meter.waiting,
                predicted_step_ms=self._meter.predicted_step_ms,
                scheduler=self._engine.scheduler_state(),
            )
        )

    def _rss_bytes(self) -> int:
        """Resident memory of the worker and of its engine's processes, in bytes."""
        if self._beats % _FAMILY_BEATS == 0:
            this = psutil.Process()
            self._family = [this, *this.children(recursive=True)]
        self._beats += 1
        total = 0
        for process in self._family:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total
