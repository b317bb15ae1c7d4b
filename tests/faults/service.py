"""A daemon as a service manager would run it: started again where it died, and watched for what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pingpong_bus.errors import DaemonUnavailable
from pingpong_bus.messages import StatusReply
from pingpong_client import AsyncClient
from pingpong_worker.shared_memory_names import instance_prefix, segments

HANG_S = 60.0
"""A limit for what takes a moment, on a machine that does many other things."""
CLEAN_S = 15.0
"""The same for what a dead daemon has left; how long it took is reported."""

WATCH = """
[watch]
heartbeat_s = 0.3
stall_s = 1.5
stop_s = 1.0
[restart]
backoff_s = 0.1
backoff_max_s = 1.0
give_up_after = 20
"""
_MARK = "PINGPONG_FAULT_TEST"
_SEGV_WORDS = "Fatal Python error: Segmentation fault"
"""With which the daemon says where it stood."""
_ENGINES = ("simulated_process", "spawn_main", "EngineCore")
"""In the command lines of engines: the simulated one; vLLM's, before and after it gives itself a name."""


class CellFault(AssertionError):
    """What went wrong."""


class Service:
    """One daemon over its lives, in a folder of its own: `run` has its sockets, `state` its chains, `log` its words."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.runtime_dir, self.state_dir, self.log_path = folder / "run", folder / "state", folder / "log"
        self.exit_codes: list[int] = []
        self.clean_s: list[float] = []
        """How long it took after each end of the daemon until nothing of it was left."""
        self.process: subprocess.Popen[bytes] | None = None
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._read = 0

    def client(self) -> AsyncClient:
        return AsyncClient(self.runtime_dir / "control.sock", reconnect_s=HANG_S)

    # -------------------------------------------------------------------------------------------------------- its lives

    def start(self, config: str) -> None:
        """Start it; `config` is TOML without the folders."""
        path = self.folder / "config.toml"
        folders = f'runtime_dir = "{self.runtime_dir}"\nstate_dir = "{self.state_dir}"\n'
        path.write_text(folders + config)
        name, value = self._mark.split("=")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pingpongd", "--config", str(path), "--log-format", "json"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {name: value},
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def ready(self, patience_s: float = HANG_S) -> StatusReply:
        """Wait until every group serves.

        Raises:
            CellFault: it ended instead.
        """
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise CellFault(f"the daemon did not start, it ended with {self.process and self.process.returncode}")
            try:
                async with self.client() as client:
                    status = await client.status()
            except DaemonUnavailable:
                status = None
            if status is not None and status.state == "ready":
                return status
            await asyncio.sleep(0.05)
        raise CellFault("the daemon did not get ready")

    async def ended(self) -> int:
        """Wait for its end, and until nothing of it is left; returns the exit code.

        Raises:
            CellFault: it does not end, or something stays.
        """
        assert self.process is not None
        await until(lambda: not self.alive, "the daemon's end")
        self.exit_codes.append(self.process.returncode)
        started = time.monotonic()
        await until(lambda: not self.left(), lambda: f"the end of {self.left()}", CLEAN_S, look_s=0.1)
        self.clean_s.append(round(time.monotonic() - started, 2))
        return self.process.returncode

    async def stop(self) -> None:
        """SIGTERM, as a service manager does it.

        Raises:
            CellFault: it does not end as asked.
        """
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)
            if (code := await self.ended()) != 0:
                raise CellFault(f"SIGTERM ended the daemon with {code}")

    def kill(self) -> None:
        """End all that is left, for teardown."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    # -------------------------------------------------------------------------------------------------- what is of it

    def processes(self) -> list[psutil.Process]:
        """Every living process that one of its lives has started, and itself."""
        found = []
        mark = self._mark.encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes():
                    process = psutil.Process(int(entry.name))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
            except (OSError, psutil.NoSuchProcess):  # it has ended, or is not ours
                continue
        return found

    def left(self) -> list[str]:
        """What a daemon that has ended must not leave: processes, sockets, segments."""
        processes = [f"process {process.pid} {_command(process)}" for process in self.processes()]
        sockets = [str(path) for path in self.runtime_dir.glob("*") if path.is_socket()]
        return [*processes, *sockets, *self.segments()]

    def segments(self) -> list[str]:
        """Its names in /dev/shm."""
        return segments(instance_prefix(self.runtime_dir))

    def workers(self) -> dict[str, psutil.Process]:
        """The workers' processes, by the names of their groups; also of those that still load."""
        started = [line for line in self.log() if line.get("event") == "worker_started"]
        living = {process.pid: process for process in self.processes()}
        return {line["worker"]: living[line["pid"]] for line in started if line["pid"] in living}

    def log(self) -> list[dict[str, Any]]:
        """The log's objects, of all lives.

        Raises:
            CellFault: there is a line that no logger wrote, such as of a traceback.
        """
        if not self.log_path.exists():
            return []
        *lines, _ = self.log_path.read_text(errors="replace").split("\n")
        found = []
        struck = False
        for at, line in enumerate(lines):
            struck = not line.startswith("{") and (struck or line == _SEGV_WORDS)
            if line.startswith("{"):
                found.append(json.loads(line))
            elif not struck:
                raise CellFault("a stray line in the log: " + " | ".join(lines[at : at + 30]))
        return found

    def complaints(self) -> list[str]:
        """Lines of the log that tell of a fault in the daemon itself."""
        bad = {"illegal_transition", "task_failed", "daemon_failed", "result_not_kept"}
        return [json.dumps(line) for line in self.log() if line.get("event") in bad or "exception" in line]


def engine_of(worker: psutil.Process) -> psutil.Process | None:
    """The engine's process of a worker; None while it has none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in worker.children():
            if any(part in _command(child) for part in _ENGINES):
                return child
    return None


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:6])
    except psutil.NoSuchProcess:
        return "(ended)"


async def until(
    condition: Callable[[], bool], what: str | Callable[[], str], seconds: float = HANG_S, *, look_s: float = 0.02
) -> None:
    """Wait for a condition.

    Raises:
        CellFault: it does not come.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise CellFault(f"not within {seconds:g} s: {what() if callable(what) else what}")
        await asyncio.sleep(look_s)
