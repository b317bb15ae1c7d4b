"""Watches all workers by the watchdog's rules, and orders the end of one that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog

from pingpong_bus.messages import Heartbeat
from pingpongd import watchdog
from pingpongd.config import DaemonConfig
from pingpongd.worker_end import stands_stopped
from pingpongd.worker_handle import EndOrder, Worker

_log = structlog.get_logger()
_LONGEST_LOOK_SECONDS = 1.0
_START_LOOK_SECONDS = 1.0
"""Between two looks at the processes of workers that load; each reads all of /proc."""


class WorkerWatch:
    """The watchdog's eyes and hands."""

    def __init__(
        self, workers: Sequence[Worker], config: Callable[[], DaemonConfig], too_slow: Callable[[Worker, str], None]
    ) -> None:
        """Args:
        workers: all there are.
        config: gives the present configuration.
        too_slow: called with a worker whose start takes too long, and the stage that it is at.
        """
        self._workers = workers
        self._config = config
        self._too_slow = too_slow

    def beat(self, worker: Worker, message: Heartbeat) -> None:
        """Take a worker's heartbeat."""
        if isinstance(worker.watch, watchdog.Serving):
            now = asyncio.get_running_loop().time()
            worker.watch = watchdog.beat(worker.watch, self._rules(worker), now, message)

    def beats(self, worker: Worker) -> bool:
        """Whether it serves and has lately said so; one that does not is not worth a wait."""
        watch, now = worker.watch, asyncio.get_running_loop().time()
        return isinstance(watch, watchdog.Serving) and now - watch.heard_at < 2 * worker.heartbeat_s

    def overdue_s(self, worker: Worker) -> float:
        """For how long a worker that serves should have been judged hung, and stands: 0 where all is well."""
        if not isinstance(worker.watch, watchdog.Serving):
            return 0.0
        return watchdog.overdue_s(worker.watch, self._rules(worker), asyncio.get_running_loop().time())

    async def serving(self) -> None:
        """Look at the heartbeats of the workers that serve, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._look_s())
            for worker in self._workers:
                if isinstance(worker.watch, watchdog.Serving):
                    worker.watch, why = watchdog.look(worker.watch, self._rules(worker), loop.time())
                    _judge(worker, why)

    async def starting(self) -> None:
        """Look whether workers that load stand stopped, or take too long, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_START_LOOK_SECONDS)
            for worker in self._workers:
                before = worker.watch
                if not isinstance(before, watchdog.Starting) or worker.process is None:
                    continue
                stopped = await asyncio.to_thread(stands_stopped, worker.process.pid)
                if worker.watch is not before:
                    continue  # it has come to serve meanwhile, or is another start's
                rules = msgspec.structs.replace(self._rules(worker), look_s=_START_LOOK_SECONDS)
                worker.watch, why = watchdog.look_at_start(before, rules, loop.time(), stopped=stopped)
                if why and not stopped:
                    self._too_slow(worker, worker.stage)
                _judge(worker, why)

    def _rules(self, worker: Worker) -> watchdog.Rules:
        watch = self._config().watch
        return watchdog.Rules(
            heartbeat_s=worker.heartbeat_s,
            misses=watch.misses,
            stall_s=watch.stall_s,
            start_s=self._config().start_seconds,
            look_s=self._look_s(),
        )

    def _look_s(self) -> float:
        return min(self._config().watch.heartbeat_s / 2, _LONGEST_LOOK_SECONDS)


def _judge(worker: Worker, why: str) -> None:
    if why:
        _log.error("worker_hung", worker=worker.name, pid=worker.process and worker.process.pid, why=why)
        worker.end(EndOrder("terminate", why))
