"""The runtime directory: one daemon at a time, and nothing left in it."""

from __future__ import annotations

import grp
import os
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
        with pytest.raises(ConfigError, match=rf"a daemon already runs in {short}/r \(pid {os.getpid()}\)") as caught:
            RuntimeDir(short / "r", "main")
        assert first.temporary.is_dir()
    assert (caught.value.field, "another --runtime-dir." in caught.value.hint) == ("runtime_dir", True)
    with RuntimeDir(short / "r", "main"):
        pass


def test_another_name_is_advised_where_it_would_help(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    with RuntimeDir(short / "pingpongd-two", "two"), pytest.raises(ConfigError, match="another --instance name"):
        RuntimeDir(short / "pingpongd-two", "two")


def test_a_refused_start_leaves_no_folder_that_it_has_made(short: Path) -> None:
    def refused(path: Path) -> None:
        with pytest.raises(ConfigError, match="later"), RuntimeDir(path, "main"):
            raise ConfigError("later")

    refused(short / "a" / "r")
    assert not (short / "a").exists()
    (short / "a").mkdir()
    refused(short / "a")
    assert (short / "a").is_dir()
    with RuntimeDir(short / "b", "main"):
        pass
    assert (short / "b").is_dir()


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


def test_systemds_directory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/pingpongd-x:/run/other")
    assert default_runtime_dir("default") == Path("/run/pingpongd-x")


def bound(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path.removeprefix("ipc://"))
    return listener


def test_a_client_group_gets_the_control_socket_and_nothing_else(short: Path) -> None:
    group = grp.getgrgid(os.getgid())
    with RuntimeDir(short / "r", "main", group.gr_name) as runtime, bound(runtime.control):
        control = short / "r" / "control.sock"
        assert runtime.path.stat().st_mode & 0o777 == 0o700
        runtime.open_to_clients()
        assert runtime.path.stat().st_mode & 0o777 == 0o750
        assert control.stat().st_mode & 0o777 == 0o660
        assert runtime.path.stat().st_gid == control.stat().st_gid == runtime.client_group == group.gr_gid
        assert runtime.temporary.stat().st_mode & 0o777 == 0o700
        assert (runtime.path / "lock").stat().st_mode & 0o777 == 0o600


def test_without_a_group_nothing_is_opened(short: Path) -> None:
    with RuntimeDir(short / "r", "main") as runtime, bound(runtime.control):
        runtime.open_to_clients()
        assert runtime.path.stat().st_mode & 0o777 == 0o700


def test_what_an_earlier_daemon_opened_is_closed_again_unless_it_runs(short: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    with RuntimeDir(short / "r", "main", group) as runtime, bound(runtime.control):
        runtime.open_to_clients()
        with pytest.raises(ConfigError, match="already runs"):
            RuntimeDir(short / "r", "main")
        assert runtime.path.stat().st_mode & 0o777 == 0o750
    with RuntimeDir(short / "r", "main") as runtime:
        assert runtime.path.stat().st_mode & 0o777 == 0o700


def test_a_group_that_is_not_there_or_not_ours_to_give_is_refused(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="client_group: there is no group"):
        RuntimeDir(short / "r", "main", "no-such-group-here")

    def chown(path: Path, uid: int, gid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    group = grp.getgrgid(os.getgid()).gr_name
    with RuntimeDir(short / "r", "main", group) as runtime, bound(runtime.control):
        monkeypatch.setattr(os, "chown", chown)
        with pytest.raises(ConfigError, match="client_group: .*not permitted") as caught:
            runtime.open_to_clients()
        assert caught.value.field == "client_group"
        assert runtime.path.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_refused(short: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make one")
    (short / "r").mkdir()
    os.chown(short / "r", 54_321, -1)
    with pytest.raises(ConfigError, match="runtime_dir: .*belongs to another user"):
        RuntimeDir(short / "r", "main")
