"""A process that is given bytes and gives bytes, with all that it starts in a session of its own: it leaves nothing
behind, whoever of the two ends first."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from pingpongd.process import Guard

_KILLED_S = 5.0
"""How long a process may take to die of SIGKILL; one that hangs in a driver is left to the kernel then."""
_READ_LIMIT = 1 << 16


class ChildProcess:
    """Belongs to the running event loop; made on its thread by `start`.

    Its end is seen on its pid (a pidfd). What is left of its group is killed at once then, before the number of the
    group can be anybody else's.
    """

    def __init__(self, popen: subprocess.Popen[bytes], guard: Guard | None) -> None:
        """See `start`."""
        self._popen = popen
        self._guard = guard
        self._pidfd = os.pidfd_open(popen.pid)
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        self.stdout = asyncio.StreamReader(_READ_LIMIT)
        self.stderr = asyncio.StreamReader(_READ_LIMIT)
        self._transports: list[asyncio.BaseTransport] = []
        self._stdin: asyncio.WriteTransport | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        guard: Guard | None = None,
        errors: bool = True,
    ) -> ChildProcess:
        """Start a process.

        Args:
            command: program and arguments; no shell.
            environment: its whole environment.
            guard: is told of it, to end it where this process cannot; None: nobody is.
            errors: what it writes to its standard error is to be had; else that is ours.

        Raises:
            OSError: it cannot be started.
        """
        popen = _launch(command, environment, errors=errors)
        try:
            if guard is not None:
                guard.watch(popen.pid, "")
            child = cls(popen, guard)
        except OSError:  # no descriptor is left: nobody would ever see its end
            os.killpg(popen.pid, signal.SIGKILL)
            popen.communicate()
            raise
        try:
            await child._connect()
        except BaseException:
            await child.end()
            raise
        return child

    @property
    def pid(self) -> int:
        """Its number, and its group's."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._popen.returncode

    def write(self, data: bytes, *, close: bool = False) -> None:
        """Give it bytes, as fast as it takes them; what it does not take is lost without a word."""
        if self._stdin is None or self._stdin.is_closing():
            return
        self._stdin.write(data)
        if close:
            self._stdin.write_eof()

    async def exited(self) -> int:
        """Wait for its end; returns its exit code."""
        await self._exited.wait()
        assert self.exit_code is not None  # noqa: S101 - set before the event
        return self.exit_code

    async def end(self, grace_s: float = 0.0) -> None:
        """End it and all of its group: SIGTERM, and SIGKILL after `grace_s`; and close its pipes."""
        try:
            if self.exit_code is None and grace_s > 0:
                self._signal(signal.SIGTERM)
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self._exited.wait()
        finally:
            if self.exit_code is None:
                self._signal(signal.SIGKILL)
            for transport in self._transports:
                transport.close()
            # One that is closing, and has nothing left to write, must not be closed again.
            if self._stdin is not None and (not self._stdin.is_closing() or self._stdin.get_write_buffer_size()):
                self._stdin.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_S):
                await self._exited.wait()

    async def _connect(self) -> None:
        loop, popen = asyncio.get_running_loop(), self._popen
        pipes: list[IO[bytes]] = [pipe for pipe in (popen.stdin, popen.stderr, popen.stdout) if pipe is not None]
        try:
            for pipe, stream in ((popen.stdout, self.stdout), (popen.stderr, self.stderr)):
                if pipe is not None:
                    pipes.pop()
                    reading, _ = await loop.connect_read_pipe(_protocol_of(stream), pipe)
                    self._transports.append(reading)
            self._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipes.pop())
        finally:
            for pipe in pipes:  # not reached; the others are their transports' to close
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # some programs become another user's, such as sudo
            os.killpg(self.pid, number)  # its leader is there, a zombie at least, until `_reap`

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._signal(signal.SIGKILL)
        self._popen.wait()
        if self._guard is not None:
            self._guard.forget(self.pid)
        self._exited.set()


def _launch(command: Sequence[str], environment: Mapping[str, str], *, errors: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if errors else None,
        env=environment,
        start_new_session=True,
    )


def _protocol_of(stream: asyncio.StreamReader) -> Callable[[], asyncio.StreamReaderProtocol]:
    return lambda: asyncio.StreamReaderProtocol(stream)
