"""Joining of clocks: offsets are found to within what messages took, and none is made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.messages import (
    AppendRecord,
    HopAppended,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopText,
    WorkerMessage,
)
from pingpongd.clock_join import ClockBounds, on_our_clock

_delays = st.lists(st.integers(0, 10**10), min_size=1, max_size=20)


def crossed(offset: int, up: list[int], down: list[int]) -> ClockBounds:
    """What is known once messages of both ways took these delays, and the worker's clock is ahead by `offset`."""
    clock = ClockBounds()
    for at, delay in enumerate(up):
        sent = 10**12 + at * 10**9  # by our clock
        clock = clock.received(sent + offset, sent + delay)
    for at, delay in enumerate(down):
        sent = 10**12 + at * 10**9
        clock = clock.answered(sent, sent + delay + offset)
    return clock


@given(up=_delays, down=_delays)
def test_one_clock_is_never_taken_for_two(up: list[int], down: list[int]) -> None:
    assert crossed(0, up, down).offset_ns == 0


@given(offset=st.integers(-(10**15), 10**15), up=_delays, down=_delays)
def test_an_offset_is_known_to_within_the_least_delays(offset: int, up: list[int], down: list[int]) -> None:
    clock = crossed(offset, up, down)
    assert clock.low_ns is not None
    assert clock.high_ns is not None
    assert clock.low_ns <= offset <= clock.high_ns
    if clock.offset_ns:
        assert abs(clock.offset_ns - offset) <= clock.error_ns
        assert clock.error_ns <= (min(up) + min(down) + 1) // 2 + 1
    else:  # it may be none: then it is no larger than what a message took
        assert abs(offset) <= max(min(up), min(down))


@given(offset=st.integers(-(10**15), 10**15), up=_delays)
def test_one_way_alone_tells_nothing(offset: int, up: list[int]) -> None:
    assert crossed(offset, up, []).offset_ns == 0
    assert crossed(offset, [], up).offset_ns == 0


AT = 5_000
_MESSAGES: list[WorkerMessage] = [
    HopOpened(hop="h", at_ns=AT),
    HopFinalized(hop="h", at_ns=AT, prompt_tokens=1, prompt_digest="", final_tokens=1),
    HopFirstToken(hop="h", at_ns=AT, cached_tokens=0),
    HopEnded(hop="h", state="finished", at_ns=AT),
]


@pytest.mark.parametrize("message", _MESSAGES, ids=lambda message: type(message).__name__)
def test_reports_are_brought_to_our_clock(message: WorkerMessage) -> None:
    moved = on_our_clock(message, 2_000)
    assert getattr(moved, "at_ns", None) == 3_000
    assert on_our_clock(moved, -2_000) == message
    assert on_our_clock(message, 0) is message


def test_appends_are_brought_to_our_clock() -> None:
    done = HopAppended(hop="h", append=AppendRecord(at_ns=AT, done_ns=AT + 1, tokens=2, sent=3))
    moved = on_our_clock(done, 2_000)
    assert moved == HopAppended(hop="h", append=AppendRecord(at_ns=3_000, done_ns=3_001, tokens=2, sent=3))
    overtaken = HopAppended(hop="h", append=AppendRecord(at_ns=AT, done_ns=0, tokens=2, sent=3))
    moved = on_our_clock(overtaken, 2_000)
    assert moved == HopAppended(hop="h", append=AppendRecord(at_ns=3_000, done_ns=0, tokens=2, sent=3))


def test_what_has_no_time_is_left_alone() -> None:
    text = HopText(hop="h", upto=1, text="t")
    assert on_our_clock(text, 2_000) is text
