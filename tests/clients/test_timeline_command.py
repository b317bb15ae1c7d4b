"""`pingpong-client timeline`: every form, from the daemon and from files; labels that can be read."""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from importlib.util import find_spec
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.cells import cell_len

from fake_daemon import FakeDaemon, Link
from pingpong_bus.errors import ChainNotFound, DataError, UsageError
from pingpong_bus.messages import ChainResult
from pingpong_client import plotting
from pingpong_client.timeline_picture import figure
from pingpong_client.timeline_text import timeline_lines
from timeline_samples import agent, chain, hop, in_series, lost_once, queued, read_ahead, void_once, with_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = [read_ahead(), in_series(), lost_once(), void_once(), with_steps()]
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")


def written(folder: Path, result: ChainResult, name: str = "result.json") -> str:
    path = folder / name
    path.write_bytes(msgspec.json.encode(result))
    return str(path)


# ---------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("result", [*ALL, queued()], ids=lambda result: f"{result.placement}")
def test_text_fits_the_width(result: ChainResult, width: int) -> None:
    lines = timeline_lines(result, width)
    assert max(map(cell_len, lines)) <= width


def test_text_shows_lanes_the_account_and_predictions() -> None:
    lines = timeline_lines(read_ahead(), 100)
    lanes = [line for line in lines if line.startswith(("a GPU", "b cpu"))]
    text = " ".join(" ".join(lines).split())
    assert "█" in lanes[0]
    assert "one" in lanes[0]
    assert "░" in lanes[1]
    assert "two" in lanes[1]
    assert "742 ms = 10.0 in the queue + 1.0 waiting to start + 131 exposed prefill + 600 decode" in text
    assert "121 ms of appends, 144 prompt tokens read ahead" in text
    assert "6 tokens read ahead and computed again at the end; 1 append of 18 tokens not through in time" in text
    assert re.search(r"end to end +700 +732 +\+4\.6%", text)


def test_text_shows_steps_in_a_lane_of_their_own() -> None:
    lines = timeline_lines(with_steps(), 100)
    assert any(line.startswith("steps ") and "═" in line for line in lines)
    assert any("═ step between agents" in line for line in lines)
    rows = [line.split() for line in lines]
    assert ["call", "call,", "101", "ms", "-", "-", "-", "-", "-", "60", "chars"] in rows
    assert any(row[:1] == ["steps"] and row[1:] == ["100", "105", "+5.0%"] for row in rows)


def test_text_marks_what_was_lost() -> None:
    text = " ".join(" ".join(timeline_lines(lost_once(), 100)).split())
    assert "✗" in text
    assert "▓" in text
    assert "120 prompt and 20 output tokens computed again after a loss or a move (100 ms)" in text
    assert "121 getting over losses and moves" in text


def test_text_marks_what_was_moved() -> None:
    result = lost_once()
    hops = [msgspec.structs.replace(result.agents[0].hops[0], state="moved"), *result.agents[0].hops[1:]]
    first = msgspec.structs.replace(result.agents[0], hops=hops)
    text = "\n".join(timeline_lines(msgspec.structs.replace(result, agents=[first, result.agents[1]]), 100))
    assert "» moved" in text
    assert "✗" not in text


def test_text_of_a_chain_that_waits_says_why() -> None:
    assert timeline_lines(queued(), 80)[-1] == "It has not run yet: 2 chains are before it."


def test_names_cannot_colour_the_terminal() -> None:
    odd = agent("one\x1b[31m", [hop("a", (11, 11, 111, 511))])
    assert "\x1b" not in "\n".join(timeline_lines(chain([odd], name="a\x1b[2Jb"), 80))


# ------------------------------------------------------------------------------------------------------------- command


async def test_the_daemon_is_asked_for_a_chain_by_its_id(link: Link, daemon: FakeDaemon) -> None:
    daemon.results["c1"] = read_ahead()
    outcome = await link.command("timeline", "c1")
    assert outcome.code == 0
    assert outcome.out.startswith("chain · c1 · ping-pong · finished · 742 ms\n")


async def test_an_unknown_chain_is_said(link: Link) -> None:
    outcome = await link.command("timeline", "nobody")
    assert isinstance(outcome.error, ChainNotFound)


async def test_files_need_no_daemon(link: Link, daemon: FakeDaemon, tmp_path: Path) -> None:
    first, second = written(tmp_path, in_series()), written(tmp_path, read_ahead(), "ahead.json")
    outcome = await link.command("timeline", first, second)
    assert outcome.out.count(" 0 ms  ") == 2
    assert daemon.requests == []
    # One axis: the shorter chain's line is shorter.
    bars = [line.rstrip() for line in outcome.out.splitlines() if "two" in line and "─" in line]
    assert len(bars[0]) > len(bars[1])


async def test_standard_input_is_read(link: Link) -> None:
    outcome = await link.command("timeline", "-", stdin=msgspec.json.encode(read_ahead()))
    assert outcome.code == 0
    assert "chain · c1" in outcome.out


@pytest.mark.parametrize("content", [b"", b"{", b'{"id": "x"}', b"\xff\xfe", b"[" * 100_000])
async def test_what_is_no_result_is_refused(link: Link, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    outcome = await link.command("timeline", str(path))
    assert isinstance(outcome.error, DataError)
    assert "is no chain's result" in str(outcome.error)


@pytest.mark.parametrize("name", ["x", "x.pdf", "x.jsonl"])
async def test_a_suffix_that_says_nothing_is_refused(link: Link, daemon: FakeDaemon, tmp_path: Path, name: str) -> None:
    outcome = await link.command("timeline", "c1", "-o", str(tmp_path / name))
    assert isinstance(outcome.error, UsageError)
    assert ".png" in str(outcome.error)
    assert daemon.requests == []


async def test_a_folder_that_is_not_there_is_found_out_before_the_daemon_is_asked(
    link: Link, daemon: FakeDaemon, tmp_path: Path
) -> None:
    outcome = await link.command("timeline", "c1", "-o", str(tmp_path / "none" / "x.json"))
    assert isinstance(outcome.error, UsageError)
    assert daemon.requests == []


async def test_without_matplotlib_the_way_out_is_named(
    link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = written(tmp_path, read_ahead())
    for form in ("png", "svg", "html"):
        outcome = await link.command("timeline", path, "-o", str(tmp_path / f"x.{form}"))
        assert isinstance(outcome.error, UsageError)
        assert "pingpongd[plots]" in str(outcome.error)
    for form in ("txt", "json"):
        assert (await link.command("timeline", path, "-o", str(tmp_path / f"x.{form}"))).code == 0


async def test_text_and_trace_are_written(link: Link, tmp_path: Path) -> None:
    path = written(tmp_path, lost_once())
    await link.command("timeline", path, "-o", str(tmp_path / "x.txt"))
    assert "✗ lost" in (tmp_path / "x.txt").read_text()
    await link.command("timeline", path, "-o", str(tmp_path / "x.json"))
    assert json.loads((tmp_path / "x.json").read_bytes())["otherData"]["chains"][0]["id"] == "c1"


@needs_matplotlib
async def test_a_picture_of_a_chain_that_has_not_run_is_refused(link: Link, tmp_path: Path) -> None:
    outcome = await link.command("timeline", written(tmp_path, queued()), "-o", str(tmp_path / "x.png"))
    assert isinstance(outcome.error, UsageError)
    assert not (tmp_path / "x.png").exists()


@needs_matplotlib
async def test_a_png_fits_a_readme(link: Link, tmp_path: Path) -> None:
    pair = written(tmp_path, in_series()), written(tmp_path, read_ahead(), "ahead.json")
    await link.command("timeline", *pair, "-o", str(tmp_path / "x.png"))
    data = (tmp_path / "x.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 800 <= width <= 1400
    assert 300 <= height <= 800
    assert 8_000 < len(data) < 200_000


@needs_matplotlib
async def test_the_same_chain_gives_the_same_bytes(link: Link, tmp_path: Path) -> None:
    path = written(tmp_path, lost_once())
    for form in ("svg", "html", "json"):
        for name in ("x", "y"):
            await link.command("timeline", path, "-o", str(tmp_path / f"{name}.{form}"))
        assert (tmp_path / f"x.{form}").read_bytes() == (tmp_path / f"y.{form}").read_bytes()


# ---------------------------------------------------------------------------------------------------------------- page


class _Page(HTMLParser):
    """Collects what a page refers to, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.download = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.references += [given[name] or "" for name in ("src", "href", "xlink:href") if name in given]
        if "download" in given:
            self.download = given["href"] or ""


@needs_matplotlib
async def test_a_page_needs_no_other_file(link: Link, tmp_path: Path) -> None:
    odd = msgspec.structs.replace(lost_once(), name="<script>alert(1)</script>", why='"quoted" & more')
    await link.command("timeline", written(tmp_path, odd), "-o", str(tmp_path / "x.html"))
    text = (tmp_path / "x.html").read_text()
    page = _Page()
    page.feed(text)
    assert "script" not in page.tags
    assert {"svg", "table", "dl"} <= set(page.tags)
    outside = [it for it in page.references if not it.startswith(("#", "data:"))]
    assert outside == ["https://ui.perfetto.dev"]  # to click at; nothing is loaded from it
    assert "lost: it ended with signal 9." in text
    content = json.loads(base64.b64decode(page.download.split(",", 1)[1]))
    assert content["traceEvents"]


@needs_matplotlib
async def test_a_page_tells_of_a_chain_that_waits(link: Link, tmp_path: Path) -> None:
    await link.command("timeline", written(tmp_path, queued()), "-o", str(tmp_path / "x.html"))
    assert "2 chains are before it" in (tmp_path / "x.html").read_text()


# ------------------------------------------------------------------------------------------------------------- picture


def reasoned() -> ChainResult:
    """Named as somebody pleased, and placed for many reasons."""
    late = "; ".join(f"gpu{at}: its tokens take 2.2 times as long now (foreign process)" for at in range(5))
    return msgspec.structs.replace(read_ahead(), name="costs $1 {\\of $2\n" * 9, why=f"predicted 700 ms; {late}")


def crowded() -> ChainResult:
    """Twelve agents with long names and answers of any length, on three groups with UUIDs."""
    agents, at = [], 11.0
    for number in range(12):
        long = 40.0 + 37 * number if number % 3 else 6.0
        moments = (at, at + 1, at + 5, at + 5 + long)
        agents.append(agent(f"agent-with-a-long-name-{number}", [hop("abc"[number % 3], moments)]))
        at += long - (20 if long > 30 else 0)
    devices = {name: [f"GPU-{number:08d}-2222-3333-4444-555555555555"] for number, name in enumerate("abc")}
    return chain(agents, devices=devices)


def texts(drawn: Figure) -> list[tuple[str, tuple[float, float, float, float]]]:
    """Every text that is shown, with its box in pixels."""
    from matplotlib.text import Text

    found = []
    undrawn: set[object] = set()
    for axes in drawn.axes:
        low, high = axes.get_xlim()
        undrawn |= {tick.label1 for tick in axes.xaxis.get_major_ticks() if not low <= tick.get_loc() <= high}
    for text in drawn.findobj(Text):
        assert isinstance(text, Text)
        if text.get_text().strip() and text.get_visible() and text not in undrawn:
            box = text.get_window_extent()
            found.append((text.get_text(), (box.x0, box.y0, box.x1, box.y1)))
    return found


@needs_matplotlib
@pytest.mark.parametrize(
    "results",
    [
        [in_series(), read_ahead()],
        [lost_once()],
        [void_once()],
        [with_steps()],
        [crowded()],
        [crowded(), read_ahead(), lost_once()],
        [reasoned(), read_ahead(), reasoned()],
    ],
    ids=["pair", "lost", "void", "steps", "crowded", "three", "reasons"],
)
def test_no_label_lies_on_another_or_leaves_the_picture(results: Sequence[ChainResult]) -> None:
    drawn = figure(results)
    drawn.draw_without_rendering()
    found = texts(drawn)
    width, height = drawn.bbox.width, drawn.bbox.height
    for (one, a), (other, b) in combinations(found, 2):
        overlap = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        assert min(overlap) <= 0.5, f"{one!r} lies on {other!r}"
    for text, box in found:
        assert box[0] >= -0.5, text
        assert box[1] >= -0.5, text
        assert box[2] <= width + 0.5, text
        assert box[3] <= height + 0.5, text


def test_colours_differ_in_brightness_too() -> None:
    def brightness(colour: str) -> float:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    levels = sorted(brightness(plotting.WORK[kind]) for kind in ("prefill", "append", "decode"))
    assert min(b - a for a, b in pairwise(levels)) > 25
