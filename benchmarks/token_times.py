"""When tokens were committed, as any process on the host can hear it: by the workers' doorbells.

    async with TokenTimes(runtime_dir) as times:
        await client.run(chain)
        gaps = [gap for log in await times.take() for gap in log.gaps_ms]

Workers ring after each append to a token log, on a socket of their own (``bus-GROUP.sock``), so that each log is known
by the group that writes it. A process of its own listens: in a thread, a busy interpreter would stamp frames late by
up to its switch interval, which is half a decode step on a GPU. A doorbell takes about 0.1 ms.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pingpong_bus.codec import MAX_BELL_BYTES, decode_bell
from pingpong_bus.errors import DaemonUnavailable, MessageError

CONNECT_MS = 10_000
QUIET_MS = 30
"""Nothing rang for as long: what a chain's end has outrun has arrived."""
TAKE_NS = 1_000_000_000
"""After that what was heard is given even if something still rings."""
_LINE_BYTES = 2**30
"""Longest line that the listener may answer with; a timestamp takes about 16 bytes."""


class LogTimes(msgspec.Struct, kw_only=True):
    """The doorbells of one token log, which is one agent's output."""

    group: str
    """Of the worker that wrote it; where an agent was resumed on another group, each has its part."""
    slot: int
    generation: int
    """With the slot it names the log for a daemon's life."""
    at_ns: list[int] = []
    """When each doorbell with tokens was heard: CLOCK_MONOTONIC, which all processes of a host share."""
    tokens: list[int] = []
    """How many tokens each of them told of."""
    missed: int = 0
    """Tokens that stand in the log between those heard of: doorbells that were dropped."""

    @property
    def gaps_ms(self) -> list[float]:
        """Between neighbouring doorbells; as a reader of the stream sees them."""
        return [(later - earlier) / 1e6 for earlier, later in zip(self.at_ns, self.at_ns[1:], strict=False)]


class TokenTimes:
    """Listens to all groups of one daemon; an async context manager.

    Args:
        runtime_dir: the daemon's folder of sockets.

    Raises:
        DaemonUnavailable: no worker of it rings there.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._folder = runtime_dir
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, str(self._folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            start_new_session=True,  # an interrupt at the terminal is for us; it ends when its input does
        )
        try:
            await self._answer()
        except DaemonUnavailable:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def take(self) -> list[LogTimes]:
        """The logs that were written to since the last call, in order of their first doorbell.

        Call it when nothing decodes: a log that goes on afterwards comes again, and the gap between is in neither.

        Raises:
            DaemonUnavailable: the listener has ended.
        """
        assert self._process is not None  # noqa: S101 - it is entered
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        self._process.stdin.write(b"take\n")
        return msgspec.json.decode(await self._answer(), type=list[LogTimes])

    async def _answer(self) -> bytes:
        assert self._process is not None  # noqa: S101 - it is entered
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        line = await self._process.stdout.readline()
        if not line:
            raise DaemonUnavailable(f"no doorbells can be heard in {self._folder}.", hint="Does the daemon run there?")
        return line

    async def _end(self) -> None:
        assert self._process is not None  # noqa: S101 - it is entered
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        self._process.stdin.close()
        await self._process.wait()


# ----------------------------------------------------------------------------------------------- the listener's process


class Hearing:
    """What was heard since the last `take`; pure but for the clock of its caller."""

    def __init__(self) -> None:
        self._logs: dict[tuple[str, int, int], LogTimes] = {}
        self._lengths: dict[tuple[int, int], int] = {}

    def hear(self, group: str, frame: bytes, at_ns: int) -> None:
        """Note one frame; one that is no doorbell is left out."""
        try:
            chunk = decode_bell(frame)
        except MessageError:
            return
        if not chunk.ids:
            return
        log = (chunk.slot, chunk.generation)
        times = self._logs.get((group, *log))
        if times is None:
            times = LogTimes(group=group, slot=chunk.slot, generation=chunk.generation)
            self._logs[group, *log] = times
        times.at_ns.append(at_ns)
        times.tokens.append(len(chunk.ids))
        times.missed += max(0, chunk.first_index - self._lengths.get(log, 0))
        self._lengths[log] = chunk.first_index + len(chunk.ids)

    def take(self) -> list[LogTimes]:
        """The logs so far, then none."""
        taken = list(self._logs.values())
        self._logs.clear()
        return taken


def _listen(paths: Sequence[Path]) -> None:
    """Listen until standard input ends; a line of it is answered with what was heard."""
    context = zmq.Context()
    wakes: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    wakes.bind("inproc://asked")
    sockets = {_connected(context, path): path.stem.removeprefix("bus-") for path in paths}
    sys.stdout.buffer.write(b"listening\n")
    sys.stdout.buffer.flush()
    threading.Thread(target=_read_input, args=(context,), daemon=True).start()
    poller = zmq.Poller()
    for socket in (wakes, *sockets):
        poller.register(socket, zmq.POLLIN)
    hearing, asked_ns = Hearing(), 0
    while True:
        ready = dict(poller.poll(QUIET_MS if asked_ns else None))
        at_ns = time.monotonic_ns()
        for socket in ready.keys() & sockets.keys():
            hearing.hear(sockets[socket], socket.recv(), at_ns)
        if wakes in ready:
            if not wakes.recv():
                break
            asked_ns = at_ns
        if asked_ns and (not ready or at_ns - asked_ns > TAKE_NS):
            sys.stdout.buffer.write(msgspec.json.encode(hearing.take()) + b"\n")
            sys.stdout.buffer.flush()
            asked_ns = 0
    context.destroy(linger=0)


def _read_input(context: zmq.Context[Any]) -> None:
    """Pass lines on to the listener; an empty message is their end."""
    asks = context.socket(zmq.PAIR)
    asks.connect("inproc://asked")
    while line := sys.stdin.buffer.readline():
        asks.send(line)
    asks.send(b"")


def _connected(context: zmq.Context[Any], path: Path) -> zmq.Socket[bytes]:
    """A subscriber of all logs of one worker, once its publisher knows it.

    Raises:
        DaemonUnavailable: nobody answers.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BELL_BYTES)
    socket.subscribe(b"")
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(f"ipc://{path}")
    if not monitor.poll(CONNECT_MS):
        raise DaemonUnavailable(f"nobody rings at {path}.")
    recv_monitor_message(monitor)
    socket.disable_monitor()
    return socket


def main() -> int:
    """Listen to the daemon whose folder of sockets is the one argument."""
    paths = sorted(Path(sys.argv[1]).glob("bus-*.sock"))
    if not paths:
        return DaemonUnavailable.exit_code
    try:
        _listen(paths)
    except DaemonUnavailable as error:
        print(f"token_times.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
