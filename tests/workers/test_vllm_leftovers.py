"""A real engine under the supervisor's hand: whoever of its processes is killed, nothing of it is left.

The model is a tiny one with random weights: what takes the time here is vLLM itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from daemon_process import orphaned_segments, until
from pingpong_worker.shared_memory_names import PREFIX_VARIABLE, segments
from pingpongd.process import WorkerProcess
from pingpongd.process_group import group_lives
from tiny_model import CONFIG

pytestmark = pytest.mark.engine

PREFIX = f"pingpong-engine-{os.getpid()}"
START_LIMIT_S = 180


class Engine:
    """A worker with a real engine."""

    def __init__(self, folder: Path) -> None:
        model, temporary = folder / "model", folder / "t"
        model.mkdir()
        temporary.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        arguments = {"load_format": "random", "dtype": "float32"}
        self.before = orphaned_segments()
        self.process = WorkerProcess(
            [
                sys.executable,
                str(Path(__file__).with_name("engine_process.py")),
                str(model),
                json.dumps(arguments),
                "stay",
            ],
            b"",
            os.environ | {PREFIX_VARIABLE: PREFIX, "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"},
            [],
        )
        self.ready = asyncio.Event()
        self.process.on_line = lambda line: self.ready.set() if line.startswith("answer ready") else None

    def family(self) -> dict[str, psutil.Process]:
        """Its processes by what they are."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = " ".join(process.cmdline())
            except psutil.Error:  # it has just ended
                continue
            if "resource_tracker" in command:
                found["tracker"] = process
            elif "EngineCore" in command or ("spawn_main" in command and "core" not in found):
                found["core"] = process
            elif "Worker" in command or "spawn_main" in command:
                found["device"] = process
        return found | {"worker": psutil.Process(self.process.pid)}

    def kill(self, *names: str) -> None:
        family = self.family()
        for name in names:
            family[name].send_signal(signal.SIGKILL)

    async def nothing_left(self) -> None:
        async with asyncio.timeout(30):
            await self.process.over()
        assert not group_lives(self.process.pid)
        assert segments(PREFIX) == []
        assert orphaned_segments() - self.before == set()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.process.kill()
    await engine.process.over()


@pytest.mark.parametrize(
    "victims", [["tracker", "device", "worker"], ["tracker", "core", "device", "worker"]], ids="-".join
)
async def test_whoever_is_killed_nothing_of_an_engine_is_left(engine: Engine, victims: list[str]) -> None:
    async with asyncio.timeout(START_LIMIT_S):
        await engine.ready.wait()
    assert set(engine.family()) == {"worker", "core", "device", "tracker"}
    names = segments(PREFIX)
    assert [name for name in names if not name.startswith("sem.")], "else this test would show nothing"
    engine.kill(*victims)
    await engine.nothing_left()


@pytest.mark.parametrize("phase", ["born", "segment"])
async def test_a_worker_killed_while_its_engine_loads_leaves_nothing(engine: Engine, phase: str) -> None:
    """When its EngineCore is hardly there, so that nothing ties it to the worker; and when it has made a segment."""
    if phase == "born":
        await until(lambda: "core" in engine.family(), "an EngineCore", START_LIMIT_S)
        engine.kill("worker")
    else:
        await until(lambda: bool(segments(PREFIX)), "a segment", START_LIMIT_S)
        engine.kill("tracker", "worker")
    await engine.nothing_left()
