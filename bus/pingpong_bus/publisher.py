"""Rings the doorbells of the logs that this process writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq

from pingpong_bus.codec import MAX_BELL_IDS, encode_bell
from pingpong_bus.errors import BusError
from pingpong_bus.messages import PROTOCOL_VERSION, StreamRef, TokenChunk
from pingpong_bus.private_socket import bind_private
from pingpong_bus.slab import LogState
from pingpong_bus.subscriber import Subscriber

_MAX_SUBSCRIPTION_BYTES = 64
"""Of one frame that a subscriber sends: a topic is 8 bytes, the handshake's frame 25. Peers that send longer ones are
cut off: ZeroMQ keeps topics in a tree that takes 48 bytes for each of theirs, and longer to walk."""
_WAITING_SUBSCRIPTIONS = 16
"""Of one subscriber. Those that wait are all handled within some later `ring`, so that a flood of them must not wait
here but with its sender."""


class Publisher:
    """A PUB socket that tells subscribers to look at a log.

    Args:
        context: its ZeroMQ context; an asyncio one will do, the socket is a plain one either way.
        endpoint: where to bind, such as ``ipc:///run/pingpongd/bus-0.sock``.
        high_water_mark: frames kept for a subscriber that lags; what comes on top is dropped.

    Attributes:
        local: the subscriber of this very process, rung without a socket.

    Raises:
        BusError: the endpoint cannot be bound.
    """

    def __init__(self, context: zmq.Context[Any], endpoint: str, *, high_water_mark: int = 1000) -> None:
        self.endpoint = endpoint
        self.local: Subscriber | None = None
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self._socket.setsockopt(zmq.RCVHWM, _WAITING_SUBSCRIPTIONS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES)
        try:
            bind_private(self._socket, endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise BusError(
                f"The doorbell cannot be bound to {endpoint}: {error}.", hint="Is another daemon using it?"
            ) from error

    def ring(self, stream: StreamRef, first_index: int, ids: Sequence[int], state: LogState) -> None:
        """Say that `ids` now stand at `first_index` of a log; call it after the commit. Never blocks.

        Args:
            stream: the log.
            first_index: where the append began.
            ids: what was appended; empty for a change of state alone.
            state: the log's state after it.
        """
        if self.local is not None:
            self.local.ring(stream.slot, stream.generation)
        chunk = TokenChunk(
            version=PROTOCOL_VERSION,
            slot=stream.slot,
            generation=stream.generation,
            first_index=first_index,
            ids=list(ids) if len(ids) <= MAX_BELL_IDS else [],
            state=state,
            at_ns=time.monotonic_ns(),
        )
        self._socket.send(encode_bell(chunk), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; frames that are not sent yet are dropped."""
        self._socket.close()
