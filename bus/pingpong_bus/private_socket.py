"""Unix sockets that nobody but their owner can use, not even for the moment between bind and chmod."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import zmq


def bind_private(socket: zmq.Socket[Any], endpoint: str, *, own_user_only: bool = True) -> None:
    """Bind a socket; an ``ipc://`` one is made with mode 0600.

    Args:
        socket: not bound yet.
        endpoint: where to.
        own_user_only: have ZeroMQ close connections of other users, whatever the file's mode becomes; it asks the
            kernel who they are.

    Raises:
        zmq.ZMQError: it cannot be bound.
    """
    if not endpoint.startswith("ipc://"):
        socket.bind(endpoint)
        return
    if own_user_only:
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    mask = os.umask(0o177)  # bind makes the file: a later chmod would leave it open for a moment
    try:
        socket.bind(endpoint)
    finally:
        os.umask(mask)
    Path(endpoint.removeprefix("ipc://")).chmod(0o600)
