"""The runtime directory: one daemon at a time, and nothing left in it."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pingpong_bus.errors import ConfigError
from pingpongd.runtime_dir import RuntimeDir, default_runtime_dir


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pp-") as folder:
        yield Path(folder)


def test_a_second_daemon_is_refused_and_the_first_is_untouched(short: Path) -> None:
    with RuntimeDir(short / "r", "main") as first:
        with pytest.raises(ConfigError, match='instance: the instance "main" already runs'):
            RuntimeDir(short / "r", "main")
        assert first.temporary.is_dir()
    with RuntimeDir(short / "r", "main"):
        pass


def test_what_a_killed_daemon_left_is_cleared(short: Path) -> None:
    stale = short / "control.sock"
    (short / "lock").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stale))
    (short / "tmp").mkdir()
    (short / "tmp" / "left").touch()
    with RuntimeDir(short, "main") as runtime:
        assert not stale.exists()
        assert not list(runtime.temporary.iterdir())
    assert not list(short.iterdir())


@pytest.mark.parametrize("names", [["notes.txt"], ["tmp"], ["lock", "notes.txt"], ["lock", "other.sock"]])
def test_a_folder_that_others_use_is_refused_and_untouched(short: Path, names: list[str]) -> None:
    for name in names:
        (short / name).mkdir() if name == "tmp" else (short / name).touch()
    with pytest.raises(ConfigError, match="runtime_dir: .* holds .*not pingpongd's"):
        RuntimeDir(short, "main")
    assert sorted(entry.name for entry in short.iterdir()) == sorted(names)


def test_it_is_for_its_owner_only(short: Path) -> None:
    with RuntimeDir(short / "r", "main") as runtime:
        assert runtime.path.stat().st_mode & 0o777 == 0o700


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runtime_dir: .*too long"):
        RuntimeDir(tmp_path / ("x" * 100), "main")


def test_a_path_that_is_a_file_is_refused(short: Path) -> None:
    (short / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        RuntimeDir(short / "file", "main")


def test_the_default_is_in_the_users_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_runtime_dir("default") == Path("/run/user/7/pingpongd")
    assert default_runtime_dir("two") == Path("/run/user/7/pingpongd-two")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_runtime_dir("default") == Path("/run/pingpongd")
