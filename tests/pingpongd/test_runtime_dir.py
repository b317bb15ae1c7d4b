"""The runtime directory: one daemon at a time, and nothing left in it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pingpong_bus.errors import ConfigError
from pingpongd.runtime_dir import RuntimeDir, default_runtime_dir


def test_a_second_daemon_is_refused_and_the_first_is_untouched(tmp_path: Path) -> None:
    with RuntimeDir(tmp_path / "r", "main") as first:
        with pytest.raises(ConfigError, match='instance: the instance "main" already runs'):
            RuntimeDir(tmp_path / "r", "main")
        assert first.temporary.is_dir()
    with RuntimeDir(tmp_path / "r", "main"):
        pass


def test_what_a_killed_daemon_left_is_cleared(tmp_path: Path) -> None:
    stale = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stale))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "left").touch()
    with RuntimeDir(tmp_path, "main") as runtime:
        assert not stale.exists()
        assert not list(runtime.temporary.iterdir())
    assert not list(tmp_path.iterdir())


def test_it_is_for_its_owner_only(tmp_path: Path) -> None:
    with RuntimeDir(tmp_path / "r", "main") as runtime:
        assert runtime.path.stat().st_mode & 0o777 == 0o700


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runtime_dir: .*too long"):
        RuntimeDir(tmp_path / ("x" * 100), "main")


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        RuntimeDir(tmp_path / "file", "main")


def test_the_default_is_in_the_users_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_runtime_dir("default") == Path("/run/user/7/pingpongd")
    assert default_runtime_dir("two") == Path("/run/user/7/pingpongd-two")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_runtime_dir("default") == Path("/run/pingpongd")
