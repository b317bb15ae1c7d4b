"""Malformed frames without end, the same for the same seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.codec import bell_topic, encode, encode_bell
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attach,
    Cancel,
    ChainEvent,
    Forget,
    GetResult,
    GetStatus,
    Heartbeat,
    Hello,
    HopEnded,
    HopText,
    ListChains,
    Ready,
    Seen,
    Submit,
    SubmitOptions,
    TokenChunk,
    WorkerFailed,
)

V = PROTOCOL_VERSION
NO_GROUP = "no-such-group"
"""Submissions name it: one that comes through whole is refused, and takes no engine from the good client."""

_CHAIN = Chain(
    name="fuzz",
    agents=[
        Agent(name="a", prompt="read {{input.x}}", max_tokens=3, stop=["end"]),
        Agent(name="b", prompt_ids=[1, 2, "{{a}}", 3], max_tokens=3, temperature=0.5),
    ],
    inputs={"x": "1"},
)
CLIENT_FRAMES = [
    encode(message)
    for message in (
        Submit(request=1, version=V, chain=_CHAIN, options=SubmitOptions(group=NO_GROUP), follow=True, key="k"),
        Attach(request=2, version=V, chain="0a1b2c3d"),
        ListChains(request=3, version=V),
        GetStatus(request=4, version=V),
        GetResult(request=5, version=V, chain="0a1b2c3d", prompt_ids=True),
        Cancel(request=6, version=V, chain="0a1b2c3d"),
        Forget(request=7, version=V, chain="0a1b2c3d"),
        Seen(messages=8),
    )
]
"""Every request but those that stop the daemon or empty its caches: garbage may turn out to be what it was made of."""
WORKER_FRAMES = [
    encode(message)
    for message in (
        Hello(version=V, worker="a", pid=1, bell="ipc:///x"),
        WorkerFailed(code="EngineError", message="made up", permanent=True),
        HopEnded(hop="0a1b2c3d/0/0", state="finished", at_ns=1, output_tokens=4),
        HopText(hop="0a1b2c3d/0/0", upto=3, text="made up"),
        Heartbeat(at_ns=1, open_hops=0, output_tokens=0, rss_bytes=0),
    )
]
OTHER_FRAMES = [
    encode(Accepted(request=1, chain="x")),
    encode(ChainEvent(chain="x", kind="ended", at_ms=1.0, data={"state": "finished"})),
    encode_bell(TokenChunk(V, 0, 1, 0, [1, 2, 3], 1)),
    msgspec.msgpack.encode({"type": Ready.__name__, "limits": {}}),
]
SUBSCRIPTIONS = [b"\x01" + bell_topic(0, 1), b"\x00" + bell_topic(0, 1), b"\x01", b"\x00", b"\x02x"]

_NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 1 + 31)


class Frames:
    """Malformed messages and byte streams, drawn from one random generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._kinds: list[Callable[[list[bytes]], list[bytes]]] = [
            *[self._mutated] * 6,
            *[self._truncated] * 3,
            *[self._noise] * 3,
            self._claim,
            self._nested,
            self._parts,
            self._foreign,
            self._other_version,
        ]

    def message(self, whole: list[bytes]) -> list[bytes]:
        """The parts of a message; `whole` are frames that would be understood."""
        if self.random.random() < 0.0002:
            return [self._bytes(2_000_000)]
        return self.random.choice(self._kinds)(whole)

    def stream(self, socket_type: bytes) -> bytes:
        """What a connection starts with that does not speak ZeroMQ's protocol, or does until it cheats."""
        draw = self.random.randrange(6)
        if draw == 0:
            return self._bytes(400)
        if draw == 1:
            return _NULL_GREETING[: self.random.randrange(len(_NULL_GREETING))]
        if draw == 2:
            return self._flipped(_NULL_GREETING) + self._bytes(100)
        if draw == 3:
            return b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        ready = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
        opening = _NULL_GREETING + b"\x04" + bytes([len(ready)]) + ready
        if draw == 4:  # a frame longer than allowed, or than there is memory in the world
            claim = self.random.choice([2**63 - 1, 2**64 - 1, 2**40, 64 * 2**20 + 1, 64 * 2**20])
            return opening + b"\x02" + claim.to_bytes(8, "big") + self._bytes(50)
        return opening + self._bytes(200)

    def _mutated(self, whole: list[bytes]) -> list[bytes]:
        return [self._flipped(self.random.choice(whole))]

    def _flipped(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(self.random.randint(1, 6)):
            at = self.random.randrange(len(changed) + 1)
            draw = self.random.randrange(3)
            if draw == 0 and at < len(changed):
                changed[at] = self.random.randrange(256)
            elif draw == 1:
                changed[at:at] = self._bytes(4)
            else:
                del changed[at : at + self.random.randint(1, 4)]
        return bytes(changed)

    def _truncated(self, whole: list[bytes]) -> list[bytes]:
        frame = self.random.choice(whole)
        return [frame[: self.random.randrange(len(frame))]]

    def _noise(self, _: list[bytes]) -> list[bytes]:
        return [self._bytes(200)]

    def _claim(self, whole: list[bytes]) -> list[bytes]:
        """Lengths of arrays, maps, strings and binaries far beyond the frame."""
        kind = self.random.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
        claim = kind + self.random.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x0f\xff\xff"])
        frame = self.random.choice(whole)
        at = self.random.randrange(len(frame) + 1)
        return [frame[:at] + claim + frame[at:]]

    def _nested(self, _: list[bytes]) -> list[bytes]:
        return [self.random.choice([b"\x91", b"\x81\xa1x", b"\x81\xa7version"]) * self.random.randint(10, 3000)]

    def _parts(self, whole: list[bytes]) -> list[bytes]:
        count = self.random.choice([2, 2, 3, 5, 60])
        return [self.random.choice([b"", self.random.choice(whole)]) for _ in range(count)]

    def _foreign(self, whole: list[bytes]) -> list[bytes]:
        others = [frame for frame in (*CLIENT_FRAMES, *WORKER_FRAMES, *OTHER_FRAMES) if frame not in whole]
        return [self.random.choice(others)]

    def _other_version(self, whole: list[bytes]) -> list[bytes]:
        message: dict[str, Any] = {"type": "Hello" if whole is WORKER_FRAMES else "GetStatus", "request": 9}
        message["version"] = self.random.choice([0, 1, V + 1, 2**40, -1, "2", None, [V], True])
        return [msgspec.msgpack.encode(message)]

    def _bytes(self, most: int) -> bytes:
        return self.random.randbytes(self.random.randint(0, most))
