"""What a daemon has in its runtime directory and in /dev/shm: clearing it, and the lock that says whose it is.

Standard library only, for the sweeper is to stay small.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

from pingpong_worker.shared_memory_names import instance_prefix, unlink_segments


def clear_folder(path: Path) -> None:
    """Remove what the holder of the lock, or a daemon that was killed here, left; nobody else may."""
    for entry in path.iterdir():
        if is_socket(entry):
            entry.unlink(missing_ok=True)
    shutil.rmtree(path / "tmp", ignore_errors=True)
    unlink_segments(instance_prefix(path))


def clear_abandoned(path: Path) -> bool:
    """Clear the folder of a daemon that was killed, its lock too.

    Returns:
        False where the folder is gone, or another daemon has it by now: then what is in it is that one's.
    """
    try:
        lock = take_lock(path / "lock")
    except (BlockingIOError, FileNotFoundError):
        return False
    try:
        clear_folder(path)
        (path / "lock").unlink(missing_ok=True)
    finally:
        os.close(lock)
    return True


def is_socket(path: Path) -> bool:
    """Whether it is a socket by a name of ours, or was: a sweeper may be removing it."""
    if path.name not in ("control.sock", "workers.sock", "steps.sock") and not (
        path.name.startswith("bus-") and path.suffix == ".sock"
    ):
        return False
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def take_lock(path: Path, *, wait_s: float = 0.0) -> int:
    """Open and lock a file that a daemon which is just ending may be removing.

    Returns:
        A descriptor, which holds the lock until it is closed.

    Raises:
        BlockingIOError: somebody has held it for `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
            continue
        except OSError:
            os.close(descriptor)
            raise
        try:
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # locked, but removed in the meantime: another daemon may hold the new one
