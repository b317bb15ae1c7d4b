"""Sending on a ROUTER without waiting, and without losing a message unnoticed."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio


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
