"""The codec: what it encodes comes back, and whatever else comes in is a MessageError."""

from __future__ import annotations

import contextlib
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus import codec
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.errors import MessageError
from pingpong_bus.messages import PROTOCOL_VERSION, AbortHop, GetStatus, Heartbeat, Hello, Submit, TokenChunk

DECODERS = {
    "client": codec.decode_client_request,
    "daemon": codec.decode_daemon_message,
    "supervisor": codec.decode_supervisor_message,
    "worker": codec.decode_worker_message,
    "bell": codec.decode_bell,
}
SUBMIT = Submit(request=1, version=PROTOCOL_VERSION, chain=Chain(name="c", agents=[Agent(name="a", prompt="x")]))

uint32 = st.integers(0, 2**32 - 1)
chunks = st.builds(
    TokenChunk,
    version=st.just(PROTOCOL_VERSION),
    slot=uint32,
    generation=st.integers(1, 2**24 - 1),
    first_index=uint32,
    ids=st.lists(uint32, max_size=20),
    state=st.integers(0, 3),
)


@given(chunks)
def test_a_doorbell_comes_back_and_starts_with_its_topic(chunk: TokenChunk) -> None:
    frame = codec.encode_bell(chunk)
    assert frame.startswith(codec.bell_topic(chunk.slot, chunk.generation))
    assert codec.decode_bell(frame) == chunk


def test_messages_come_back() -> None:
    assert codec.decode_client_request(codec.encode(SUBMIT)) == SUBMIT
    assert codec.decode_supervisor_message(memoryview(codec.encode(AbortHop(hop="h")))) == AbortHop(hop="h")


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner),
)
tags = st.sampled_from(["Submit", "Hello", "TokenChunk", "HopEnded", "ResultReply", "nonsense"])


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_random_frames_raise_nothing_but_message_error(name: str, data: st.DataObject) -> None:
    frame = data.draw(
        st.binary(max_size=100)
        | json_like.map(msgspec.msgpack.encode)
        | st.tuples(tags, st.dictionaries(st.sampled_from(["version", "request", "chain"]), json_like)).map(
            lambda pair: msgspec.msgpack.encode({**pair[1], "type": pair[0]})
        )
        | st.tuples(tags, st.lists(json_like)).map(lambda pair: msgspec.msgpack.encode([pair[0], *pair[1]]))
    )
    with contextlib.suppress(MessageError):
        DECODERS[name](frame)


@given(chunk=chunks, at=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_damaged_doorbell_raises_nothing_but_message_error(chunk: TokenChunk, at: int, byte: int) -> None:
    frame = bytearray(codec.encode_bell(chunk))
    frame[at % len(frame)] = byte
    with contextlib.suppress(MessageError):
        codec.decode_bell(bytes(frame))


@pytest.mark.parametrize("length", range(len(codec.encode(SUBMIT))))
def test_a_cut_message_is_refused(length: int) -> None:
    with pytest.raises(MessageError):
        codec.decode_client_request(codec.encode(SUBMIT)[:length])


def test_a_frame_over_the_limit_is_refused_unread() -> None:
    decode = codec.decoder(Heartbeat | Hello, 10)
    with pytest.raises(MessageError, match="11 bytes long, the limit is 10"):
        decode(b"\x00" * 11)
    with pytest.raises(MessageError, match="the limit is"):
        codec.decode_bell(b"\x00" * (codec.MAX_BELL_BYTES + 1))


def test_the_longest_doorbell_fits_its_limit() -> None:
    chunk = TokenChunk(PROTOCOL_VERSION, 2**32 - 1, 2**24 - 1, 2**32 - 1, [2**32 - 1] * codec.MAX_BELL_IDS, 1)
    assert codec.decode_bell(codec.encode_bell(chunk)) == chunk


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(MessageError, match="Invalid value 'Explode'"):
        codec.decode_client_request(msgspec.msgpack.encode({"type": "Explode"}))


def test_a_message_of_another_conversation_is_refused() -> None:
    with pytest.raises(MessageError, match="Invalid value"):
        codec.decode_supervisor_message(codec.encode(SUBMIT))


def test_another_version_is_named() -> None:
    with pytest.raises(MessageError, match=f"version {PROTOCOL_VERSION + 1}, this side speaks {PROTOCOL_VERSION}"):
        codec.decode_client_request(codec.encode(GetStatus(request=1, version=PROTOCOL_VERSION + 1)))


def test_another_version_is_named_also_where_its_fields_are_unknown() -> None:
    newer = {"type": "GetStatus", "request": 1, "version": PROTOCOL_VERSION + 1, "verbosity": "high"}
    with pytest.raises(MessageError, match="protocol version"):
        codec.decode_client_request(msgspec.msgpack.encode(newer))
    bell = ["TokenChunk", PROTOCOL_VERSION + 1, "slot by name"]
    with pytest.raises(MessageError, match="protocol version"):
        codec.decode_bell(b"\x00" * 8 + msgspec.msgpack.encode(bell))


def test_a_doorbell_under_another_topic_is_refused() -> None:
    frame = codec.encode_bell(TokenChunk(PROTOCOL_VERSION, 1, 2, 0, [5], 1))
    with pytest.raises(MessageError, match="topic"):
        codec.decode_bell(codec.bell_topic(1, 3) + frame[8:])


def test_a_message_nested_too_deeply_is_refused() -> None:
    with pytest.raises(MessageError):
        codec.decode_daemon_message(b"\x91" * 100_000)
    event = msgspec.msgpack.encode({"type": "ChainEvent", "chain": "c", "kind": "ended", "at_ms": 1.0})
    deep = event.replace(b"\x84\xa4type", b"\x85\xa4data\x81\xa1a" + b"\x91" * 100_000 + b"\xc0\xa4type", 1)
    with pytest.raises(MessageError):
        codec.decode_daemon_message(deep)


def test_the_request_number_of_an_unreadable_message_is_found_or_is_zero() -> None:
    assert codec.request_number(codec.encode(SUBMIT)) == 1
    assert codec.request_number(msgspec.msgpack.encode({"type": "Newer", "request": 7, "x": [{"y": None}]})) == 7
    for frame in (
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        *map(msgspec.msgpack.encode, ({"request": "7"}, {"request": -7}, [7])),
    ):
        assert codec.request_number(frame) == 0


def test_nothing_is_built_of_a_frame_that_is_refused() -> None:
    bomb = b"\xdd" + (4_000_000).to_bytes(4, "big") + b"\x90" * 4_000_000  # as Python lists: 250 MB
    tracemalloc.start()
    try:
        for frame in (bomb, b"\x81\xa7version" + bomb, b"\x81\xa7request" + bomb):
            with pytest.raises(MessageError):
                codec.decode_client_request(frame)
            assert codec.request_number(frame) == 0
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_an_error_does_not_repeat_a_whole_frame() -> None:
    with pytest.raises(MessageError) as caught:
        codec.decode_client_request(msgspec.msgpack.encode({"type": "x" * 1_000_000}))
    assert len(caught.value.message) < 1000
