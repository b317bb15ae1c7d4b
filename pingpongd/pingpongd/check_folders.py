"""The daemon's folders: whether it can have them, and nobody else; and how much room there is."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pingpong_bus.errors import ConfigError, StoreError
from pingpongd.check_finding import Finding, doubtful, failed, passed
from pingpongd.config import DaemonConfig
from pingpongd.last_words import log_folder

_TOO_LITTLE = 2**20
"""A new database and its log, generously."""
_LITTLE = 64 * 2**20
"""A few thousand long chains."""


@dataclass(frozen=True)
class Folder:
    """What is to be known of a folder, or of the nearest one above it that exists."""

    path: Path
    found: Path
    """`path` itself, or what is there of it."""
    uid: int
    mode: int
    read_only: bool
    """By its file system."""
    refused: str = ""
    """Why this process may not write it, or make it, in the kernel's words; unknown for another user's."""


def folder_findings(config: DaemonConfig, runtime: Path, state: Path, uid: int) -> Iterator[Finding]:
    """The folders of sockets, chains and last words.

    Args:
        config: names them, or does not.
        runtime: where the sockets are.
        state: where the chains are.
        uid: of the daemon.
    """
    for name in ("runtime_dir", "state_dir", "log_dir"):
        given = getattr(config, name)
        if given and not Path(given).is_absolute():
            text = f'"{given}" is another folder wherever the daemon is started; from here {Path(given).absolute()}.'
            yield doubtful(name, text, "Write the whole path.")
    yield judge_folder("runtime_dir", look_at(runtime, uid), uid)
    folder = look_at(state, uid)
    yield judge_folder("state_dir", folder, uid)
    room = os.statvfs(folder.found)
    if room.f_blocks:  # else the file system does not say
        free = room.f_bfree if uid == 0 else room.f_bavail
        yield judge_room(state, free * room.f_frsize)
    logs = log_folder(config.log_dir)
    if logs is not None:
        yield judge_folder("log_dir", look_at(logs.absolute(), uid), uid)


def look_at(path: Path, uid: int) -> Folder:
    """What there is of a folder, for the daemon of that user.

    Whether it could be made is tried, for some file systems refuse that to everybody: what is made is empty, has
    another name, and is gone again at once.
    """
    found = path
    while True:
        try:
            status = found.stat()
            break
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            found = found.parent
    refused = ""
    if uid == os.geteuid() and stat.S_ISDIR(status.st_mode):
        if found != path:
            refused = _try_to_make(found / f".pingpongd-check-{os.getpid()}")
        elif not os.access(path, os.W_OK | os.X_OK):
            refused = os.strerror(errno.EACCES)
    read_only = bool(os.statvfs(found).f_flag & os.ST_RDONLY)
    return Folder(path, found, status.st_uid, status.st_mode, read_only, refused)


def judge_folder(name: str, folder: Folder, uid: int) -> Finding:
    """Whether the daemon of that user can use a folder, and nobody else can, save one for last words."""
    path, private = folder.path, name != "log_dir"
    hint = f"Set {name} to a folder of the daemon's user, or let the service make it."

    def wrong(text: str, hint: str = hint) -> Finding:
        return failed(name, ConfigError(text, field=name, hint=hint))

    if not stat.S_ISDIR(folder.mode):
        return wrong(f"{folder.found} is not a folder.")
    if folder.read_only:
        return wrong(f"{folder.found} is on a read-only file system.", "Make it writable, or choose another folder.")
    if folder.found != path:
        if uid not in (0, folder.uid) and not folder.mode & stat.S_IWOTH and _made_by_systemd(path):
            return passed(name, f"{path} is made by systemd at the start")
        if folder.refused:
            return wrong(f"{path} does not exist, and cannot be made in {folder.found}: {folder.refused}.")
        if uid not in (0, folder.uid) and not folder.mode & stat.S_IWOTH:
            return wrong(f"{path} does not exist, and uid {uid} may not make it in {folder.found}.")
        return passed(name, f"{path} is made at the start")
    if private and folder.uid != uid:
        text = f"{path} belongs to uid {folder.uid}, the daemon is uid {uid}."
        return wrong(text, f"chown it to uid {uid}, or choose another folder.")
    if folder.refused:
        return wrong(f"{path} cannot be written: {folder.refused}.")
    if private and folder.mode & (stat.S_IRWXO | (stat.S_IRWXG if name == "state_dir" else 0)):
        return doubtful(
            name, f"{path} is open to others (mode {stat.S_IMODE(folder.mode):04o}).", f"chmod 0700 {path}."
        )
    return passed(name, f"{path}, mode {stat.S_IMODE(folder.mode):04o}")


def judge_room(state: Path, free: int) -> Finding:
    """Room for chains, in bytes."""
    text = f"{free / 2**20:,.0f} MiB free for {state}"
    if free < _TOO_LITTLE:
        return failed("disk", StoreError(f"the disk is full: {text}.", hint="Free some space."))
    if free < _LITTLE:
        return doubtful("disk", f"{text}.", "Free some space: on a full disk no chain is accepted.")
    return passed("disk", text)


def _try_to_make(probe: Path) -> str:
    """Make a folder and remove it; returns why it could not be made, or nothing."""
    try:
        probe.mkdir(mode=0o700)
    except OSError as error:
        return "" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    with suppress(OSError):
        probe.rmdir()
    return ""


def _made_by_systemd(path: Path) -> bool:
    """Whether it is one of the folders that the system's unit makes."""
    return path.parent in (Path("/run"), Path("/var/lib"), Path("/var/log")) and path.name.startswith("pingpongd")
