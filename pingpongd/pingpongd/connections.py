"""The connections of a bound ROUTER: how many, whose, and the news that one is lost.

ZeroMQ tells a ROUTER nothing of a peer that leaves, takes connections without end, and **aborts the process** where
the last descriptor is gone (libzmq 4.3.5, `ipc_listener.cpp`). Its monitor tells, and a connection that is one too
many is shut from outside.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket as sockets
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from pingpongd.refusals import Refusals

MAX_CONNECTIONS = 2048
"""On one socket; where fewer than twice as many descriptors may be open, half of those."""
_DESCRIPTORS = 65_536
_UCRED = struct.Struct("3i")
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_numbers = itertools.count()


class Connections:
    """Watches one socket; to be made before it is bound, and closed before it is closed.

    Args:
        socket: a ROUTER.
        path: the file that it will be bound to.
        refusals: counts connections that do not speak ZeroMQ's protocol, or are too many.
        on_gone: called with the descriptor of every connection that is lost.
    """

    def __init__(self, socket: zmq.Socket[Any], path: str, refusals: Refusals, on_gone: Callable[[int], None]) -> None:
        self._socket = socket
        self._path = path
        self._refusals = refusals
        self._on_gone = on_gone
        self._users: dict[int, int] = {}
        self._per_user: Counter[int] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.limit = connection_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        address = f"inproc://connections-{next(_numbers)}"
        socket.monitor(address, _EVENTS)
        self._news: zmq.Socket[bytes] = zmq.Context.shadow(socket.context.underlying).socket(zmq.PAIR)
        self._news.setsockopt(zmq.RCVHWM, 0)  # else a full queue would stop ZeroMQ's thread, and with it every socket
        self._news.setsockopt(zmq.LINGER, 0)
        self._news.connect(address)

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._users

    def watch(self) -> None:
        """Take news as they come, from the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._news.FD, self.update)
        self.update()

    def update(self) -> None:
        """Take the news now.

        After receiving a frame this leaves no old news of its descriptor: ZeroMQ tells of a lost connection before it
        closes the descriptor, which only then can become that of another.
        """
        while True:
            try:
                news = parse_monitor_message(self._news.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if news["event"] == zmq.EVENT_ACCEPTED:
                self._accepted(news["value"])
            elif news["event"] == zmq.EVENT_DISCONNECTED:
                self._lost(news["value"])
            else:
                self._refusals.add("a connection that does not speak ZeroMQ's protocol")

    def shut(self, descriptor: int) -> None:
        """End a connection from outside; ZeroMQ then finds that the peer has gone, and closes it."""
        try:
            connection = sockets.socket(fileno=descriptor)
        except OSError:
            return  # it has ended by itself
        try:
            # A descriptor of ZeroMQ's: it may be another file by now.
            if connection.family == sockets.AF_UNIX and connection.getsockname() == self._path:
                listening = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN)
                if not listening:
                    connection.shutdown(sockets.SHUT_RDWR)
        except OSError:
            return
        finally:
            connection.detach()

    def close(self) -> None:
        """Stop watching."""
        if self._loop is not None:
            self._loop.remove_reader(self._news.FD)
        self._socket.disable_monitor()
        self._news.close()

    def _accepted(self, descriptor: int) -> None:
        uid = _uid(descriptor)
        self._users[descriptor] = uid
        self._per_user[uid] += 1
        if len(self._users) > self.limit or self._per_user[uid] > self.limit // 2:
            self._refusals.add(f"one connection too many: there are {len(self._users)}", peer=f"uid {uid}")
            self.shut(descriptor)

    def _lost(self, descriptor: int) -> None:
        uid = self._users.pop(descriptor, None)
        if uid is not None:
            self._per_user[uid] -= 1
            if not self._per_user[uid]:
                del self._per_user[uid]
        self._on_gone(descriptor)


def connection_limit(descriptors: int) -> int:
    """How many connections a socket takes where so many descriptors may be open."""
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(16, descriptors // 2))


def raise_descriptor_limit() -> int:
    """Let this process open as many descriptors as it may, up to 65,536; returns how many that is.

    The usual 1,024 are soon gone to connections, and to run out of them is what ZeroMQ does not survive.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def _uid(descriptor: int) -> int:
    """Who connected; -1 where it has left already."""
    try:
        connection = sockets.socket(fileno=descriptor)
    except OSError:
        return -1
    try:
        raw = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _UCRED.size)
    except OSError:
        return -1
    finally:
        connection.detach()
    return int(_UCRED.unpack(raw)[1])
