"""What installing and uninstalling consist of: places, and steps in their order. Nothing here is done, only planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pingpongd.install_service_unit import folder_name, unit_name

SERVICE_USER = "pingpongd"
CLIENT_GROUP = "pingpong"


@dataclass(frozen=True)
class Places:
    """Where a service's things are."""

    instance: str
    user: bool
    unit: Path
    config: Path
    folders: Mapping[str, Path]
    """What the daemon keeps, by what it is: state, logs, cache."""
    accounts: Path | None = None
    """The description of user and groups for systemd-sysusers; of the system's service only."""


@dataclass(frozen=True)
class WriteFile:
    """Write a file, with its folder."""

    path: Path
    text: str
    mode: int = 0o644
    group: str | None = None

    def __str__(self) -> str:
        return f"write {self.path}"


@dataclass(frozen=True)
class MakeFolder:
    """Make a folder where there is none."""

    path: Path
    mode: int = 0o700

    def __str__(self) -> str:
        return f"make the folder {self.path}"


@dataclass(frozen=True)
class Remove:
    """Remove a file, or a folder with what is in it; one that is not there is no error."""

    path: Path

    def __str__(self) -> str:
        return f"remove {self.path}"


@dataclass(frozen=True)
class Run:
    """Run a command."""

    command: Sequence[str]
    may_fail: bool = False
    """It fails where there is nothing to do."""

    def __str__(self) -> str:
        return f"run {' '.join(self.command)}"


Step = WriteFile | MakeFolder | Remove | Run


def system_places(instance: str, config: Path | None = None) -> Places:
    """The system's service."""
    name = folder_name(instance)
    return Places(
        instance,
        user=False,
        unit=Path("/etc/systemd/system") / unit_name(instance),
        config=config or Path("/etc/pingpongd") / ("config.toml" if instance == "default" else f"{instance}.toml"),
        folders={
            "state": Path("/var/lib") / name,
            "logs": Path("/var/log") / name,
            "cache": Path("/var/cache/pingpongd"),
        },
        accounts=Path("/etc/sysusers.d/pingpongd.conf"),
    )


def user_places(instance: str, home: Path, environ: Mapping[str, str], config: Path | None = None) -> Places:
    """The service of one user."""
    configs = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    return Places(
        instance,
        user=True,
        unit=configs / "systemd" / "user" / unit_name(instance),
        config=config or configs / "pingpongd" / ("config.toml" if instance == "default" else f"{instance}.toml"),
        folders={
            "state": Path(environ.get("XDG_STATE_HOME") or home / ".local" / "state") / folder_name(instance),
            "cache": Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "pingpongd",
        },
    )


def systemctl(places: Places, *words: str) -> tuple[str, ...]:
    """A call of systemctl, to the manager that the service belongs to."""
    return ("systemctl", *(("--user",) if places.user else ()), *words)


def plan_install(places: Places, unit: str, *, config: str | None, accounts: str) -> list[Step]:
    """The steps that install a service; done again they change nothing.

    Args:
        places: where.
        unit: the unit's text.
        config: of the configuration that is to be written; None: there is one.
        accounts: what systemd-sysusers is to make for the system's service.
    """
    steps: list[Step] = []
    if places.accounts is not None:
        steps += [WriteFile(places.accounts, accounts), Run(["systemd-sysusers", str(places.accounts)])]
    if config is not None:
        # It may come to hold secrets, in `environment`.
        group = None if places.user else SERVICE_USER
        steps.append(WriteFile(places.config, config, 0o600 if places.user else 0o640, group))
    if places.user:
        # A unit can open for writing what is there when it starts, and nothing else.
        steps += [MakeFolder(folder) for folder in places.folders.values()]
    steps += [WriteFile(places.unit, unit), Run(systemctl(places, "daemon-reload"))]
    return steps


def plan_uninstall(places: Places, *, purge: bool, last: bool) -> list[Step]:
    """The steps that remove a service.

    Args:
        places: where.
        purge: with its configuration, its chains, logs and, if it is the last one, everything that is shared.
        last: no other instance is installed there.
    """
    steps: list[Step] = [
        Run(systemctl(places, "disable", "--now", places.unit.name)),
        Remove(places.unit),
        Run(systemctl(places, "daemon-reload")),
        Run(systemctl(places, "reset-failed", places.unit.name), may_fail=True),
    ]
    if not purge:
        return steps
    steps += [Remove(places.config)]
    steps += [Remove(folder) for what, folder in places.folders.items() if what != "cache" or last]
    if last and places.accounts is not None:
        steps += [
            Remove(places.accounts),
            Run(["userdel", SERVICE_USER], may_fail=True),
            Run(["groupdel", CLIENT_GROUP], may_fail=True),
        ]
    return steps
