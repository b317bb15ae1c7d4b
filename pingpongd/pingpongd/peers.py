"""Who is at the other end of a unix socket, and who may use the daemon.

The kernel says who: it keeps the credentials of the process that connected, and ZeroMQ hands them on with each frame.
"""

from __future__ import annotations

import grp
import os
import pwd
import time
from collections.abc import Callable
from typing import NamedTuple

import zmq

from pingpong_bus.errors import ConfigError

_REMEMBER_SECONDS = 10.0
"""How long an answer is kept: a user's groups may come from a directory server."""
_REMEMBER_USERS = 1000


class Peer(NamedTuple):
    """Credentials of a process at the time it connected, in our own namespaces."""

    uid: int
    gid: int
    pid: int


def peer_of(frame: zmq.Frame) -> Peer | None:
    """Who sent a frame that was received with ``copy=False`` from an ipc socket; None where that is not known.

    It is not of peers that speak an old version of ZeroMQ's protocol, such as whoever writes arbitrary bytes.
    """
    try:
        address = frame.get("Peer-Address")
    except zmq.ZMQError:
        return None
    # "localhost:UID:GID:PID"
    fields = str(address).rsplit(":", 3)[1:]
    if len(fields) != 3 or not all(field.isdecimal() for field in fields):
        return None
    return Peer(*map(int, fields))


def descriptor_of(frame: zmq.Frame) -> int | None:
    """Our descriptor of the connection that a frame came through; None where that is not known, see `peer_of`."""
    try:
        descriptor = int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None
    return descriptor if descriptor >= 0 else None


def group_id(name: str) -> int:
    """The id of the group that `client_group` names.

    Raises:
        ConfigError: there is none.
    """
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            f'there is no group "{name}".', field="client_group", hint=f"Make it with `groupadd --system {name}`."
        ) from None


class Doorkeeper:
    """Says who may use the control socket: this user, root, and the members of the configured group.

    Args:
        group: its id; None for nobody else.
        clock: seconds, only ever forward.
    """

    def __init__(self, group: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._clock = clock
        self._answers: dict[tuple[int, int], tuple[float, bool]] = {}

    def allowed(self, uid: int, gid: int) -> bool:
        """Whether a process of this user and primary group may come in."""
        if uid in (0, os.geteuid()):
            return True
        if self._group is None:
            return False
        now = self._clock()
        known = self._answers.get((uid, gid))
        if known is not None and now - known[0] < _REMEMBER_SECONDS:
            return known[1]
        if len(self._answers) >= _REMEMBER_USERS:
            self._answers.clear()
        answer = self._group in groups_of(uid, gid)
        self._answers[uid, gid] = (now, answer)
        return answer


def groups_of(uid: int, gid: int) -> set[int]:
    """The groups of a process: those of its user, and the one that it runs under."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return {gid}  # a user without an entry, such as a container's
    return {gid, *os.getgrouplist(user.pw_name, user.pw_gid)}
