"""How far an engine's start has come, told from its processes to whoever waits for them."""

from __future__ import annotations

import ast
import importlib.util
import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pingpong_bus.messages import Progress
from pingpong_worker.start_progress import StartProgress, tell
from pingpong_worker.vllm_start_progress import STAGES, bar_progress, tell_bars, tell_stages

HANG_S = 30
HALF = Progress(stage="loading the weights", done=1, total=2, unit="shards")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines(path: Path) -> list[Progress]:
    """What was told so far."""
    told: list[Progress] = []
    with StartProgress(path, told.append) as reader:
        whole = path.read_bytes()
        for line in whole.splitlines(keepends=True):
            path.write_bytes(line)
            reader._read = 0
            reader._look()
    return told


def test_what_is_told_last_is_heard_in_another_thread(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    told: list[tuple[Progress, threading.Thread]] = []
    with StartProgress(path, lambda progress: told.append((progress, threading.current_thread()))):
        tell(path, Progress(stage="taking the device"))
        until(lambda: bool(told))
        child = "from pathlib import Path; from pingpong_worker.start_progress import tell; import sys"
        child += "; from pingpong_bus.messages import Progress; tell(Path(sys.argv[1]), Progress(stage='of a process'))"
        subprocess.run([sys.executable, "-c", child, str(path)], check=True)
        until(lambda: len(told) == 2)
        with path.open("ab") as file:
            file.write(b'{"stage": "ki')  # a process that was killed in the middle of a line
        tell(path, HALF)
        tell(path, HALF)
        tell(path, Progress(stage="after it"))
        until(lambda: len(told) == 3)
    assert [progress.stage for progress, _ in told] == ["taking the device", "of a process", "after it"]
    assert threading.main_thread() not in {thread for _, thread in told}
    assert "start progress" not in {thread.name for thread in threading.enumerate()}


def test_where_nobody_listens_nothing_happens(tmp_path: Path) -> None:
    tell(tmp_path / "gone", HALF)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_of_vllms_tells_its_stages_and_does_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    path.touch()

    class Base:
        rank = 0

        def load_model(self, *, load_dummy_weights: bool = False) -> str:
            return f"loaded {load_dummy_weights}"

        def initialize_from_config(self, config: int) -> None:
            assert config == 3

    class Worker(Base):
        def init_device(self) -> None: ...

    tell_stages(Worker, path)
    assert Worker.load_model.__name__ == "load_model"
    worker, other = Worker(), Worker()
    other.rank = 1
    for one in (worker, other):
        one.init_device()
        assert one.load_model(load_dummy_weights=True) == "loaded True"
        one.initialize_from_config(3)
    assert [one.stage for one in lines(path)] == [
        STAGES[name] for name in ("init_device", "load_model", "initialize_from_config")
    ], "the second rank says nothing"


def test_bars_tell_what_they_show(tmp_path: Path) -> None:
    tqdm = pytest.importorskip("tqdm")
    path = tmp_path / "progress"
    path.touch()

    class Bar(tqdm.std.tqdm):  # type: ignore[misc,name-defined]
        pass

    tell_bars(Bar, path)
    drawn = io.StringIO()
    title = "Loading safetensors checkpoint shards"
    for _ in Bar(["a", "b"], desc=title, file=drawn, bar_format="{desc}: {n_fmt}/{total_fmt}\n"):
        continue
    told = lines(path)
    assert told[0] == Progress(stage="loading the weights", done=0, total=2, unit="shards")
    assert told[-1] == Progress(stage="loading the weights", done=2, total=2, unit="shards")
    assert f"{title}: 2/2" in drawn.getvalue(), "it is drawn as it was"
    path.write_bytes(b"")
    for _ in Bar(range(3), disable=True):
        continue
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("bar", "progress"),
    [
        (
            ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)", 3, 51, "it"),
            Progress(stage="capturing CUDA graphs", done=3, total=51, unit="graphs"),
        ),
        (
            ("model-00001-of-00002.safetensors", 5e8, 4e9, "B"),
            Progress(stage="downloading the model", done=5e8, total=4e9, unit="bytes"),
        ),
        (("Something else: ", 1, None, "it"), Progress(stage="something else", done=1)),
        (("", 1, 2, "it"), Progress(stage="loading", done=1, total=2)),
    ],
)
def test_a_bars_title_is_put_into_words(bar: tuple[Any, ...], progress: Progress) -> None:
    assert bar_progress(*bar) == progress


def test_the_methods_that_tell_are_those_of_vllms_workers() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("there is no vLLM")
    source = (Path(spec.origin).parent / "v1" / "worker" / "gpu_worker.py").read_text("utf-8")
    (worker,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Worker"]
    assert set(STAGES) <= {node.name for node in worker.body if isinstance(node, ast.FunctionDef)}
