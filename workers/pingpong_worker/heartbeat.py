"""Tells the supervisor every second that the worker lives, and what its engine does.

The beat asks nothing of the engine and waits for nothing, so that it goes on while the engine is busy or hung: whether
that is so can be seen in what the beat says.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable

from pingpong_bus.messages import BusState, Heartbeat, WorkerMessage
from pingpong_worker.engine import Engine
from pingpong_worker.family import Family
from pingpong_worker.garbage_watch import collections_of_this_process
from pingpong_worker.loop_watch import LoopWatch
from pingpong_worker.step_meter import StepMeter

_FAMILY_BEATS = 30
"""Beats between two looks for new engine processes."""


class Pulse:
    """Beats until the engine is dead.

    Args:
        engine: checked at every beat.
        interval_s: between beats.
        load: gives the open hops, and the tokens written since the start.
        meter: of the engine.
        bus: gives what was heard of others' tokens.
        report: sends a message to the supervisor.
    """

    def __init__(
        self,
        engine: Engine,
        interval_s: float,
        load: Callable[[], tuple[int, int]],
        meter: StepMeter,
        bus: Callable[[], BusState],
        report: Callable[[WorkerMessage], None],
    ) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._load = load
        self._meter = meter
        self._bus = bus
        self._report = report
        self._family = Family(os.getpid())
        self._collections = collections_of_this_process()
        self._hurry = asyncio.Event()

    def check_now(self) -> None:
        """Do not wait for the next beat: something suggests that the engine is dead."""
        self._hurry.set()

    async def run(self) -> None:
        """Beat for ever.

        Raises:
            EngineLost: the engine is dead.
        """
        loop_watch = LoopWatch(lambda: self._meter.waiting > 0)
        try:
            for beat in itertools.count():
                await self._engine.check()
                if beat % _FAMILY_BEATS == 0:
                    await asyncio.to_thread(self._family.look)
                self._beat(loop_watch.take_ms())
                try:
                    await asyncio.wait_for(self._hurry.wait(), self._interval_s)
                except TimeoutError:
                    continue
                self._hurry.clear()
        finally:
            loop_watch.stop()

    def _beat(self, loop_late_ms: float) -> None:
        open_hops, output_tokens = self._load()
        self._report(
            Heartbeat(
                at_ns=time.monotonic_ns(),
                open_hops=open_hops,
                output_tokens=output_tokens,
                rss_bytes=self._family.rss_bytes(),
                steps=self._meter.steps,
                waiting=self._meter.waiting,
                predicted_step_ms=self._meter.predicted_step_ms,
                scheduler=self._engine.scheduler_state(),
                step_counts=self._meter.take_counts(),
                pids=list(self._family.pids),
                gc_ms=self._collections.total_ms,
                loop_late_ms=loop_late_ms,
                bus=self._bus(),
            )
        )
