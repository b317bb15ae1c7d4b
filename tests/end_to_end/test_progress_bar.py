"""Bars of benchmarks: for whoever looks on, and nothing but what was printed before for all others."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

import progress_bar
from daemon_process import StartDaemon, simulated_config
from fake_daemon import Terminal
from pingpong_bus.errors import DataError
from progress_bar import counted, counting, start_shown, tell_stage
from screen import Screen

STAGE = {"event": "worker_loading", "worker": "a", "stage": "loading the model"}


def look_on(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Have standard error be a terminal. Not a fixture: pytest would put its own there after it."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    return stream


def shown(stream: Terminal) -> Screen:
    screen = Screen()
    screen.feed(stream.getvalue())
    return screen


def test_items_are_counted_below_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = look_on(monkeypatch)
    seen = []
    for item in counted(["a", "b", "c"], "rounds"):
        sys.stderr.write(f"round {item}\n")
        with counting("chains", 2) as done:
            done()
        seen.append(item)
    assert seen == ["a", "b", "c"]
    assert "rounds" in terminal.getvalue()
    assert "chains" in terminal.getvalue()
    assert shown(terminal).lines == ["round a", "round b", "round c"], "the bars are gone"
    assert not shown(terminal).cursor_hidden


def test_an_error_takes_the_bars_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = look_on(monkeypatch)
    with pytest.raises(DataError), counting("chains", 2):
        raise DataError("no.")
    assert shown(terminal).lines == []
    assert sys.stderr is terminal


def test_without_a_terminal_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(counted(iter("ab"), "rounds", 2)) == ["a", "b"]
    tell_stage(STAGE)
    tell_stage({"event": "worker_ready"})
    assert capsys.readouterr().err == "a: loading the model\n"


def test_where_bars_show_a_start_its_stages_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = look_on(monkeypatch)
    tell_stage(STAGE)
    assert terminal.getvalue() == ""


async def test_a_start_is_shown_from_before_the_daemon_listens_until_it_serves(
    start_daemon: StartDaemon, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = look_on(monkeypatch)
    monkeypatch.setattr(progress_bar, "_POLL_S", 0.01)
    async with start_shown(folder / "0" / "run"):
        await start_daemon(simulated_config())
        async with asyncio.timeout(30):
            while "serving" not in terminal.getvalue():
                await asyncio.sleep(0.01)
    assert shown(terminal).lines == []
    assert not shown(terminal).cursor_hidden
