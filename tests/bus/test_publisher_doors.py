"""What a publisher does with peers that are no subscribers of ours."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pingpong_bus.codec import bell_topic, decode_bell
from pingpong_bus.messages import StreamRef
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState

STREAM = StreamRef(slot=3, generation=7)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 1 + 31)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
HANG_SECONDS = 60.0


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with tempfile.TemporaryDirectory(prefix="pp-") as folder, zmq.Context() as context:
        one = Publisher(context, f"ipc://{folder}/bus.sock")
        yield one
        one.close()


def path_of(publisher: Publisher) -> str:
    return publisher.endpoint.removeprefix("ipc://")


def hears(publisher: Publisher, subscriber: zmq.Socket[bytes]) -> bool:
    """Ring until the subscriber hears it, for as long as a hang would take."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        publisher.ring(STREAM, 0, [1, 2], LogState.OPEN)
        if subscriber.poll(10):
            return decode_bell(subscriber.recv()).ids == [1, 2]
    return False


def test_its_socket_is_for_its_owner_only(publisher: Publisher) -> None:
    assert Path(path_of(publisher)).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("length", [65, 1_000_000, 2**63 - 1])
def test_whoever_subscribes_to_a_long_topic_is_cut_off(publisher: Publisher, length: int) -> None:
    payload = b"\x01" + b"t" * min(length - 1, 1_000_000)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path_of(publisher))
        peer.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        peer.settimeout(HANG_SECONDS)
        try:
            peer.sendall(b"\x02" + length.to_bytes(8, "big") + payload)
            while peer.recv(1000):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.subscribe(bell_topic(STREAM.slot, STREAM.generation))
        subscriber.connect(publisher.endpoint)
        assert hears(publisher, subscriber)


def test_a_flood_of_garbage_subscriptions_does_not_stop_the_bell(publisher: Publisher) -> None:
    with zmq.Context() as context, context.socket(zmq.XSUB) as flood, context.socket(zmq.SUB) as subscriber:
        for one in (flood, subscriber):
            one.setsockopt(zmq.LINGER, 0)
            one.connect(publisher.endpoint)
        for number in range(20_000):
            flood.send(b"\x01%d" % number)
            if number % 10 == 0:
                flood.send(b"\x07garbage")
        subscriber.subscribe(bell_topic(STREAM.slot, STREAM.generation))
        assert hears(publisher, subscriber)
