"""The seam between a client and the wire: frames out, frames in, and the news that the daemon has gone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pingpong_bus.errors import DaemonUnavailable, MessageError, PingpongError

START_HINT = "Start it with `pingpongd --config FILE`, or name its socket with --socket."

_CONNECT_RETRIES = 3
"""Refused connections (100 ms apart) before a socket file counts as left behind; a full backlog looks the same once."""

# Not EVENT_HANDSHAKE_FAILED_NO_DETAIL: that is a peer who goes in the midst of it, as a daemon that is killed does;
# EVENT_DISCONNECTED follows.
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED


class Transport(Protocol):
    """A connection to one daemon. Not shared between event loops."""

    @property
    def peer(self) -> str:
        """What errors call the daemon's end."""
        ...

    async def open(self) -> None:
        """Connect.

        Raises:
            DaemonUnavailable: nobody is there.
            MessageError: somebody is, and speaks another protocol.
        """
        ...

    async def send(self, frame: bytes) -> None: ...

    async def receive(self) -> bytes:
        """The next frame, those that came before the daemon left included.

        Raises:
            DaemonUnavailable: the daemon has gone.
        """
        ...

    async def close(self) -> None:
        """Let go of everything; safe to call twice, and without `open`."""
        ...


class ZmqTransport:
    """A DEALER on a unix socket, with a monitor that sees the connection go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._context: zmq.asyncio.Context | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def peer(self) -> str:
        return str(self._path)

    async def open(self) -> None:
        if not self._path.exists():
            raise no_daemon(self.peer)
        if not os.access(self._path, os.W_OK):
            raise DaemonUnavailable(
                f"the daemon's socket {self.peer} may not be used by this user.",
                hint="Join the group that owns it, or name another with --socket.",
            )
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[PingpongError] = loop.create_future()
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        # A slow reader holds what it has not read; with a full queue the daemon would have to drop events.
        self._socket.rcvhwm = 0
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._watch = asyncio.create_task(self._follow_monitor(), name="pingpong-client monitor")
        self._socket.connect(f"ipc://{self._path}")
        await _first(self._ready, self._gone)
        if self._gone.done():
            raise self._gone.result()

    async def send(self, frame: bytes) -> None:
        await self._socket.send(frame)

    async def receive(self) -> bytes:
        frame = asyncio.ensure_future(self._socket.recv())
        try:
            # pyzmq completes at once what has already arrived, so frames go before the news of the loss.
            if not frame.done():
                await _first(frame, self._gone)
            if frame.done():
                return frame.result()
        finally:
            if not frame.done():
                frame.cancel()
        raise self._gone.result()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
            self._watch = None
        if self._context is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            self._context.term()
            self._context = None

    async def _follow_monitor(self) -> None:
        retries = 0
        while not self._gone.done():
            message = await recv_monitor_message(self._monitor)
            event = message["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if not self._ready.done():
                    self._ready.set_result(None)
            elif event & _HANDSHAKE_FAILED:
                self._gone.set_result(
                    MessageError(
                        f"what answers at {self.peer} does not speak pingpongd's protocol.",
                        hint="Name the daemon's socket with --socket.",
                    )
                )
            elif event == zmq.EVENT_DISCONNECTED:
                lost = daemon_lost(self.peer) if self._ready.done() else no_daemon(self.peer)
                self._gone.set_result(lost)
            else:
                retries += 1
                if retries >= _CONNECT_RETRIES:
                    self._gone.set_result(no_daemon(self.peer))


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


class NobodyThere(DaemonUnavailable):
    """There is no socket, or nobody listens at it."""


def no_daemon(peer: str) -> NobodyThere:
    return NobodyThere(f"no daemon answers at {peer}.", hint=START_HINT)


def daemon_lost(peer: str) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"the daemon at {peer} went away.", hint="Look at its log, and start it again with `pingpongd --config FILE`."
    )


def daemon_silent(peer: str, seconds: float) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"the daemon at {peer} did not answer within {seconds:g} s.",
        hint="Look at its log; it may be stopped or stuck.",
    )
