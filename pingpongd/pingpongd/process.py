"""One worker process: start it, read what it prints, end it with everything that it started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from pingpong_worker.config import WorkerConfig

_TAIL_LINES = 40
_LINE_LIMIT = 64 * 1024
_KILL_SECONDS = 5.0
_LAST_WORDS_SECONDS = 2.0
_ADRIFT = ((None, 3.0), (signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0))
"""What the rest of a group gets once its worker has ended, and how long each may take: first time to notice by itself,
so that Python's resource tracker clears away the engine's shared memory; it would not outlive a signal to all."""


class WorkerProcess:
    """A started worker; belongs to the running event loop.

    It leads a process group of its own, so that Ctrl-C in the daemon's terminal reaches the daemon alone and what the
    worker starts can be ended with it. Its end is seen on its pid (a pidfd): a child that holds the worker's output
    open, because it hangs, does not hide it.
    """

    def __init__(self, command: Sequence[str], data: bytes, environment: dict[str, str], fds: Sequence[int]) -> None:
        """Start it on the calling thread, which has to be the main one.

        The worker asks the kernel for a signal when its parent *thread* ends.

        Args:
            command: program and arguments.
            data: what it reads from its standard input.
            environment: its whole environment.
            fds: descriptors that it inherits.
        """
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=fds,
            process_group=0,
        )
        self.pid = self._popen.pid
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines that it printed."""
        self.on_line: Callable[[str], None] | None = None
        """Called with each line that it or its engine prints."""
        self._exited = asyncio.Event()
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        assert self._popen.stdin is not None  # noqa: S101 - asked for above
        try:
            self._popen.stdin.write(data)
            self._popen.stdin.close()
        except BrokenPipeError:  # it has ended already; that is seen on the pid
            pass
        self._over = asyncio.create_task(self._see_through(), name=f"process {self.pid}")

    @classmethod
    def spawn(cls, config: WorkerConfig, environment: dict[str, str]) -> WorkerProcess:
        """Start a worker; it inherits the slab's descriptor."""
        command = [sys.executable, "-m", "pingpong_worker.main"]
        return cls(command, msgspec.json.encode(config), environment, [config.slab_fd])

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._popen.returncode

    async def exited(self) -> int:
        """Wait for its own end; what it started may still be there."""
        await self._exited.wait()
        assert self.exit_code is not None  # noqa: S101 - set before the event
        return self.exit_code

    async def over(self) -> None:
        """Wait until everything that it started has ended, too."""
        await asyncio.shield(self._over)

    def kill(self) -> None:
        """SIGKILL it; harmless where it has ended."""
        self._popen.send_signal(signal.SIGKILL)

    async def end(self, seconds: float) -> None:
        """Give it `seconds` to end by itself, as it was asked to; then SIGTERM, then SIGKILL.

        With 0 it is killed at once: right for one that is still loading, which listens to nobody for minutes and has
        nothing to lose.
        """
        steps: list[tuple[signal.Signals | None, float]] = [(signal.SIGKILL, _KILL_SECONDS)]
        if seconds > 0:
            steps = [(None, seconds), (signal.SIGTERM, _KILL_SECONDS), *steps]
        for number, patience in steps:
            if number is not None:
                self._popen.send_signal(number)  # does nothing to one that has been reaped
            try:
                async with asyncio.timeout(patience):
                    await self.exited()
                break
            except TimeoutError:
                continue
        await self.over()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._popen.wait()
        self._exited.set()

    async def _see_through(self) -> None:
        """Read what it prints; once it has ended, end its group and hear the last words."""
        reading = asyncio.create_task(self._read())
        await self.exited()
        await self._end_group()
        await asyncio.wait({reading}, timeout=_LAST_WORDS_SECONDS)
        reading.cancel()
        await asyncio.wait({reading})

    async def _end_group(self) -> None:
        """End what is left of its group: engines that did not notice that their worker is gone."""
        for number, seconds in _ADRIFT:
            if number is not None:
                try:
                    os.killpg(self.pid, number)
                except ProcessLookupError:
                    return
            for _ in range(int(seconds / 0.05)):
                if not _group_lives(self.pid):
                    return
                await asyncio.sleep(0.05)

    async def _read(self) -> None:
        stream = asyncio.StreamReader(limit=_LINE_LIMIT)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._popen.stdout)
        try:
            while True:
                try:
                    line = await stream.readline()
                except ValueError:  # longer than the limit: that much of it is dropped
                    continue
                if not line:
                    return
                text = line.decode(errors="replace").rstrip()
                self.tail.append(text)
                if self.on_line is not None:
                    self.on_line(text)
        finally:
            transport.close()


def _group_lives(group: int) -> bool:
    """Whether a process of the group runs that is not a zombie."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getpgid(int(entry.name)) == group and psutil.Process(int(entry.name)).status() != "zombie":
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return False
