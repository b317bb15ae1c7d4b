"""Fixtures that start real daemons and check that they leave nothing behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from daemon_process import DaemonProcess, StartDaemon, simulated_config


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="pp-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def start_daemon(folder: Path) -> AsyncIterator[StartDaemon]:
    """Starts daemons and waits until they serve; ends them after the test."""
    started: list[DaemonProcess] = []

    async def start(config: str | None = None, *arguments: str, wait: bool = True) -> DaemonProcess:
        place = folder / str(len(started))
        place.mkdir()
        daemon = DaemonProcess(place, config or simulated_config(), *arguments)
        started.append(daemon)
        if wait:
            await daemon.ready()
        return daemon

    yield start
    for daemon in started:
        await daemon.stop()
