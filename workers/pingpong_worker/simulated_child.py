"""Who computes for the simulated engine: the model, and the child process that it runs in."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Protocol

import msgspec

from pingpong_bus.errors import EngineLost
from pingpong_worker.simulated_messages import LENGTH_BYTES, Command, Reply, frame

_DECODER = msgspec.msgpack.Decoder(list[Reply])
_SHUTDOWN_S = 2.0


class Model(Protocol):
    """Who computes: takes commands and gives replies."""

    @property
    def pid(self) -> int:
        """Its process."""
        ...

    def send(self, command: Command) -> None:
        """Hand a command over, without waiting."""
        ...

    async def receive(self) -> list[Reply]:
        """The next replies.

        Raises:
            EngineLost: it has ended.
        """
        ...

    async def end(self) -> None:
        """End it; returns once it has ended."""
        ...


class ModelProcess:
    """A `Model` in a child process, and its pipes."""

    def __init__(
        self, process: asyncio.subprocess.Process, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader
    ) -> None:
        self.process = process
        self._stdin = stdin
        self._stdout = stdout

    @classmethod
    async def start(cls) -> ModelProcess:
        """Start the process."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pingpong_worker.simulated_process",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None  # noqa: S101  asked for above
        assert process.stdout is not None  # noqa: S101
        return cls(process, process.stdin, process.stdout)

    @property
    def pid(self) -> int:
        """See `Model`."""
        return self.process.pid

    def send(self, command: Command) -> None:
        """See `Model`."""
        if not self._stdin.is_closing():
            self._stdin.write(frame(command))

    async def receive(self) -> list[Reply]:
        """See `Model`."""
        try:
            length = int.from_bytes(await self._stdout.readexactly(LENGTH_BYTES), "little")
            return _DECODER.decode(await self._stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineLost(f"the engine's process ended with code {await self.process.wait()}.") from None

    async def end(self) -> None:
        """Close its input, upon which it ends."""
        self._stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), _SHUTDOWN_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
