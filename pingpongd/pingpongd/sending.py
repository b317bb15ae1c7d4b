"""The supervisor's ROUTER sockets: made alike, and sent on without waiting or losing a message unnoticed."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from pingpong_bus import codec
from pingpong_bus.errors import ConfigError
from pingpong_bus.private_socket import bind_private

_HANDSHAKE_MS = 5000
"""After it, a connection that has not said that it speaks ZeroMQ's protocol is closed."""


def make_router(
    context: zmq.asyncio.Context, *, linger_ms: int, queued_frames: int, received_frames: int
) -> zmq.asyncio.Socket:
    """A ROUTER that is not bound yet.

    Args:
        context: of the process.
        linger_ms: how long what was sent may still leave once the socket is closed.
        queued_frames: how much a peer that does not read may have waiting; 0: any amount.
        received_frames: how much of one peer may wait to be received: past it, the peer's own socket fills.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what is sent to a peer that is gone vanishes
    socket.setsockopt(zmq.SNDHWM, queued_frames)
    socket.setsockopt(zmq.RCVHWM, received_frames)
    socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_CONTROL_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    return socket


def bind(socket: zmq.asyncio.Socket, endpoint: str, *, own_user_only: bool = True) -> None:
    """Bind a ROUTER to an ipc:// address, with mode 0600.

    Args:
        socket: made by `make_router`.
        endpoint: where to.
        own_user_only: other users are turned away by ZeroMQ itself.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        bind_private(socket, endpoint, own_user_only=own_user_only)
    except (zmq.ZMQError, OSError) as error:
        path = endpoint.removeprefix("ipc://")
        raise ConfigError(
            f"the socket {path} cannot be bound: {error.strerror}.",
            field="runtime_dir",
            hint="Remove what is there, or choose another runtime_dir.",
        ) from None


def bind_router(
    context: zmq.asyncio.Context, endpoint: str, *, linger_ms: int, queued_frames: int, received_frames: int = 100
) -> zmq.asyncio.Socket:
    """A bound ROUTER for peers of this user's; see `make_router` and `bind`.

    What a peer has sent outlives its connection until it is received, so that one which connects again and again has
    `received_frames` waiting each time.
    """
    socket = make_router(context, linger_ms=linger_ms, queued_frames=queued_frames, received_frames=received_frames)
    try:
        bind(socket, endpoint)
    except ConfigError:
        socket.close()
        raise
    return socket


def send_now(socket: zmq.asyncio.Socket, peer: bytes, frame: bytes) -> bool:
    """Send to a peer now or not at all.

    Args:
        socket: a ROUTER with ROUTER_MANDATORY, so that a peer that is gone is an error.
        peer: its identity.
        frame: the message.

    Returns:
        False where the peer is gone or does not read.
    """
    # With NOBLOCK the future is done when it is returned, and pyzmq re-arms its reader after the send: a send past
    # its back would swallow the descriptor's edge, and a waiting receive would sleep on.
    future: asyncio.Future[object] = socket.send_multipart([peer, frame], zmq.NOBLOCK)  # type: ignore[assignment]
    error = future.exception()
    if error is None:
        return True
    if isinstance(error, zmq.ZMQError) and error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
        return False
    raise error
