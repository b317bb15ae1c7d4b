"""One worker process: start it, read what it prints, end it with everything that it started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable

import msgspec
import psutil

from pingpong_worker.config import WorkerConfig

_TAIL_LINES = 40
_LINE_LIMIT = 64 * 1024
_KILL_SECONDS = 5.0


class WorkerProcess:
    """A started worker.

    It leads a process group of its own, so that Ctrl-C in the daemon's terminal reaches the daemon alone and what the
    worker starts can be ended with it.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self._process = process
        self._on_line = on_line
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines that it printed."""
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def spawn(
        cls, config: WorkerConfig, environment: dict[str, str], on_line: Callable[[str], None]
    ) -> WorkerProcess:
        """Start a worker.

        Must be awaited on the main thread: the worker asks the kernel for a signal when its parent *thread* ends.

        Args:
            config: what the worker reads from its standard input.
            environment: its whole environment.
            on_line: called with every line that it or its engine prints.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pingpong_worker.main",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            pass_fds=(config.slab_fd,),
            process_group=0,
            limit=_LINE_LIMIT,
        )
        assert process.stdin is not None  # noqa: S101 - asked for above
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        return cls(process, on_line)

    @property
    def pid(self) -> int:
        """The worker's process id, and its group's."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end and for its last words."""
        code = await self._process.wait()
        await self._reader
        return code

    async def end(self, seconds: float) -> None:
        """Give it `seconds` to end by itself, as it was asked to; then SIGTERM, then SIGKILL.

        With 0 it is killed at once: right for one that is still loading, which listens to nobody for minutes and has
        nothing to lose.
        """
        steps: list[tuple[signal.Signals | None, float]] = [(signal.SIGKILL, _KILL_SECONDS)]
        if seconds > 0:
            steps = [(None, seconds), (signal.SIGTERM, _KILL_SECONDS), *steps]
        for number, patience in steps:
            if number is not None and self.exit_code is None:
                self._process.send_signal(number)
            try:
                await asyncio.wait_for(self._process.wait(), patience)
                break
            except TimeoutError:
                continue
        await self._end_group()
        await self._reader

    async def _end_group(self) -> None:
        """End what is left of its group: engines that did not notice that their worker is gone."""
        for number, seconds in ((None, 3.0), (signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
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
        stream = self._process.stdout
        assert stream is not None  # noqa: S101 - asked for in spawn
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit: that much of it is dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self.tail.append(text)
            self._on_line(text)


def _group_lives(group: int) -> bool:
    """Whether a process of the group runs that is not a zombie."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            continue
    return False
