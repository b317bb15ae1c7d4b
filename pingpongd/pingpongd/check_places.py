"""The daemon's folders, its database, whether it already runs, and its unit."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pingpong_bus.errors import ConfigError, PingpongError
from pingpongd.check_finding import Finding, doubtful, failed, passed
from pingpongd.config import DaemonConfig
from pingpongd.install_service_plan import SERVICE_USER, system_places
from pingpongd.install_service_unit import folder_name, unit_name
from pingpongd.runtime_dir import default_runtime_dir
from pingpongd.store_dir import default_state_dir
from pingpongd.store_schema import MIGRATIONS

_SOCKET_BYTES = 107
"""sockaddr_un.sun_path, less the final NUL; unix(7)."""
_LONGEST_SOCKET = len("/bus-") + 32 + len(".sock")
_UNIT_PROPERTIES = ("LoadState", "ActiveState", "SubState", "Result", "NRestarts", "NeedDaemonReload")


@dataclass(frozen=True)
class Where:
    """Where the daemon of a configuration keeps things, and as whom it runs."""

    runtime: Path
    state: Path
    cache: Path
    uid: int


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


def find_places(config: DaemonConfig, environ: Mapping[str, str]) -> Where:
    """The places of a daemon with this configuration.

    Root, asking about an installed service, gets the service's: those that its unit makes.
    """
    places = system_places(config.instance)
    if os.geteuid() == 0 and places.unit.exists() and "STATE_DIRECTORY" not in environ:
        runtime, state, cache = (
            Path("/run") / folder_name(config.instance),
            places.folders["state"],
            places.folders["cache"],
        )
        uid = _uid(SERVICE_USER)
    else:
        runtime, state = default_runtime_dir(config.instance), default_state_dir(config.instance)
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        uid = os.geteuid()
    return Where(
        Path(config.runtime_dir).absolute() if config.runtime_dir else runtime,
        Path(config.state_dir).absolute() if config.state_dir else state,
        cache,
        uid,
    )


def place_findings(config: DaemonConfig, where: Where) -> Iterator[Finding]:
    """Folders, group, database, and a daemon that runs there."""
    if len(os.fsencode(where.runtime)) + _LONGEST_SOCKET > _SOCKET_BYTES:
        text = f"the path {where.runtime} is too long for sockets, which end at {_SOCKET_BYTES} bytes."
        yield failed("runtime_dir", ConfigError(text, field="runtime_dir", hint="Choose a shorter one."))
    else:
        yield judge_folder("runtime_dir", look_at(where.runtime), where.uid)
    yield judge_folder("state_dir", look_at(where.state), where.uid)
    if config.client_group is not None:
        yield judge_group(config.client_group, {group.gr_name: group.gr_mem for group in grp.getgrall()})
    holder = lock_holder(where.runtime / "lock", Path("/proc/locks"))
    yield judge_running(config.instance, holder)
    yield database_finding(where.state / "chains.db", len(MIGRATIONS), running=holder is not None)


def unit_findings(instance: str) -> Iterator[Finding]:
    """The service's unit; nothing to say where no systemd runs."""
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return
    unit = unit_name(instance)
    command = ["systemctl", "show", unit, *(f"--property={name}" for name in _UNIT_PROPERTIES)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode == 0:
        yield judge_unit(unit, dict(line.partition("=")[::2] for line in done.stdout.splitlines()))


def look_at(path: Path) -> Folder:
    """What there is of a folder."""
    found = path
    while True:
        try:
            status = found.stat()
            break
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            found = found.parent
    read_only = bool(os.statvfs(found).f_flag & os.ST_RDONLY)
    return Folder(path, found, status.st_uid, status.st_mode, read_only)


def judge_folder(name: str, folder: Folder, uid: int) -> Finding:
    """Whether the daemon of that user can use a folder, and nobody else can."""
    path = folder.path
    hint = f"Set {name} to a folder of the daemon's user, or let the service make it."
    if not stat.S_ISDIR(folder.mode):
        return failed(name, ConfigError(f"{folder.found} is not a folder.", field=name, hint=hint))
    if folder.read_only:
        text = f"{folder.found} is on a read-only file system."
        return failed(name, ConfigError(text, field=name, hint="Make it writable, or choose another folder."))
    if folder.found != path:
        if uid not in (0, folder.uid) and not folder.mode & stat.S_IWOTH:
            if _made_by_systemd(path):
                return passed(name, f"{path} is made by systemd at the start")
            text = f"{path} does not exist, and uid {uid} may not make it in {folder.found}."
            return failed(name, ConfigError(text, field=name, hint=hint))
        return passed(name, f"{path} is made at the start")
    if folder.uid != uid:
        text = f"{path} belongs to uid {folder.uid}, the daemon is uid {uid}."
        return failed(name, ConfigError(text, field=name, hint=f"chown it to uid {uid}, or choose another folder."))
    if folder.mode & stat.S_IRWXO or (name == "state_dir" and folder.mode & stat.S_IRWXG):
        return doubtful(
            name, f"{path} is open to others (mode {stat.S_IMODE(folder.mode):04o}).", f"chmod 0700 {path}."
        )
    return passed(name, f"{path}, mode {stat.S_IMODE(folder.mode):04o}")


def judge_group(name: str, groups: Mapping[str, Sequence[str]]) -> Finding:
    """The clients' group, by the members that each group lists."""
    if name not in groups:
        error = ConfigError(
            f"there is no group {name}.",
            field="client_group",
            hint=f"groupadd --system {name}, or install-service does it.",
        )
        return failed("client_group", error)
    clients = [member for member in groups[name] if member != SERVICE_USER]
    if not clients:
        return doubtful("client_group", f"{name} has no members yet.", f"usermod -aG {name} YOU, then log in again.")
    return passed("client_group", f"{name}: {', '.join(clients)}")


def lock_holder(path: Path, locks: Path) -> int | None:
    """The process that holds a lock on a file, by the kernel's list; None: nobody.

    Trying the lock would do, too, and keep a daemon out that starts in that moment.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in locks.read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5] == device:
            return int(fields[4])
    return None


def judge_running(instance: str, holder: int | None) -> Finding:
    """Whether a daemon has the runtime directory."""
    if holder is None:
        return passed("running", f"instance {instance} does not run")
    return passed("running", f"instance {instance} runs, pid {holder}; a second one would be refused")


def database_finding(path: Path, known: int, *, running: bool) -> Finding:
    """The chain store's file, opened for reading only.

    Args:
        path: of the database.
        known: the newest schema that this version knows.
        running: a daemon has it open, and locked for itself.
    """
    if running:
        return passed("store", f"{path} is in the hands of the running daemon")
    try:
        if not path.exists() or path.stat().st_size == 0:
            return passed("store", "no chains are kept yet")
        with_lock = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2)
    except (OSError, sqlite3.Error) as error:
        return _unreadable(path, error)
    try:
        (version,) = with_lock.execute("PRAGMA user_version").fetchone()
        if version > known:
            text = f"{path} was made by a newer pingpongd (schema {version}, this one knows {known})."
            return failed(
                "store", ConfigError(text, field="state_dir", hint="Start that version, or another state_dir.")
            )
        problems = [str(row[0]) for row in with_lock.execute("PRAGMA quick_check(3)")]
        if problems != ["ok"]:
            return _damaged(path, problems[0])
        (chains,) = with_lock.execute("SELECT count(*) FROM chain").fetchone() if version else (0,)
    except sqlite3.DatabaseError as error:
        return _unreadable(path, error)
    finally:
        with_lock.close()
    return passed("store", f"{path}: schema {version}, whole, {chains} chains")


def judge_unit(unit: str, shown: Mapping[str, str]) -> Finding:
    """The service, by what `systemctl show` says of it."""
    if shown.get("LoadState") != "loaded":
        return passed("service", "not installed; `pingpongd install-service` does it")
    active = f"{shown.get('ActiveState')} ({shown.get('SubState')})"
    if shown.get("NeedDaemonReload") == "yes":
        return doubtful("service", f"{unit} was changed and is not loaded so.", "systemctl daemon-reload.")
    if shown.get("ActiveState") == "failed":
        return doubtful(
            "service",
            f"{unit} has failed: {shown.get('Result')}.",
            f"journalctl -u {unit} -p warning says why; then systemctl reset-failed {unit} and start it.",
        )
    if int(shown.get("NRestarts") or 0) > 0:
        return doubtful(
            "service",
            f"{unit} is {active}, after {shown['NRestarts']} restarts.",
            f"journalctl -u {unit} -p warning says why.",
        )
    return passed("service", f"{unit} is {active}")


def _made_by_systemd(path: Path) -> bool:
    """Whether it is one of the folders that the system's unit makes."""
    return path.parent in (Path("/run"), Path("/var/lib")) and path.name.startswith("pingpongd")


def _unreadable(path: Path, error: Exception) -> Finding:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damaged(path, str(error))
    return doubtful("store", f"{path} cannot be read: {error}.", "Look at its permissions, and at who has it open.")


def _damaged(path: Path, problem: str) -> Finding:
    error: PingpongError = ConfigError(
        f"{path} is damaged: {problem}.",
        field="state_dir",
        hint=f"Save what can be saved with `sqlite3 {path} .recover`, and move the file away.",
    )
    return failed("store", error)


def _uid(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return -1
