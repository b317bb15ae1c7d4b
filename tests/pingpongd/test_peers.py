"""Who is at the other end, and who may come in."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from pingpong_bus.errors import ConfigError
from pingpong_bus.private_socket import bind_private
from pingpongd.peers import Doorkeeper, Peer, group_id, groups_of, peer_of

STRANGER = 54_321
"""A uid without a passwd entry."""


def test_the_kernel_says_who_sent_a_frame() -> None:
    with tempfile.TemporaryDirectory(prefix="pp-") as folder, zmq.Context() as context:
        endpoint = f"ipc://{folder}/s"
        with context.socket(zmq.ROUTER) as router:
            bind_private(router, endpoint)
            assert Path(folder, "s").stat().st_mode & 0o777 == 0o600
            script = f"import zmq; s = zmq.Context().socket(zmq.DEALER); s.connect({endpoint!r}); s.send(b'')"
            child = subprocess.Popen([sys.executable, "-c", script])
            assert router.poll(60_000)
            frames = router.recv_multipart(copy=False)
            assert child.wait(60) == 0
    assert peer_of(frames[-1]) == Peer(os.getuid(), os.getgid(), child.pid)


def test_a_frame_of_no_socket_is_from_nobody() -> None:
    assert peer_of(zmq.Frame(b"x")) is None


def test_another_user_is_turned_away_by_the_socket_itself() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory(prefix="pp-") as folder, zmq.Context() as context:
        Path(folder).chmod(0o755)
        with context.socket(zmq.ROUTER) as router:
            bind_private(router, f"ipc://{folder}/s")
            Path(folder, "s").chmod(0o666)  # as if somebody had opened it
            script = (
                f"import os, socket; os.setuid({STRANGER}); s = socket.socket(socket.AF_UNIX);"
                f" s.connect({folder + '/s'!r}); s.settimeout(30); s.recv(1) == b'' or exit(3)"
            )
            done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, check=False)
    assert done.returncode == 0 or b"ConnectionResetError" in done.stderr, done.stderr


def test_this_user_and_root_may_come_in() -> None:
    keeper = Doorkeeper()
    assert keeper.allowed(os.geteuid(), 12_345)
    assert keeper.allowed(0, 0)
    assert not keeper.allowed(STRANGER, STRANGER)


def test_a_uid_without_an_entry_counts_by_its_group() -> None:
    assert groups_of(STRANGER, 77) == {77}
    keeper = Doorkeeper(77)
    assert keeper.allowed(STRANGER, 77)
    assert not keeper.allowed(STRANGER, 78)


def test_a_user_counts_by_all_groups_and_the_answer_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    members = {77}

    def getgrouplist(name: str, gid: int) -> list[int]:
        asked.append(name)
        return [gid, *members]

    user = pwd.struct_passwd(("ann", "x", STRANGER, 5, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(os, "getgrouplist", getgrouplist)
    now = 0.0
    keeper = Doorkeeper(77, clock=lambda: now)
    assert keeper.allowed(STRANGER, 5)
    members.clear()
    assert keeper.allowed(STRANGER, 5)
    assert asked == ["ann"]
    now = 11.0
    assert not keeper.allowed(STRANGER, 5)


def test_strangers_do_not_fill_the_memory_of_answers() -> None:
    keeper = Doorkeeper(77)
    for uid in range(STRANGER, STRANGER + 5000):
        assert not keeper.allowed(uid, 1)
    assert len(keeper._answers) <= 1000


def test_an_unknown_group_is_a_clear_refusal() -> None:
    with pytest.raises(ConfigError, match="client_group: there is no group"):
        group_id("no-such-group-here")
    known = grp.getgrgid(os.getgid())
    assert group_id(known.gr_name) == known.gr_gid
