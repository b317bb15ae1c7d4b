"""A daemon in a process of its own, for tests: start it, talk to it, end it, see that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import pytest

from pingpong_bus.errors import DaemonUnavailable
from pingpong_bus.messages import StatusReply
from pingpong_client import AsyncClient

HANG_SECONDS = 120.0

SIMULATED = """
engine = "simulated"
calibrate = false
slots = {slots}
drain_seconds = {drain}
[simulated]
step_ms = {step_ms}
row_us = 20.0
max_model_len = 4096
[[groups]]
name = "a"
devices = ["cpu:0"]
[[groups]]
name = "b"
devices = ["cpu:0"]
"""


def simulated_config(*, slots: int = 64, step_ms: float = 1.0, drain: float = 30.0) -> str:
    """Two groups of the simulated engine."""
    return SIMULATED.format(slots=slots, step_ms=step_ms, drain=drain)


StartDaemon = Callable[..., Awaitable["DaemonProcess"]]


def orphaned_segments() -> set[str]:
    """Names in /dev/shm, of this user's, that no process maps.

    By device and inode: a semaphore's maker maps it under another name, for sem_open(3) gives it its own, by a link,
    when it is complete.
    """
    names = {_place(entry): entry.name for entry in Path("/dev/shm").iterdir()}
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            fields = [line.split() for line in maps.read_text().splitlines() if "/dev/shm/" in line]
        except OSError:  # it has ended, or is not ours
            continue
        mapped |= {(it[3], it[4]) for it in fields}
    return {name for place, name in names.items() if place is not None and place not in mapped}


def _place(entry: Path) -> tuple[str, str] | None:
    """Device and inode as /proc writes them; None for folders, which tests make, and what others hold, unseen by us."""
    try:
        found = entry.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        return None
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", str(found.st_ino)


async def until(condition: Callable[[], bool], what: str, seconds: float = HANG_SECONDS) -> None:
    """Wait for a condition; fail if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.02)


class DaemonProcess:
    """`pingpongd` as a user runs it."""

    program: Sequence[str] = ("-m", "pingpongd")
    """What Python runs."""

    def __init__(self, folder: Path, config: str, *arguments: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        if not re.search(r"^state_dir\b", config, re.MULTILINE):  # every daemon has its own
            config = f'state_dir = "{folder / "state"}"\n{config}'
        (folder / "config.toml").write_text(config)
        self.socket = folder / "run" / "control.sock"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, *self.program, "--config", str(folder / "config.toml")),
                    *("--runtime-dir", str(folder / "run"), *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.children: set[psutil.Process] = set()

    def client(self) -> AsyncClient:
        return AsyncClient(self.socket)

    def log_events(self, event: str) -> list[dict[str, object]]:
        """The log's objects of one event name."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    async def ready(self) -> StatusReply:
        """Wait until every group serves."""
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the daemon ended with {self.process.returncode}:\n{self.log.read_text()}")
            try:
                async with self.client() as client:
                    status = await client.status()
            except DaemonUnavailable:
                status = None
            if status is not None and status.state == "ready":
                self.note_children()
                return status
            await asyncio.sleep(0.05)
        pytest.fail(f"the daemon did not get ready:\n{self.log.read_text()}")

    def note_children(self) -> None:
        """Remember every process that the daemon has started by now."""
        self.children |= set(psutil.Process(self.process.pid).children(recursive=True))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the daemon's end; returns its exit code."""
        await until(lambda: self.process.poll() is not None, "the daemon's end")
        return self.process.returncode

    async def leaves_nothing(self, *, sockets: bool = True) -> None:
        """Check that no process of the daemon's is left, and no socket."""

        def alive() -> list[psutil.Process]:
            return [child for child in self.children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

        def none_left() -> bool:
            try:
                return not alive()
            except psutil.NoSuchProcess:
                return False  # it ended between the two looks: look again

        await until(none_left, f"the end of every process, of {len(self.children)}", 30)
        if sockets:
            assert not list((self.folder / "run").glob("*"))

    async def stop(self) -> None:
        """End it, by force if need be; for teardown."""
        if self.process.poll() is None:
            self.note_children()
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                pytest.fail(f"the daemon did not end at SIGTERM:\n{self.log.read_text()[-4000:]}")
        await self.leaves_nothing(sockets=False)
