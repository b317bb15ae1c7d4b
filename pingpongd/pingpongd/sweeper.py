"""The sweeper, a small process that clears up after a supervisor that was killed: the supervisor's side of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from types import TracebackType

import structlog

from pingpongd.process_group import read_stat
from pingpongd.runtime_dir import RuntimeDir

_log = structlog.get_logger()
_QUIT_SECONDS = 2.0
_BACK_OFF = (0.0, 1.0, 5.0, 30.0)
"""Seconds before each start of another one; the last holds for all that follow."""
_STEADY_SECONDS = 60.0
"""One that has lived so long dies for another reason than those before it."""
_DEAF = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class Sweeper:
    """Keeps a sweeper's process, and tells it of the workers; an async context manager inside that of `RuntimeDir`.

    The process is in a session of its own and deaf to the signals that stop services. Where it dies another one takes
    its place.
    """

    def __init__(self, runtime: RuntimeDir) -> None:
        self._runtime = runtime
        self._watched: dict[int, str] = {}
        """The line about each worker, by its pid."""
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """None for the moments when there is none."""
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Sweeper:
        """Start it.

        Raises:
            OSError: no process can be started.
        """
        self._launch()
        self._keeping = asyncio.create_task(self._keep(), name="sweeper")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it and wait for its end; the supervisor has cleared up itself."""
        assert self._keeping is not None  # noqa: S101 - entered before
        self._keeping.cancel()
        await asyncio.wait({self._keeping})
        process = self._process
        if process is None:
            return
        self._tell("quit\n")
        try:
            async with asyncio.timeout(_QUIT_SECONDS):
                await self._exited.wait()
        except TimeoutError:  # somebody has stopped it
            process.kill()
            await self._exited.wait()

    def watch(self, pid: int, prefix: str) -> None:
        """Tell it of a worker that has just been started; harmless where it has ended and been reaped.

        Args:
            pid: of the worker, which leads a process group.
            prefix: of the worker's names in /dev/shm; empty where it has none.
        """
        stat = read_stat(pid)
        if stat is not None:
            self._watched[pid] = f"{pid} {stat.id.born} {prefix or '-'}\n"
            self._tell(self._watched[pid])

    def forget(self, pid: int) -> None:
        """A worker is gone with everything that it started; harmless where it was forgotten before.

        The process itself knows: this is for the one that may take its place.
        """
        self._watched.pop(pid, None)

    def _launch(self) -> None:
        # Blocked signals stay blocked in a child: it is deaf from its first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "pingpongd.sweeper_process", str(os.getpid()), str(self._runtime.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.stdin is not None  # noqa: S101 - asked for above
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        self._exited.clear()
        descriptor = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(descriptor, self._reap, process, descriptor)
        for line in self._watched.values():
            self._tell(line)

    def _tell(self, line: str) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None  # noqa: S101 - started with a pipe
        try:
            os.write(self._process.stdin.fileno(), line.encode("ascii"))
        except BrokenPipeError:  # it has died, which its pid will tell
            return
        except BlockingIOError:  # it has not read for hundreds of workers: it hangs
            self._process.kill()

    def _reap(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        process.wait()
        assert process.stdin is not None  # noqa: S101 - started with a pipe
        process.stdin.close()
        self._process = None
        self._exited.set()

    async def _keep(self) -> None:
        """Start another one whenever it has died."""
        loop = asyncio.get_running_loop()
        deaths, started = 0, loop.time()
        while True:
            await self._exited.wait()
            if loop.time() - started > _STEADY_SECONDS:
                deaths = 0
            seconds = _BACK_OFF[min(deaths, len(_BACK_OFF) - 1)]
            deaths += 1
            _log.warning("sweeper_died", next_start_s=seconds)
            await asyncio.sleep(seconds)
            started = loop.time()
            try:
                self._launch()
            except OSError as error:
                _log.error("sweeper_not_started", error=str(error))
