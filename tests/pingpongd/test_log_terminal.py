"""The log on a terminal: bars below its lines, and every line as it was written."""

from __future__ import annotations

import asyncio
import io

import msgspec
import pytest

from fake_daemon import Terminal, status_of
from pingpong_bus.messages import Progress, StatusReply
from pingpongd.log_terminal import LogTerminal, log_terminal, show_start
from screen import Screen

LINE = "2026-11-30T12:00:00Z [\x1b[32minfo\x1b[0m] worker_loading " + "x" * 60 + " worker=a"
PLAIN = LINE.replace("\x1b[32m", "").replace("\x1b[0m", "")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def starting(state: str = "loading", **changes: object) -> StatusReply:
    status = status_of(0, 0)
    workers = [msgspec.structs.replace(status.workers[0], state=state, stage="loading the model", **changes)]
    return msgspec.structs.replace(status, state="starting", workers=[*workers, status.workers[1]])


def shown(stream: io.StringIO) -> Screen:
    screen = Screen()
    screen.feed(stream.getvalue())
    return screen


def test_lines_stand_above_the_bars_and_are_never_broken(stream: Terminal) -> None:
    terminal = LogTerminal(stream)
    terminal.write("before\n")
    for _ in range(3):
        terminal.draw(starting().workers, Progress(stage="fetching", done=1, total=2))
        terminal.write(LINE)
        terminal.write("\n")
    assert stream.getvalue().count(LINE) == 3, "no line break was put into a line"
    lines = shown(stream).lines
    assert lines[0] == "before"
    assert "".join(line.ljust(80) for line in lines[1:7]).split() == 3 * PLAIN.split()
    assert [line.split()[0] for line in lines[7:]] == ["daemon", "w0", "w1"]
    terminal.clear()
    assert len(shown(stream).lines) == 7
    assert not shown(stream).cursor_hidden


def test_without_bars_it_writes_through(stream: Terminal) -> None:
    terminal = LogTerminal(stream)
    assert terminal.isatty()
    terminal.write("a")
    assert stream.getvalue() == "a"
    terminal.draw(starting().workers, None)
    terminal.write("half a line")
    assert "half a line" not in stream.getvalue()
    terminal.clear()
    assert stream.getvalue().endswith("half a line"), "nothing is lost"


def test_a_log_that_nobody_looks_at_has_no_bars() -> None:
    assert log_terminal(io.StringIO(), {"TERM": "xterm"}) is None
    assert log_terminal(Terminal(), {"TERM": "dumb"}) is None
    assert log_terminal(Terminal(), {}) is None
    assert log_terminal(Terminal(), {"TERM": "xterm"}) is not None


async def test_bars_are_there_as_long_as_something_starts(stream: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pingpongd.log_terminal._FRAME_S", 0.001)
    monkeypatch.setattr("pingpongd.log_terminal._IDLE_S", 0.001)
    now = starting()
    showing = asyncio.create_task(show_start(LogTerminal(stream), lambda: now))

    async def until(*names: str) -> None:
        async with asyncio.timeout(20):
            while [line.split()[0] for line in shown(stream).lines] != list(names):
                await asyncio.sleep(0.001)

    await until("w0", "w1")
    now = status_of(0, 0)
    await until()
    now = msgspec.structs.replace(starting(), state="degraded")  # one that was lost starts again
    await until("w0")
    showing.cancel()
    await asyncio.wait({showing})
    await until()
