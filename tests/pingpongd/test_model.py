"""Fetching the model in a process that a signal can end, and that nothing outlives."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import Progress
from pingpongd.model import fetch_model
from pingpongd.runtime_dir import RuntimeDir


class Guard:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.watched: list[tuple[int, str]] = []
        self.forgotten: list[int] = []

    def watch(self, pid: int, prefix: str) -> None:
        self.watched.append((pid, prefix))
        environment = psutil.Process(pid).environ()
        assert prefix in environment.values(), "what it runs can be known by that"

    def forget(self, pid: int) -> None:
        self.forgotten.append(pid)


class ShellGuard(Guard):
    """Of a process that may have ended before it can be looked at."""

    def watch(self, pid: int, prefix: str) -> None:
        self.watched.append((pid, prefix))


@pytest.fixture
def runtime() -> Iterator[RuntimeDir]:
    with tempfile.TemporaryDirectory(prefix="pp-") as folder, RuntimeDir(Path(folder) / "run", "test") as runtime:
        yield runtime


async def test_a_folder_is_taken_as_it_is(runtime: RuntimeDir, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    guard = Guard()
    assert await fetch_model(str(tmp_path), runtime, guard) == str(tmp_path)
    [(pid, prefix)] = guard.watched
    assert guard.forgotten == [pid]
    assert prefix.startswith(f"{runtime.segment_prefix}-")


async def test_a_folder_that_is_not_there_is_an_error(runtime: RuntimeDir, tmp_path: Path) -> None:
    guard = Guard()
    with pytest.raises(ConfigError):
        await fetch_model(str(tmp_path / "none"), runtime, guard)
    assert guard.forgotten == [guard.watched[0][0]]


async def test_a_fetch_that_is_cancelled_is_ended(runtime: RuntimeDir, tmp_path: Path) -> None:
    guard = Guard()
    fetching = asyncio.create_task(fetch_model(str(tmp_path), runtime, guard))
    while not guard.watched:
        await asyncio.sleep(0.001)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    [(pid, _)] = guard.watched
    assert guard.forgotten == [pid]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_how_far_it_has_come_is_told(
    runtime: RuntimeDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = tmp_path / "fetcher"
    fetcher.write_text(
        """#!/bin/sh
echo '{"stage": "fetching the model"}'
echo '{"progress": {"stage": "fetching the model", "done": 5, "total": 9, "unit": "bytes"}}'
echo '{"path": "/model"}'
"""
    )
    fetcher.chmod(0o755)
    monkeypatch.setattr("pingpongd.model.sys.executable", str(fetcher))
    told: list[Progress] = []
    assert await fetch_model("smollm2-135m", runtime, ShellGuard(), told.append) == "/model"
    assert told == [
        Progress(stage="fetching the model"),
        Progress(stage="fetching the model", done=5, total=9, unit="bytes"),
    ]
