"""The timeline: what is drawn, and that a picture of a sane size comes out."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import pytest

from pingpong_bus.messages import AgentResult, AppendEntry, ChainResult
from timeline import COLOURS, Bar, bars, draw


def agent(name: str, worker: str, moments: tuple[float, float, float], appends: list[AppendEntry]) -> AgentResult:
    finalized, first, last = moments
    return AgentResult(
        name=name,
        worker=worker,
        finalized_ms=finalized,
        first_token_ms=first,
        last_token_ms=last,
        appends=appends,
        output_tokens=8,
    )


SERIAL = ChainResult(
    id="s",
    name="c",
    state="finished",
    placement="serial",
    e2e_ms=6000,
    agents=[
        agent("first-agent", "cpu0", (0, 1000, 3000), []),
        agent("second-agent", "cpu0", (3000, 4000, 5900), []),
        agent("third-agent", "cpu0", (5900, 5950, 6000), []),
    ],
)
AHEAD = ChainResult(
    id="p",
    name="c",
    state="finished",
    placement="ping-pong",
    e2e_ms=5100,
    agents=[
        agent("first-agent", "cpu0", (0, 1000, 3000), []),
        agent(
            "second-agent",
            "cpu1",
            (3000, 3100, 5000),
            [
                AppendEntry(at_ms=1000, tokens=1000, sent=1000, done_ms=2000),
                AppendEntry(at_ms=2900, tokens=32, sent=1032, done_ms=None),
            ],
        ),
        agent("third-agent", "cpu0", (5000, 5050, 5100), []),
    ],
)


def test_an_agent_is_prefilled_once_its_prompt_is_complete() -> None:
    assert bars(SERIAL)[:2] == [
        Bar("cpu0", "first-agent", "prefill", 0, 1),
        Bar("cpu0", "first-agent", "decode", 1, 3),
    ]


def test_appends_end_with_the_prompt_at_the_latest() -> None:
    second = [bar for bar in bars(AHEAD) if bar.agent == "second-agent"]
    assert [(bar.work, bar.start_s, bar.end_s) for bar in second] == [
        ("append", 1, 2),
        ("append", 2.9, 3),
        ("prefill", 3, 3.1),
        ("decode", 3.1, 5),
    ]


def test_bars_of_a_lane_do_not_overlap() -> None:
    for lane in ("cpu0", "cpu1"):
        found = sorted((bar for bar in bars(AHEAD) if bar.lane == lane), key=lambda bar: bar.start_s)
        assert all(left.end_s <= right.start_s for left, right in pairwise(found))


def test_an_agent_that_never_answered_is_not_drawn() -> None:
    unfinished = AgentResult(name="a", worker="cpu0", finalized_ms=1.0)
    assert bars(ChainResult(id="x", name="c", state="failed", agents=[unfinished])) == []


def test_colours_differ_in_brightness_too() -> None:
    def brightness(colour: str) -> float:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    levels = sorted(brightness(colour) for colour in COLOURS.values())
    assert min(b - a for a, b in pairwise(levels)) > 25


def test_draw_writes_a_png_that_fits_a_readme(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "images" / "timeline.png"
    draw(SERIAL, AHEAD, path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 800 <= width <= 1400
    assert 300 <= height <= 800
    assert 8_000 < len(data) < 200_000
