"""The daemon's folder of sockets, and the lock that keeps a second daemon out of it.

The folder is its owner's alone. Where a group of clients is configured, the folder is opened to it once the control
socket is bound and has its mode, so that nobody gets in before; every other socket stays its owner's.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

from pingpong_bus.errors import ConfigError
from pingpong_worker.shared_memory_names import instance_prefix
from pingpongd.leftovers import clear_folder, is_socket, take_lock
from pingpongd.peers import group_id

_SOCKET_PATH_LIMIT = 107  # sockaddr_un.sun_path, less the final NUL
_LONGEST_NAME = len("/bus-") + 32 + len(".sock")
_SWEEP_SECONDS = 0.5
"""How long a sweeper may hold the lock; see `pingpongd.leftovers`."""


def default_runtime_dir(instance: str) -> Path:
    """Where an instance's sockets are: in systemd's $RUNTIME_DIRECTORY, else in $XDG_RUNTIME_DIR, else in /run."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    name = "pingpongd" if instance == "default" else f"pingpongd-{instance}"
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/run") / name


class RuntimeDir:
    """A locked runtime directory; a context manager that empties it when it leaves, and with an error removes it
    where it was made for this.

    Args:
        path: where it is, or is made.
        instance: the daemon's name, for advice.
        client_group: name of the group whose members may use the control socket.

    Attributes:
        client_group: id of that group, or None.

    Raises:
        ConfigError: another daemon holds it, or it cannot be used; or there is no such group.
    """

    def __init__(self, path: Path, instance: str, client_group: str | None = None) -> None:
        self.path = path
        self.client_group = None if client_group is None else group_id(client_group)
        if len(os.fsencode(path)) + _LONGEST_NAME > _SOCKET_PATH_LIMIT:
            raise ConfigError(
                f"the path {path} is too long for sockets, which end at {_SOCKET_PATH_LIMIT} bytes.",
                field="runtime_dir",
                hint="Choose a shorter one.",
            )
        self._made: list[Path] = []
        try:
            self._lock = self._take(instance)
        except ConfigError:
            self._unmake()
            raise

    def _take(self, instance: str) -> int:
        """Make the folder and take its lock; returns the lock's descriptor."""
        path = self.path
        try:
            self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_ours(path)
            lock = take_lock(path / "lock", wait_s=_SWEEP_SECONDS)
        except BlockingIOError:
            by_name = path == default_runtime_dir(instance)
            raise ConfigError(
                f"a daemon already runs in {path} (pid {_owner(path / 'lock')}).",
                field="instance" if by_name else "runtime_dir",
                hint=f"Stop it, or give this one another {'--instance name' if by_name else '--runtime-dir'}.",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the runtime directory {path} cannot be used: {error.strerror}.",
                field="runtime_dir",
                hint="Set runtime_dir to a folder of yours, or set XDG_RUNTIME_DIR.",
            ) from None
        try:
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
            path.chmod(0o700)  # an earlier daemon, or a service manager, may have opened it to others
            clear_folder(path)
            self.temporary.mkdir(mode=0o700)
        except OSError as error:
            (path / "lock").unlink(missing_ok=True)
            os.close(lock)
            raise ConfigError(
                f"the runtime directory {path} cannot be written: {error.strerror}.", field="runtime_dir"
            ) from None
        return lock

    def _unmake(self) -> None:
        """A start was refused: remove the folders that it has made, where nobody else uses them by now."""
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    @property
    def control(self) -> str:
        """Endpoint that clients talk to."""
        return f"ipc://{self.path}/control.sock"

    @property
    def workers(self) -> str:
        """Endpoint that workers talk to."""
        return f"ipc://{self.path}/workers.sock"

    @property
    def steps_bell(self) -> str:
        """Endpoint of the supervisor's own doorbells, for what steps between agents write."""
        return f"ipc://{self.path}/steps.sock"

    def bell(self, worker: str) -> str:
        """Endpoint of a worker's doorbells."""
        return f"ipc://{self.path}/bus-{worker}.sock"

    def open_to_clients(self) -> None:
        """Let the members of the client group use the control socket, which is bound by now.

        Raises:
            ConfigError: this user may not give files to the group.
        """
        if self.client_group is None:
            return
        socket = self.path / "control.sock"
        try:
            # From the inside out: until the folder's mode is changed, nobody comes as far as the socket.
            os.chown(socket, -1, self.client_group)
            socket.chmod(0o660)
            os.chown(self.path, -1, self.client_group)
            self.path.chmod(0o750)
        except OSError as error:
            raise ConfigError(
                f"the control socket cannot be given to the group: {error.strerror}.",
                field="client_group",
                hint="Run the daemon as a member of the group, or as root.",
            ) from None

    @property
    def temporary(self) -> Path:
        """Temporary files of the workers and their engines; removed with the daemon."""
        return self.path / "tmp"

    @property
    def segment_prefix(self) -> str:
        """Prefix of the names that the workers and their engines have in /dev/shm; they are removed with the daemon."""
        return instance_prefix(self.path)

    def __enter__(self) -> RuntimeDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clear_folder(self.path)
        (self.path / "lock").unlink(missing_ok=True)
        os.close(self._lock)
        if error is not None:
            self._unmake()


def _check_ours(path: Path) -> None:
    """Refuse a folder that others use: what we find in it we would clear away.

    Raises:
        ConfigError: it is another user's, or there is something in it that no daemon of ours has left.
    """
    if path.stat().st_uid != os.geteuid():
        raise ConfigError(
            f"the runtime directory {path} belongs to another user, who could take the sockets' place.",
            field="runtime_dir",
            hint="Choose a folder of the daemon's user.",
        )
    names = {entry.name for entry in path.iterdir()}
    foreign = {name for name in names if name not in ("lock", "tmp") and not is_socket(path / name)}
    if "lock" not in names:
        foreign = names
    if foreign:
        raise ConfigError(
            f"the runtime directory {path} holds {sorted(foreign)[0]}, which is not pingpongd's.",
            field="runtime_dir",
            hint="Choose a folder that is for pingpongd alone.",
        )


def _owner(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip() or "unknown"
    except OSError:
        return "unknown"
