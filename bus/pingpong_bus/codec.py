"""Bytes to messages and back: msgpack, size limits, the protocol version, and the doorbell's frame.

A decoder raises `MessageError` and nothing else, whatever bytes it is given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from pingpong_bus.errors import MessageError
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    ClientRequest,
    DaemonMessage,
    SupervisorMessage,
    TokenChunk,
    WorkerMessage,
)

MAX_CONTROL_BYTES = 64 * 1024 * 1024
"""Between client and daemon: four times the longest chain file, for results carry ids and text."""
MAX_WORKER_BYTES = 64 * 1024 * 1024
"""Between supervisor and worker: a chain's prompts as ids, at most 5 bytes each."""
MAX_BELL_BYTES = 1024 * 1024
"""One doorbell, topic included."""
MAX_BELL_IDS = 200_000
"""Ids that surely fit a doorbell; a longer append rings without them."""

_ERROR_CHARACTERS = 300
"""Kept of what msgspec says: it quotes values, which may be as long as the frame."""

_MessageT = TypeVar("_MessageT")
Decode = Callable[[bytes | memoryview], _MessageT]

_TOPIC = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()


class _Envelope(msgspec.Struct):
    """What is looked for in a frame that is not decoded; the rest is skipped, and nothing is built of it."""

    version: msgspec.Raw = msgspec.Raw(b"")
    request: msgspec.Raw = msgspec.Raw(b"")


class _BellEnvelope(msgspec.Struct, array_like=True):
    """The same of a `TokenChunk`, which is an array."""

    tag: msgspec.Raw
    version: msgspec.Raw


_envelope = msgspec.msgpack.Decoder(_Envelope)
_bell_envelope = msgspec.msgpack.Decoder(_BellEnvelope)
_integer = msgspec.msgpack.Decoder(int)
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def encode(message: msgspec.Struct) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decoder(kind: Any, limit_bytes: int) -> Decode[Any]:
    """A function that decodes one message.

    Args:
        kind: a message struct, or a union of them.
        limit_bytes: the longest frame that is looked at.

    The function raises `MessageError` for a frame that is too long, is not msgpack, has an unknown tag or a wrong
    field, or is of another protocol version.
    """
    typed = msgspec.msgpack.Decoder(kind)

    def decode(frame: bytes | memoryview) -> Any:
        if len(frame) > limit_bytes:
            raise MessageError(f"The message is {len(frame)} bytes long, the limit is {limit_bytes}.")
        try:
            message = typed.decode(frame)
        except _UNREADABLE as error:
            _check_version(_version_in(frame))
            problem = str(error).rstrip(".")[:_ERROR_CHARACTERS]
            raise MessageError(f"The message cannot be read: {problem}.") from None
        _check_version(getattr(message, "version", None))
        return message

    return decode


decode_client_request: Decode[ClientRequest] = decoder(ClientRequest, MAX_CONTROL_BYTES)
decode_daemon_message: Decode[DaemonMessage] = decoder(DaemonMessage, MAX_CONTROL_BYTES)
decode_supervisor_message: Decode[SupervisorMessage] = decoder(SupervisorMessage, MAX_WORKER_BYTES)
decode_worker_message: Decode[WorkerMessage] = decoder(WorkerMessage, MAX_WORKER_BYTES)
_decode_chunk: Decode[TokenChunk] = decoder(TokenChunk, MAX_BELL_BYTES)


def bell_topic(slot: int, generation: int) -> bytes:
    """What a subscriber of one log subscribes to: the first 8 bytes of the log's frames, two little-endian uint32."""
    return _TOPIC.pack(slot, generation)


def encode_bell(chunk: TokenChunk) -> bytes:
    """The doorbell's frame: its topic, then the chunk."""
    return _TOPIC.pack(chunk.slot, chunk.generation) + _encoder.encode(chunk)


def decode_bell(frame: bytes) -> TokenChunk:
    """The chunk in a doorbell's frame.

    Raises:
        MessageError: also where topic and chunk disagree.
    """
    if len(frame) > MAX_BELL_BYTES:
        raise MessageError(f"The doorbell is {len(frame)} bytes long, the limit is {MAX_BELL_BYTES}.")
    chunk = _decode_chunk(memoryview(frame)[_TOPIC.size :])
    if not frame.startswith(_TOPIC.pack(chunk.slot, chunk.generation)):
        raise MessageError("The doorbell's topic is not that of its chunk.")
    return chunk


def _check_version(version: object) -> None:
    # A daemon's StatusReply carries its release as a string under the same name.
    if isinstance(version, int) and version != PROTOCOL_VERSION:
        raise MessageError(
            f"The message is of protocol version {version}, this side speaks {PROTOCOL_VERSION}.",
            hint="Use a client and a daemon of the same release.",
        )


def request_number(frame: bytes | memoryview) -> int:
    """The `request` of a frame that is not decoded, such as one that cannot be; 0 where it has none.

    The frame is walked through and nothing is built of it: a garbage frame of 64 MiB would become gigabytes of objects.
    """
    try:
        return max(0, _integer.decode(_envelope.decode(frame).request))
    except _UNREADABLE:
        return 0


def _version_in(frame: bytes | memoryview) -> int | None:
    """The version that an unreadable message claims: a newer peer's message may break our structs in any way."""
    for decoder in (_envelope, _bell_envelope):
        try:
            return _integer.decode(decoder.decode(frame).version)
        except _UNREADABLE:
            continue
    return None
