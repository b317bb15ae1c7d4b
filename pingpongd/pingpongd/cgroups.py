"""What a process's control groups say: pressure (PSI), and how long a CPU quota held it up.

Versions 1 and 2, and both at once; in containers the mounts begin at the container's own group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from pingpongd.pace import Pace
from pingpongd.proc_files import parse_counts, parse_pressure, read_file

_US: Final = 1e-6
_NS: Final = 1e-9
_STAT_SHARE: Final = 0.0003
"""Of a core: cgroup v2 adds up its children's counts when `cpu.stat` is read, which takes long where there are many."""
_STAT_S: Final = 0.4
"""Between two looks at one folder, which may stand above the groups of several workers."""
_RESOURCES: Final = ("cpu", "memory", "io")


class Pressure(msgspec.Struct, frozen=True):
    """Parts of the time since the look before, 0 to 1; None where the kernel does not say."""

    cpu: float | None = None
    memory: float | None = None
    io: float | None = None
    throttled: float | None = None
    """An upper bound: the least of the part of the quota's periods in which it was used up, and of the time that all
    cores together were held up."""


class _Mount(msgspec.Struct, frozen=True):
    point: str
    root: str
    """What of the hierarchy is mounted there."""
    controllers: frozenset[str]
    """Empty for version 2."""


class _Totals(msgspec.Struct, frozen=True):
    at_s: float
    pressure: dict[str, int]
    """Microseconds by resource."""


class _Quota(msgspec.Struct, frozen=True):
    at_s: float
    periods: int
    used_up: int
    held_up_s: float


class CgroupProbe:
    """Looks at each group of processes once a look, however many workers are in it."""

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._mounts = parse_mounts((read_file(f"{proc}/self/mountinfo") or b"").decode())
        self._folders: dict[str, tuple[list[str], list[str]]] = {}
        """By what /proc/PID/cgroup says: the folders for pressure and those for quotas, the narrowest first."""
        self._totals: dict[str, _Totals] = {}
        self._quotas: dict[str, _Quota] = {}
        self._throttled: dict[str, float] = {}
        self._paces: dict[str, Pace] = {}
        self._seen: dict[str, Pressure] = {}
        """In this look."""

    def begin(self) -> None:
        """A new look."""
        self._seen.clear()

    def look(self, pid: int) -> Pressure:
        """What is known of the groups that a process is in; parts of the time since the look before."""
        membership = (read_file(f"{self._proc}/{pid}/cgroup") or b"").decode()
        if membership not in self._seen:
            if membership not in self._folders:
                self._folders[membership] = self._find(membership)
            pressure, quota = self._folders[membership]
            self._seen[membership] = self._pressure(membership, pressure, self._quota(quota))
        return self._seen[membership]

    def _find(self, membership: str) -> tuple[list[str], list[str]]:
        unified = [mount for mount in self._mounts if not mount.controllers]
        cpu = [mount for mount in self._mounts if "cpu" in mount.controllers]
        ours = parse_membership(membership)
        pressure = [folder for mount in unified for folder in _upwards(mount, ours.get("", "/"))]
        # Where the cpu controller is one of version 1, the unified hierarchy has no quotas.
        quota = [folder for mount in cpu for folder in _upwards(mount, ours.get("cpu", "/"))] or pressure
        return [*pressure, f"{self._proc}/pressure"], quota

    def _pressure(self, membership: str, folders: list[str], throttled: float | None) -> Pressure:
        now, totals = self._clock(), {}
        for resource in _RESOURCES:
            for folder in folders:
                name = resource if folder.endswith("/pressure") else f"{resource}.pressure"
                text = read_file(f"{folder}/{name}")
                if text is not None and (total := parse_pressure(text)) is not None:
                    totals[resource] = total
                    break
        before = self._totals.get(membership)
        self._totals[membership] = _Totals(now, totals)
        if before is None or now <= before.at_s:
            return Pressure(throttled=throttled)
        parts = {
            resource: _part((total - before.pressure[resource]) * _US, now - before.at_s)
            for resource, total in totals.items()
            if resource in before.pressure
        }
        return Pressure(parts.get("cpu"), parts.get("memory"), parts.get("io"), throttled)

    def _quota(self, folders: list[str]) -> float | None:
        """A quota anywhere above holds up everything below it: the one that did most counts."""
        for folder in folders:
            pace = self._paces.setdefault(folder, Pace(_STAT_SHARE, _STAT_S))
            now = self._clock()
            if not pace.due(now):
                continue
            began = time.thread_time()
            text = read_file(f"{folder}/cpu.stat")
            pace.spent(now, time.thread_time() - began)
            reading = None if text is None else _quota(now, parse_counts(text))
            if reading is None:
                self._quotas.pop(folder, None)
                self._throttled.pop(folder, None)
                continue
            if (before := self._quotas.get(folder)) is not None and now > before.at_s:
                self._throttled[folder] = _held_up(before, reading)
            self._quotas[folder] = reading
        known = [self._throttled[folder] for folder in folders if folder in self._throttled]
        return max(known) if known else None


def parse_mounts(text: str) -> list[_Mount]:
    """The control groups of a `/proc/self/mountinfo`; those of version 2 have no controllers here."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 5 or len(rest) < 3 or rest[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(rest[2].split(",")) if rest[0] == "cgroup" else frozenset[str]()
        found.append(_Mount(fields[4].replace("\\040", " "), fields[3].replace("\\040", " "), controllers))
    return found


def parse_membership(text: str) -> dict[str, str]:
    """A process's group by controller, of its `/proc/PID/cgroup`; that of version 2 by ""."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _upwards(mount: _Mount, group: str) -> Iterator[str]:
    """The folders of a group and of those above it, as far as they are mounted."""
    path, root = PurePosixPath(group), PurePosixPath(mount.root)
    if path.is_relative_to(root):
        below = path.relative_to(root)
    else:
        # A path of another namespace, or one that leads out of ours ("/../x"): what is mounted is all there is to see.
        below = PurePosixPath() if ".." in path.parts else PurePosixPath(*path.parts[1:])
    for part in (below, *below.parents):
        folder = str(PurePosixPath(mount.point) / part)
        if Path(folder).is_dir():
            yield folder


def _quota(at_s: float, counts: dict[str, int]) -> _Quota | None:
    """Version 2 counts microseconds, version 1 nanoseconds under another name."""
    if "nr_periods" not in counts:
        return None
    held_up = counts.get("throttled_usec", 0) * _US + counts.get("throttled_time", 0) * _NS
    return _Quota(at_s, counts["nr_periods"], counts.get("nr_throttled", 0), held_up)


def _held_up(before: _Quota, now: _Quota) -> float:
    periods = now.periods - before.periods
    if periods <= 0:
        return 0.0
    return min(
        _part(now.used_up - before.used_up, periods), _part(now.held_up_s - before.held_up_s, now.at_s - before.at_s)
    )


def _part(used: float, whole: float) -> float:
    return min(1.0, max(0.0, used / whole))
