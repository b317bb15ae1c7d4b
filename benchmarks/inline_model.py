"""The simulated engine's model inside the worker's own event loop: for hundreds of workers on one machine.

What `pingpong_worker.simulated_process` is in a process of its own, without the pipes and the second process. Times
are the same as far as the event loop keeps them.
"""

from __future__ import annotations

import asyncio
import os

from pingpong_bus.errors import EngineLost
from pingpong_worker.simulated_arrivals import Arrivals
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
from pingpong_worker.simulated_timing import TimingModel


class InlineModel:
    """Speaks the `Model` protocol of `simulated_engine.py`; belongs to one event loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._replies: asyncio.Queue[list[Reply] | None] = asyncio.Queue()
        self._commands = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._scheduler: SimulatedScheduler
        self._arrivals: Arrivals

    @classmethod
    async def start(cls) -> InlineModel:
        """Make one."""
        return cls()

    def send(self, command: Command) -> None:
        """See `Model`."""
        match command:
            case Configure(settings, decode_first):
                self._scheduler = SimulatedScheduler(settings, decode_first=decode_first)
                self._arrivals = Arrivals(TimingModel(settings))
                self._running = asyncio.create_task(self._run(settings.start_ms * 1e-3 * settings.time_scale))
                self._running.add_done_callback(lambda _: self._replies.put_nowait(None))
            case Chunk():
                self._arrivals.add(command, self._loop.time())
            case Abort(request):
                self._arrivals.drop(request)
                self._scheduler.abort(request)
            case ResetCache():
                self._scheduler.reset_prefix_cache()
                self._replies.put_nowait([CacheReset()])
        self._commands.set()

    async def receive(self) -> list[Reply]:
        """See `Model`."""
        replies = await self._replies.get()
        if replies is None:
            raise EngineLost("the engine was ended.")
        return replies

    async def end(self) -> None:
        """See `Model`."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _run(self, start_s: float) -> None:
        """Steps back to back while there is work, each for as long as it takes from the end of the one before."""
        await asyncio.sleep(start_s)
        self._replies.put_nowait([Started()])
        end = self._loop.time()
        while True:
            now = self._loop.time()
            for chunk in self._arrivals.take(now):
                self._scheduler.add(chunk)
            step = self._scheduler.plan()
            if step is None:
                await self._wait(self._arrivals.wait_s(now))
                end = self._loop.time()
                continue
            end += step.duration_s
            await asyncio.sleep(end - self._loop.time())
            replies = self._scheduler.commit(step)
            if step.state is not None:
                replies.append(Scheduled(step.state))
            if replies:
                self._replies.put_nowait(replies)

    async def _wait(self, limit_s: float | None) -> None:
        """Wait for a command, or until the next request is through the host."""
        self._commands.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._commands.wait()
        except TimeoutError:
            return
