"""One worker process: start it, read what it prints, end it with everything that it started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from pingpong_worker.config import WorkerConfig
from pingpong_worker.shared_memory_names import PREFIX_VARIABLE, unlink_segments, worker_prefix
from pingpongd.process_group import group_lives

_TAIL_LINES = 40
_LINE_LIMIT = 64 * 1024
_KILL_SECONDS = 5.0
_LAST_WORDS_SECONDS = 2.0
_GRACE_SECONDS = 0.3
"""What the rest of a group has to end by itself after a worker that was not killed: its engine has been shut down, and
Python's resource tracker is at its last work."""
_UNDYING_SECONDS = 10.0
"""When to give up on a process that does not even die of SIGKILL, such as in a driver's uninterruptible wait."""
_POLL_SECONDS = 0.02


class Guard(Protocol):
    """Who ends a worker's processes where this process cannot."""

    def watch(self, pid: int, prefix: str) -> None:
        """A worker has been started, or with an empty prefix a process that has no names in /dev/shm."""

    def forget(self, pid: int) -> None:
        """It is gone, with all that it started."""


class WorkerProcess:
    """A started worker; belongs to the running event loop.

    It leads a process group of its own, so that Ctrl-C in the daemon's terminal reaches the daemon alone and what the
    worker starts can be ended with it. Its end is seen on its pid (a pidfd): a child that holds the worker's output
    open, because it hangs, does not hide it.

    Where its environment has a prefix for names in /dev/shm, it gets one of its own under that, and what has it is
    removed once all of its processes have ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        data: bytes,
        environment: dict[str, str],
        fds: Sequence[int],
        guard: Guard | None = None,
    ) -> None:
        """Start it on the calling thread, which has to be the main one.

        The worker asks the kernel for a signal when its parent *thread* ends.

        Args:
            command: program and arguments.
            data: what it reads from its standard input.
            environment: its whole environment.
            fds: descriptors that it inherits.
            guard: is told of it before it does anything.
        """
        self._guard = guard
        instance = environment.get(PREFIX_VARIABLE)
        self.segment_prefix = worker_prefix(instance) if instance else None
        """Of the names that it and its engine have in /dev/shm."""
        if self.segment_prefix:
            environment = environment | {PREFIX_VARIABLE: self.segment_prefix}
        self._popen = self.launch(command, environment, fds)
        self.pid = self._popen.pid
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines that it printed."""
        self.on_line: Callable[[str], None] | None = None
        """Called with each line that it or its engine prints."""
        self._exited = asyncio.Event()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left: nobody would ever see its end
            self._popen.kill()
            self._popen.wait()
            raise
        if guard is not None and self.segment_prefix is not None:
            guard.watch(self.pid, self.segment_prefix)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        assert self._popen.stdin is not None  # noqa: S101 - asked for above
        try:
            self._popen.stdin.write(data)
            self._popen.stdin.close()
        except BrokenPipeError:  # it has ended already; that is seen on the pid
            pass
        self._over = asyncio.create_task(self._see_through(), name=f"process {self.pid}")

    @staticmethod
    def launch(command: Sequence[str], environment: dict[str, str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
        """Start a process with pipes for its input and its output, which leads a process group of its own."""
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=fds,
            process_group=0,
        )

    @classmethod
    def spawn(cls, config: WorkerConfig, environment: dict[str, str], guard: Guard | None = None) -> WorkerProcess:
        """Start a worker; it inherits the slab's descriptor."""
        command = [sys.executable, "-m", "pingpong_worker.main"]
        return cls(command, msgspec.json.encode(config), environment, [config.slab_fd], guard)

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
        self._signal(signal.SIGKILL)

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
                self._signal(number)
            try:
                async with asyncio.timeout(patience):
                    await self.exited()
                break
            except TimeoutError:
                continue
        await self.over()

    def _signal(self, number: signal.Signals) -> None:
        """Not Popen's `send_signal`, which reaps one that has ended before its group was seen to."""
        if self.exit_code is None:
            os.kill(self.pid, number)  # it is there, a zombie at least, until `_reap`

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if end is not None and end.si_code != os.CLD_EXITED:
            # Killed: its engine has been told nothing, and has nothing to tell. The number is its own until the wait.
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._exited.set()

    async def _see_through(self) -> None:
        """Read what it prints; once it has ended, end its group, remove what they left and hear the last words."""
        reading = asyncio.create_task(self._read())
        await self.exited()
        await self._end_group()
        if self.segment_prefix is not None:
            unlink_segments(self.segment_prefix)
        if self._guard is not None:
            self._guard.forget(self.pid)
        await asyncio.wait({reading}, timeout=_LAST_WORDS_SECONDS)
        reading.cancel()
        await asyncio.wait({reading})

    async def _end_group(self) -> None:
        """End what is left of its group: engines that did not notice that their worker is gone."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        while (waited := loop.time() - start) < _UNDYING_SECONDS and group_lives(self.pid):
            if waited >= _GRACE_SECONDS:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            await asyncio.sleep(_POLL_SECONDS)

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
