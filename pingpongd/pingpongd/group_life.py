"""A device group's life: its worker starts, serves, ends, and is started again, until the group is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from pingpong_bus.messages import Stop
from pingpongd.config import DaemonConfig
from pingpongd.last_words import keep_last_words, log_folder
from pingpongd.process import WorkerProcess
from pingpongd.restart import End, GiveUp, History, ended
from pingpongd.watchdog import starting
from pingpongd.worker_end import end_process
from pingpongd.worker_handle import Worker
from pingpongd.worker_link import WorkerLink

_log = structlog.get_logger()


class LifeListener(Protocol):
    """Who hears of a group's fate."""

    def lost(self, worker: Worker, why: str) -> None:
        """A worker that served was reaped."""

    def given_up(self, worker: Worker, decision: GiveUp, hint: str) -> None:
        """No other worker will be tried."""


class GroupLife:
    """What happens to one group; `run` is its task."""

    def __init__(
        self,
        worker: Worker,
        link: WorkerLink,
        config: Callable[[], DaemonConfig],
        spawn: Callable[[Worker], WorkerProcess],
        listener: LifeListener,
    ) -> None:
        """Args:
        worker: the group's.
        link: what it talks over.
        config: gives the present configuration.
        spawn: starts a process; may raise OSError.
        listener: hears of its fate.
        """
        self._worker = worker
        self._link = link
        self._config = config
        self._spawn = spawn
        self._listener = listener
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Start no other worker."""
        self._stopping.set()

    async def run(self) -> None:
        """Keep a worker going until `stop`, or until the group is given up; may be run again after that."""
        worker, history = self._worker, History()
        while not self._stopping.is_set():
            end = await self._one_start()
            if end is None:
                continue
            worker.last_failure = end.why
            history, decision = ended(history, self._config().restart, end)
            if self._stopping.is_set():
                break
            if isinstance(decision, GiveUp):
                worker.state, worker.stage = "failed", f"given up: {decision.why}"
                _log.error(
                    "group_failed",
                    worker=worker.name,
                    why=decision.why,
                    permanent=decision.permanent,
                    hint=f"`pingpong-client drain --group {worker.name}` has it begin anew.",
                )
                self._listener.given_up(worker, decision, worker.failure.hint if worker.failure else "")
                return
            worker.state, worker.stage = "waiting", f"starts again in {decision.wait_s:g} s: {end.why}"
            _log.info("worker_waits", worker=worker.name, seconds=decision.wait_s, why=end.why)
            await self._wait(decision.wait_s)
        worker.state, worker.stage = "dead", "stopped"

    async def _one_start(self) -> End | None:
        """Start a worker and see it to its end; returns None for an end that was wanted."""
        worker, loop = self._worker, asyncio.get_running_loop()
        worker.begin(starting(loop.time()), self._config().watch.heartbeat_s)
        self._link.attach(worker)
        try:
            process = worker.process = self._spawn(worker)
        except OSError as error:
            self._link.detach(worker)
            worker.watch = None
            worker.state, worker.stage = "dead", "not started"
            return End(at=loop.time(), why=f"it could not be started: {error.strerror}", served=False)
        _log.info(
            "worker_started", worker=worker.name, pid=process.pid, devices=worker.group.devices, start=worker.number
        )
        code = await self._reaped(process)
        worker.watch = None
        if worker.state in ("ready", "draining"):
            worker.state, worker.stage = "stopping", f"ended with {_exit_text(code)}"
        await self._link.quiet(worker)
        expected = worker.order is not None and worker.order.expected
        why = self._cause(code)
        worker.state, worker.stage = "dead", f"ended with {_exit_text(code)}"
        self._link.fail(worker, why)
        self._link.detach(worker)
        if worker.served:
            worker.memory.forget()
            if not self._stopping.is_set():
                self._listener.lost(worker, why)
        at = loop.time()
        await process.over()  # the next one needs its devices and their memory
        if expected:
            _log.info("worker_stopped", worker=worker.name, exit_code=code)
            return None
        lines = list(process.tail)
        _log.error("worker_died", worker=worker.name, why=why, exit_code=code, start=worker.number, last_lines=lines)
        folder = log_folder(self._config().log_dir)
        if folder is not None:
            keep_last_words(folder, worker.name, why, lines)
        permanent = worker.failure is not None and worker.failure.permanent
        return End(at=at, why=why, served=worker.served, permanent=permanent)

    async def _reaped(self, process: WorkerProcess) -> int:
        """Wait for the process's end, or see to it once it is ordered."""
        worker = self._worker
        exited = asyncio.create_task(process.exited())
        exited.add_done_callback(lambda _: worker.wake())
        try:
            await worker.until(lambda: worker.order is not None or exited.done())
            if worker.order is not None and not exited.done():
                _log.info("worker_ends", worker=worker.name, how=worker.order.how, why=worker.order.why)
                self._link.fail(worker, worker.order.why)
                if worker.order.how == "ask":
                    self._link.send(worker, Stop())
                await end_process(process, worker.order, self._config().watch.stop_s)
            return await exited
        finally:
            exited.cancel()

    def _cause(self, code: int) -> str:
        """Why it has ended, as a clause."""
        worker = self._worker
        if worker.failure is not None:
            return worker.failure.message.rstrip(".")
        if worker.order is not None:
            return worker.order.why
        return f"it ended with {_exit_text(code)}"

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
