"""Processes of the real engine: nothing outlives a killed worker, and failures to start say why.

The model is a tiny one with random weights: what takes the time here is vLLM itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pingpong_worker.vllm_start_progress import STAGES
from tiny_model import CONFIG

pytestmark = pytest.mark.engine

START_LIMIT_S = 180
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Start an engine in a process; whatever is left of it is killed after the test."""
    started: list[subprocess.Popen[str]] = []
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    temporary = tmp_path / "t"
    temporary.mkdir()

    def go(then: str = "", **engine_args: Any) -> subprocess.Popen[str]:
        arguments = {"load_format": "random", "dtype": "float32"} | engine_args
        process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("engine_process.py")),
                str(model),
                json.dumps(arguments),
                then,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"},
        )
        started.append(process)
        return process

    yield go
    for process in started:
        family = _family(process.pid)
        process.kill()
        # The rest follows by itself; the resource tracker last, for it clears away the engine's shared memory.
        _, alive = psutil.wait_procs(family[1:], timeout=30)
        for member in alive:
            member.kill()
        process.communicate()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def answer(process: subprocess.Popen[str]) -> Any:
    """The line that the process answers with; what vLLM prints is passed over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("answer "):
            text = line.removeprefix("answer ").strip()
            return json.loads(text) if text.startswith("{") else text
    pytest.fail(f"the engine's process ended with {process.wait()} and no answer")


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "sem.mp-"))}


def test_nothing_outlives_a_killed_worker(start: Start) -> None:
    before = segments()
    process = start()
    assert answer(process) == "ready"
    family = _family(process.pid)
    assert len(family) >= 3, "the worker, EngineCore and its Worker"
    made = segments() - before
    assert made, "else this test would show nothing"
    os.kill(process.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(family[1:], timeout=30)
    assert not alive
    assert len(gone) == len(family) - 1
    wait_until(lambda: not (segments() & made), 10, f"left in /dev/shm: {segments() & made}")


@pytest.mark.parametrize(
    ("victim", "how"),
    [(1, signal.SIGTERM), (2, signal.SIGKILL)],  # the core's own SIGKILL is a cell of the fault matrix
    ids=["core told", "worker"],
)
def test_an_answer_is_lost_and_not_failed_where_the_engine_goes(start: Start, victim: int, how: signal.Signals) -> None:
    process = start("decode")
    assert [answer(process), answer(process)] == ["ready", "decoding"]
    engine_core = next(member for member in _family(process.pid)[1:] if member.children())
    os.kill(engine_core.pid if victim == 1 else engine_core.children()[-1].pid, how)
    for what in ("the answer", "the check"):
        error = answer(process)
        assert error["code"] == "EngineLost", f"{what}: {error}"
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None  # for whoever ends the process after the test
    assert process.wait(60) == 0


def test_an_engine_tells_of_its_start_of_its_memory_and_of_its_garbage(start: Start) -> None:
    process = start("tell")
    assert answer(process) == "ready"
    told = answer(process)
    stages = told["stages"]
    assert stages == [stage for stage in STAGES.values() if stage in stages], "in their order, and no other"
    assert {"setting up the KV cache", "warming up"} <= set(stages)
    assert 0 < told["held"] < 1
    assert told["gc_ms"] > 0, "to load leaves garbage in each of its processes"


def test_an_engine_core_dies_with_a_worker_that_is_killed_while_it_loads(start: Start) -> None:
    process = start()
    wait_until(lambda: any(_is_engine_core(member) for member in _family(process.pid)), START_LIMIT_S, "no EngineCore")
    family = _family(process.pid)[1:]
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_a_kv_cache_that_is_too_small_is_explained(start: Start) -> None:
    error = answer(start(max_model_len=2048, kv_cache_memory_bytes=2**17))
    assert (error["code"], error["field"]) == ("ConfigError", "vllm")
    assert "do not fit in memory" in error["text"]
    assert "max_model_len" in error["text"]


def _is_engine_core(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline()) or "EngineCore" in process.name()
    except psutil.Error:
        return False


def test_what_is_expected_back_outlasts_forty_others(start: Start) -> None:
    process = start("keep", max_model_len=512, block_size=32, kv_cache_memory_bytes=64 * 32 * 512)
    assert answer(process) == "ready"
    told = answer(process)
    assert told["kv_tokens"] == 63 * 32, "one is vLLM's null block"
    assert told["keep_tokens"] == 32 * 32
    # Both have computed 192 tokens, in whole blocks, by an append before; of the first, 256 had stayed.
    assert told["found"] == [256, 192]
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    assert process.wait(60) == 0
