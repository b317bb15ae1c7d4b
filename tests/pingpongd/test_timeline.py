"""Timelines at the edges: of many hours, and of what comes at one moment."""

from __future__ import annotations

import msgspec
import pytest

from engine_figures import H200
from pingpong_bus.messages import BesideFigure, EngineFigures
from pingpongd.agent_task import Piece, Task
from pingpongd.engine_cost import EngineCost
from pingpongd.timeline import run

EVEN = EngineFigures(
    measured_at="",
    prefill=[(100, 100.0), (200, 200.0)],
    finalize=[],
    decode=[(100, 1.0)],
    batch=[],
    beside=[BesideFigure(context=100, tokens=100, append_ms=100.0, decode_ms=1.0, itl_ratio=1.2)],
)
"""A millisecond for each token, read or written, and reading costs decodes nothing."""


@pytest.mark.parametrize("tokens", [10_000, 1_000_000, 100_000_000])
def test_a_timeline_ends_however_long_it_is(tokens: int) -> None:
    slow = msgspec.structs.replace(H200, decode=[(context, ms * 30) for context, ms in H200.decode])
    for prompt in range(4096, 4196, 7):
        first = Task("a", prompt, tokens)
        second = Task("a", prompt, tokens, begun=(first,), reads=(first,), pieces=(Piece(prompt // 2, None),))
        run([first, second], {"a": EngineCost(slow)})
        assert first.ended < second.first < second.ended


def test_a_piece_that_is_read_just_when_its_upstream_ends_is_still_finalized() -> None:
    first = Task("a", 100, 101)
    ahead = Task("a", 400, 1, begun=(first,), reads=(first,), pieces=(Piece(200, None),))
    run([first, ahead], {"a": EngineCost(EVEN, paced=False)})
    assert (first.ended, ahead.hidden) == (pytest.approx(200.0), pytest.approx(100.0))
    assert ahead.first == pytest.approx(400.0)
