"""Where the daemon's control socket is.

``--socket``, else ``PINGPONG_SOCKET``, else ``$XDG_RUNTIME_DIR/pingpongd/``, else ``/run/pingpongd/``. A path is the
socket itself or the folder that holds it. An instance NAME has the folder ``pingpongd-NAME``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pingpong_bus.errors import DaemonUnavailable, UsageError

SOCKET_NAME = "control.sock"
SYSTEM_RUNTIME = Path("/run")
MAX_PATH_BYTES = 107
"""What fits into a sockaddr_un with its closing zero byte; unix(7)."""

_INSTANCE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}")


def socket_path(
    socket: str | os.PathLike[str] | None = None,
    *,
    instance: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """The control socket that a client is to use; it need not exist.

    Without a name, the user's own daemon comes first; the system's is taken if only that one is there.

    Raises:
        UsageError: both a socket and an instance are given, or one of them cannot be right.
        DaemonUnavailable: the folder is closed to this user.
    """
    if socket is not None and instance is not None:
        raise UsageError("--socket and --instance exclude each other.", hint="Give one of them.")
    if socket is not None:
        return _checked(_in_folder(Path(socket)), "--socket")
    if instance is None and (named := environ.get("PINGPONG_SOCKET")):
        return _checked(_in_folder(Path(named)), "PINGPONG_SOCKET")
    candidates = [folder / SOCKET_NAME for folder in instance_folders(instance, environ=environ)]
    found = next((path for path in candidates if _exists(path)), candidates[0])
    return _checked(found, "XDG_RUNTIME_DIR")


def instance_folders(instance: str | None = None, *, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Folders in which an instance's sockets may be: the user's first, then the system's.

    Raises:
        UsageError: the name cannot be part of a folder's name.
    """
    if instance is not None and not _INSTANCE.fullmatch(instance):
        raise UsageError(
            f"{instance!r} cannot name an instance.",
            field="--instance",
            hint="Use letters, digits, _, . and -, at most 32 of them.",
        )
    folder = "pingpongd" if instance in (None, "default") else f"pingpongd-{instance}"
    runtime = environ.get("XDG_RUNTIME_DIR")
    roots = [Path(runtime), SYSTEM_RUNTIME] if runtime else [SYSTEM_RUNTIME]
    return [root / folder for root in roots]


def _in_folder(path: Path) -> Path:
    """A path that is a folder, or does not look like a socket file, holds the socket."""
    if (_exists(path) and path.is_dir()) or (not _exists(path) and path.suffix != ".sock"):
        return path / SOCKET_NAME
    return path


def _exists(path: Path) -> bool:
    """Whether something is there.

    Raises:
        DaemonUnavailable: this user may not look.
    """
    try:
        return path.exists()
    except PermissionError:
        raise DaemonUnavailable(
            f"the daemon in {path.parent} is closed to this user.",
            hint="Become a member of the group that may use it (usermod -aG pingpong YOU), and log in again.",
        ) from None


def _checked(path: Path, source: str) -> Path:
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise UsageError(
            f"the socket's path is {length} bytes long, the system takes {MAX_PATH_BYTES}.",
            field=source,
            hint="Use a shorter folder.",
        )
    return path
