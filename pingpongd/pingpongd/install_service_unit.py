"""From the unit files that are shipped to those of one installation: pure text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pingpong_bus.errors import ConfigError

MARK = (
    "# Written by `pingpongd install-service`, which overwrites it; changes belong into a drop-in: `systemctl edit`.\n"
)
"""First line of the units that we write, so that we overwrite and remove no other."""

_STOP_SECONDS = 60
"""For engines to end, after drain_seconds."""
_FETCH_SECONDS = 300
"""For the first signs of life, before start_seconds; the daemon asks for more while a model is fetched."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """What tells one installation's unit from another's."""

    instance: str
    command: Sequence[str]
    """Program, by its absolute path, and arguments."""
    start_seconds: float
    drain_seconds: float
    user: bool = False
    """A unit of a user's own manager."""
    client_group: str | None = None
    reads_homes: bool = False
    """Something that the daemon reads is in a home."""
    fetches: bool = False
    """The model comes over the network."""
    talks_beyond: bool = False
    """Other hosts ask for metrics, or are sent spans."""
    writable: Sequence[str] = field(default=())
    """Folders, outside of those that the unit makes, that the configuration has the daemon write to."""
    confined: bool = True
    """Of a user's unit: the kernel lets users make namespaces."""

    @property
    def unit(self) -> str:
        """The unit's name."""
        return unit_name(self.instance)


def unit_name(instance: str) -> str:
    """The unit of an instance."""
    return "pingpongd.service" if instance == "default" else f"pingpongd@{instance}.service"


def folder_name(instance: str) -> str:
    """The instance's folder in /run, /var/lib and the like."""
    return "pingpongd" if instance == "default" else f"pingpongd-{instance}"


def render_unit(text: str, service: Service) -> str:
    """The text of a service's unit.

    Args:
        text: `pingpongd.service`, the system's or the user's, as it is shipped.
        service: what to fill in.

    Raises:
        ConfigError: the shipped text lacks a setting.
    """
    settings = {
        "ExecStart": " ".join(quote(word.replace("$", "$$")) for word in service.command),
        "TimeoutStartSec": f"{service.start_seconds + _FETCH_SECONDS:.0f}",
        "TimeoutStopSec": f"{service.drain_seconds + _STOP_SECONDS:.0f}",
        "RuntimeDirectory": folder_name(service.instance),
    }
    if not service.user:
        settings["StateDirectory"] = settings["LogsDirectory"] = folder_name(service.instance)
        if service.client_group:
            settings["SupplementaryGroups"] = service.client_group
        if service.reads_homes:
            settings["ProtectHome"] = "read-only"
        if service.fetches or service.talks_beyond:
            settings["IPAddressAllow"] = "any"
    if service.instance != "default":
        settings["Description"] = f"pingpongd ({service.instance}), read-ahead for chains of LLM agents"
    if not service.confined:
        text = _without_namespaces(text)
    for key, value in settings.items():
        text = _with_setting(text, key, value)
    if service.writable and "\nProtectSystem=" in text:
        paths = " ".join(quote(f"-{path}") for path in service.writable)
        text = text.replace("\nProtectSystem=", f"\nReadWritePaths={paths}\nProtectSystem=", 1)
    return MARK + text


def quote(word: str) -> str:
    """A word of a list as systemd reads it back; systemd.syntax(7). Command lines want each $ doubled before."""
    escaped = word.replace("\\", "\\\\").replace("%", "%%").replace('"', '\\"')
    return f'"{escaped}"' if re.search(r"""[\s'"\\;]""", word) or not word else escaped


_NAMESPACES = re.compile(r"# BEGIN namespaces\n.*?# END namespaces\n", re.DOTALL)


def _without_namespaces(text: str) -> str:
    """A user's unit for a machine whose kernel gives users no namespaces."""
    return _NAMESPACES.sub(
        "# Namespaces are not to be had by users of this machine: nothing is confined by them.\n", text
    )


def _with_setting(text: str, key: str, value: str) -> str:
    """The text with the one line of that key changed."""
    changed, count = re.subn(rf"^{key}=.*$", lambda _: f"{key}={value}", text, flags=re.MULTILINE)
    if count != 1:
        raise ConfigError(
            f"the shipped unit has {count} lines {key}=, not one.",
            hint="Install pingpongd again: its files were changed.",
        )
    return changed
