"""Where the daemon keeps things; its database, whether it already runs, and its unit."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pingpong_bus.errors import ConfigError
from pingpongd.check_finding import Finding, doubtful, failed, passed
from pingpongd.check_folders import folder_findings
from pingpongd.config import DaemonConfig
from pingpongd.install_service_plan import SERVICE_USER, system_places
from pingpongd.install_service_unit import folder_name, unit_name
from pingpongd.runtime_dir import default_runtime_dir
from pingpongd.store_dir import default_state_dir
from pingpongd.store_schema import MIGRATIONS, check_database, opening_error

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
    yield from folder_findings(config, where.runtime, where.state, where.uid)
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
        if not path.exists():
            return passed("store", "no chains are kept yet")
        if path.is_dir():
            error = ConfigError(
                f"{path} is a folder.", field="state_dir", hint="Move it away, or set another state_dir."
            )
            return failed("store", error)
        version = check_database(path, known)
        if version is None:
            return doubtful("store", f"{path} has 0 bytes: chains that it held are lost.", "It is taken for a new one.")
        chains = _count_chains(path) if version else 0
    except ConfigError as problem:
        return failed("store", problem)
    except (OSError, sqlite3.Error) as problem:
        return _unreadable(path, problem)
    return passed("store", f"{path}: schema {version}, whole, {chains} chains")


def _count_chains(path: Path) -> int:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2)
    try:
        (chains,) = connection.execute("SELECT count(*) FROM chain").fetchone()
    finally:
        connection.close()
    return int(chains)


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


def _unreadable(path: Path, error: OSError | sqlite3.Error) -> Finding:
    found = opening_error(error, path) if isinstance(error, sqlite3.Error) else None
    if isinstance(found, ConfigError):
        return failed("store", found)
    return doubtful("store", f"{path} cannot be read: {error}.", "Look at its permissions, and at who has it open.")


def _uid(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return -1
