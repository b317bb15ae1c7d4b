"""The supervisor's ROUTER sockets: made alike, and sent on without waiting or losing a message unnoticed."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from pingpong_bus import codec
from pingpong_bus.errors import ConfigError


def bind_router(
    context: zmq.asyncio.Context, endpoint: str, *, linger_ms: int, queued_frames: int
) -> zmq.asyncio.Socket:
    """A bound ROUTER.

    Args:
        context: of the process.
        endpoint: an ipc:// address.
        linger_ms: how long what was sent may still leave once the socket is closed.
        queued_frames: how much a peer that does not read may have waiting; 0: any amount.

    Raises:
        ConfigError: the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what is sent to a peer that is gone vanishes
    socket.setsockopt(zmq.SNDHWM, queued_frames)
    socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_CONTROL_BYTES)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        path = endpoint.removeprefix("ipc://")
        raise ConfigError(
            f"the socket {path} cannot be bound: {error.strerror}.",
            field="runtime_dir",
            hint="Remove what is there, or choose another runtime_dir.",
        ) from None
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
