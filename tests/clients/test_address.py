"""Where a client looks for the daemon."""

from pathlib import Path

import pytest

from pingpong_bus.errors import UsageError
from pingpong_client import address
from pingpong_client.address import socket_path


@pytest.fixture(autouse=True)
def system_runtime(tmp_path, monkeypatch):
    monkeypatch.setattr(address, "SYSTEM_RUNTIME", tmp_path / "run")


def test_the_option_comes_before_the_environment(tmp_path):
    environ = {"PINGPONG_SOCKET": "/env.sock", "XDG_RUNTIME_DIR": "/user"}
    assert socket_path(tmp_path / "x.sock", environ=environ) == tmp_path / "x.sock"
    assert socket_path(environ=environ) == Path("/env.sock")
    assert socket_path(environ={"XDG_RUNTIME_DIR": "/user"}) == Path("/user/pingpongd/control.sock")
    assert socket_path(environ={}) == tmp_path / "run/pingpongd/control.sock"


def test_a_folder_or_the_socket_itself(tmp_path):
    assert socket_path(tmp_path, environ={}) == tmp_path / "control.sock"
    assert socket_path("/not/there", environ={}) == Path("/not/there/control.sock")
    assert socket_path("/not/there.sock", environ={}) == Path("/not/there.sock")
    odd = tmp_path / "odd-name"
    odd.touch()
    assert socket_path(odd, environ={}) == odd
    folder = tmp_path / "folder.sock"
    folder.mkdir()
    assert socket_path(environ={"PINGPONG_SOCKET": str(folder)}) == folder / "control.sock"


def test_an_instance_has_a_folder_of_its_own():
    environ = {"XDG_RUNTIME_DIR": "/user", "PINGPONG_SOCKET": "/env.sock"}
    assert socket_path(instance="red", environ=environ) == Path("/user/pingpongd-red/control.sock")
    assert socket_path(instance="default", environ=environ) == Path("/user/pingpongd/control.sock")


def test_the_systems_daemon_is_found_when_the_user_has_none(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "user")}
    system = tmp_path / "run/pingpongd/control.sock"
    system.parent.mkdir(parents=True)
    system.touch()
    assert socket_path(environ=environ) == system
    own = tmp_path / "user/pingpongd/control.sock"
    own.parent.mkdir(parents=True)
    own.touch()
    assert socket_path(environ=environ) == own


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 33, "é"])
def test_a_name_that_cannot_be_a_folder(name):
    with pytest.raises(UsageError, match="--instance"):
        socket_path(instance=name, environ={})


def test_socket_and_instance_exclude_each_other():
    with pytest.raises(UsageError, match="exclude"):
        socket_path("/x.sock", instance="red", environ={})


def test_a_path_too_long_for_a_socket():
    with pytest.raises(UsageError, match="takes 107"):
        socket_path("/" + "x" * 107, environ={})
    with pytest.raises(UsageError, match="PINGPONG_SOCKET"):
        socket_path(environ={"PINGPONG_SOCKET": "/" + "x" * 120})
    assert socket_path("/" + "x" * 101 + ".sock", environ={})
