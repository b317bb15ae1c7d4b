"""What is made of doorbells: which log they belong to, and what was dropped between them."""

from __future__ import annotations

from pingpong_bus.codec import encode_bell
from pingpong_bus.messages import PROTOCOL_VERSION, TokenChunk
from token_times import Hearing


def bell(first_index: int, count: int, *, slot: int = 1) -> bytes:
    chunk = TokenChunk(
        version=PROTOCOL_VERSION, slot=slot, generation=1, first_index=first_index, ids=[7] * count, state=0
    )
    return encode_bell(chunk)


def test_doorbells_are_gathered_by_group_and_log_and_given_once() -> None:
    hearing = Hearing()
    for at_ms, (group, frame) in enumerate(
        [("a", bell(0, 1)), ("b", bell(0, 2, slot=2)), ("a", bell(1, 1)), ("a", bell(2, 0)), ("a", b"no doorbell")]
    ):
        hearing.hear(group, frame, at_ms * 1_000_000)
    first, second = hearing.take()
    assert (first.group, first.slot, first.tokens, first.gaps_ms, first.missed) == ("a", 1, [1, 1], [2.0], 0)
    assert (second.group, second.slot, second.tokens, second.gaps_ms) == ("b", 2, [2], [])
    assert hearing.take() == []


def test_tokens_of_dropped_doorbells_are_counted_also_between_two_takes() -> None:
    hearing = Hearing()
    hearing.hear("a", bell(0, 1), 0)
    hearing.take()
    hearing.hear("a", bell(4, 1), 1)
    assert hearing.take()[0].missed == 3
