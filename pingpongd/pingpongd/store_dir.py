"""The state directory: where it is, its modes, and the lock that keeps a second daemon out of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Literal

from pingpong_bus.errors import ConfigError, StoreError


def default_state_dir(instance: str) -> Path:
    """Where an instance's chains are kept.

    systemd's $STATE_DIRECTORY (the first, where there are several), else the instance's folder in $XDG_STATE_HOME or
    ~/.local/state.

    Raises:
        ConfigError: this user has no home.
    """
    of_service = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if of_service:
        return Path(of_service)
    base = os.environ.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):  # the XDG specification: relative paths are to be ignored
        try:
            base = str(Path.home() / ".local" / "state")
        except RuntimeError:
            raise ConfigError(
                "this user has no home to keep chains in.", field="state_dir", hint="Set state_dir to a folder."
            ) from None
    return Path(base) / ("pingpongd" if instance == "default" else f"pingpongd-{instance}")


class StateDir:
    """The folder, made and locked; `close` lets go of it.

    The lock's file stays: were it removed, two daemons could each hold a lock of that name.

    Raises:
        ConfigError: another daemon holds it, or it cannot be made or written.
        StoreError: the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / "chains.db"
        self.found: Literal["none", "empty", "some"] = "none"
        """What there was of the database."""
        self._lock: int | None = None
        self._files: dict[Path, tuple[int, int]] = {}
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(path, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
            if self.database.exists():
                self.found = "some" if self.database.stat().st_size else "empty"
            # SQLite makes its files with the umask's mode, and its -wal with that of the database.
            os.close(os.open(self.database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"another daemon keeps its chains in {path} (pid {_owner(path / 'lock')}).",
                field="state_dir",
                hint="Stop it, or give this one another state_dir.",
            ) from None
        except OSError as error:
            os.close(lock)
            raise _unusable(path, error) from None
        self._lock = lock

    def note_files(self) -> None:
        """Remember which files the open database has: it goes on with them whatever becomes of their names."""
        for path in (self.database, self.log):
            with contextlib.suppress(FileNotFoundError):
                self._files[path] = _identity(path)

    def forget_files(self) -> None:
        """Expect them no longer: SQLite removes its log at the end."""
        self._files.clear()

    def missing(self) -> Path | None:
        """One of those files that is no longer at its place: the next start would not find what is in it."""
        for path, noted in self._files.items():
            try:
                if _identity(path) != noted:
                    return path
            except OSError:
                return path
        return None

    @property
    def log(self) -> Path:
        """What has been written and is not in the database's file yet."""
        return self.database.with_name(f"{self.database.name}-wal")

    def close(self) -> None:
        """Let another daemon have it; a second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _unusable(path: Path, error: OSError) -> ConfigError | StoreError:
    if error.errno == errno.EROFS:
        return ConfigError(
            f"the state directory {path} is on a read-only file system.",
            field="state_dir",
            hint="Make it writable, or set state_dir to a folder that is; what is in it was not changed.",
        )
    if error.errno == errno.EISDIR:
        return ConfigError(
            f"{path / 'chains.db'} is a folder.", field="state_dir", hint="Move it away, or set state_dir to another."
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"there is no space left for the state directory {path}.", hint="Free some, then start again."
        )
    return ConfigError(
        f"the state directory {path} cannot be made or written: {error.strerror}.",
        field="state_dir",
        hint="Set state_dir to a folder that this user may write.",
    )


def _owner(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip() or "unknown"
    except OSError:
        return "unknown"
