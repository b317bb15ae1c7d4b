"""What belongs to a worker: its processes, also those that left its group, and its names in /dev/shm."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG

from pingpong_worker.shared_memory_names import FOLDER, PREFIX_VARIABLE, unlink_segments
from pingpongd.process_group import ProcessId, ProcessStat, all_processes, kill_process

_TICKS = os.sysconf("SC_CLK_TCK")
_TRIES = 5

ProcessTable = dict[int, ProcessStat]


def process_table() -> ProcessTable:
    """Every process, by its number."""
    return {stat.id.pid: stat for stat in all_processes()}


def boot_ticks() -> int:
    """The present, in the unit of `ProcessId.born`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)


class WorkerRemains:
    """One worker as its sweeper sees it."""

    def __init__(self, leader: ProcessId, prefix: str) -> None:
        self.leader = leader
        self.prefix = prefix
        """Of the names that it has in /dev/shm; empty: it has none, such as the command of a call."""
        self.ended: int | None = None
        """When the worker itself ended, in `boot_ticks`."""
        self.names: dict[str, int] = {}
        """Inodes of what it has in /dev/shm under a name that is not ours."""
        self._known = {leader}
        self._searched = False

    def look(self, table: ProcessTable) -> None:
        """Note its processes: those in its group, and what descends from any of them.

        The group's number cannot have been given to others before the worker ended. Once it has ended, whoever left the
        group and lost its parent since the last look is found by the environment that it inherited.
        """
        members = {
            stat.id
            for stat in table.values()
            if stat.group == self.leader.pid
            and stat.id.born >= self.leader.born
            and (self.ended is None or stat.id.born <= self.ended)
        }
        self._known = members | {process for process in self._known if is_there(process, table)}
        if self.prefix and self.ended is not None and not self._searched:
            self._searched = True
            line = f"{PREFIX_VARIABLE}={self.prefix}".encode()
            self._known |= {stat.id for stat in table.values() if line in _environment(stat.id.pid)}
        children: dict[int, list[ProcessStat]] = {}
        for stat in table.values():
            children.setdefault(stat.parent, []).append(stat)
        left = list(self._known)
        while left:
            parent = left.pop()
            for child in children.get(parent.pid, ()):
                if child.id not in self._known and child.id.born >= parent.born:
                    self._known.add(child.id)
                    left.append(child.id)

    def living(self, table: ProcessTable) -> set[ProcessId]:
        """Those of its processes that run, zombies aside."""
        return {process for process in self._known if is_there(process, table) and not table[process.pid].zombie}

    def kill(self, processes: Iterable[ProcessId]) -> None:
        """SIGKILL to each."""
        for process in processes:
            kill_process(process)

    def seconds_since_end(self, now: int) -> float:
        """How long ago the worker ended; 0 while it lives.

        Args:
            now: in `boot_ticks`.
        """
        return 0.0 if self.ended is None else (now - self.ended) / _TICKS

    def pids(self) -> list[int]:
        """Numbers of its processes at the last look."""
        return [process.pid for process in self._known]


def is_there(process: ProcessId, table: ProcessTable) -> bool:
    """Whether the table has this process, and not another with its number."""
    stat = table.get(process.pid)
    return stat is not None and stat.id == process


def _environment(pid: int) -> list[bytes]:
    """What a process was started with; empty where it has ended, is another user's, or has overwritten it."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


class Segments:
    """Who made the names in /dev/shm that do not say so: those of NCCL, of OpenMP, of vLLM's communicator for CPUs."""

    def __init__(self) -> None:
        self._tries: dict[str, int] = {}
        """How often each name has been looked for among the workers' processes."""

    def look(self, workers: list[WorkerRemains]) -> None:
        """Note which worker maps or holds each name that is new; costs next to nothing where none is."""
        workers = [worker for worker in workers if worker.prefix]
        present = _inodes()
        self._tries = {name: tries for name, tries in self._tries.items() if name in present}
        named = tuple(f"{worker.prefix}-" for worker in workers)
        new = {
            name
            for name in present
            if self._tries.get(name, 0) < _TRIES and not name.removeprefix("sem.").startswith(named)
        }
        if not new or not workers:
            return
        for worker in workers:
            for name in new & used_by(worker.pids()):
                worker.names[name] = present[name]
                self._tries[name] = _TRIES
        for name in new:
            self._tries[name] = self._tries.get(name, 0) + 1

    def pass_over_present(self) -> None:
        """What is there by now, and not noted, is nobody's of ours: called when a worker has done nothing yet."""
        self._tries = dict.fromkeys(_inodes(), _TRIES)

    def remove_of(self, worker: WorkerRemains) -> list[str]:
        """Remove a worker's names, now that it and its engine have ended; returns them.

        One that is not ours by its name stays if it is another's by now, or if somebody else uses it.
        """
        removed = unlink_segments(worker.prefix) if worker.prefix else []
        if worker.names:
            present = _inodes()
            left = {name for name, inode in worker.names.items() if present.get(name) == inode}
            if left:
                left -= used_by(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
            for name in left:
                (FOLDER / name).unlink(missing_ok=True)
            removed += left
        return removed


def _inodes() -> dict[str, int]:
    """Segments in /dev/shm that belong to this user."""
    found = {}
    user = os.getuid()
    with os.scandir(FOLDER) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if status.st_uid == user and S_ISREG(status.st_mode):
                found[entry.name] = status.st_ino
    return found


def used_by(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that some of these processes map or hold open."""
    start = f"{FOLDER}/"
    paths: set[str] = set()
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        try:
            maps = (folder / "maps").read_text(errors="surrogateescape")
            paths.update(line[line.index(start) :] for line in maps.splitlines() if start in line)
            for descriptor in (folder / "fd").iterdir():
                try:
                    paths.add(str(descriptor.readlink()))
                except FileNotFoundError:  # closed in the meantime
                    continue
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is another user's
            continue
    return {path.removeprefix(start) for path in paths if path.startswith(start)}
