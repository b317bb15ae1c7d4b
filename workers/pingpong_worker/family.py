"""A process and all that descend from it, found without reading all of /proc."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Family:
    """A worker's process and its engine's.

    Args:
        pid: of the first process.

    Attributes:
        pids: as of the last `look`, the first process first, without those that `rss_bytes` has found gone.
    """

    def __init__(self, pid: int) -> None:
        self.pids = [pid]

    def look(self) -> None:
        """Find who belongs to it now. May be called in another thread; takes a millisecond or so."""
        first = self.pids[0]
        if _lists_children(first):
            self.pids = _descend(first)
            return
        try:  # a kernel that does not list children (CONFIG_PROC_CHILDREN): the parent of every process is looked up
            self.pids = [first, *(child.pid for child in psutil.Process(first).children(recursive=True))]
        except psutil.NoSuchProcess:
            self.pids = [first]

    def rss_bytes(self) -> int:
        """Resident memory of them all, in bytes."""
        total, alive = 0, []
        for pid in self.pids:
            try:
                total += int((_PROC / str(pid) / "statm").read_bytes().split()[1]) * _PAGE_BYTES
            except (OSError, IndexError):
                continue
            alive.append(pid)
        self.pids = alive or self.pids[:1]
        return total


def _lists_children(pid: int) -> bool:
    return (_PROC / str(pid) / "task" / str(pid) / "children").exists()


def _descend(first: int) -> list[int]:
    """A process and its descendants. Each thread lists the children that it has started."""
    found = [first]
    for pid in found:  # grows meanwhile
        try:
            threads = list((_PROC / str(pid) / "task").iterdir())
        except OSError:  # it has just ended
            continue
        for thread in threads:
            try:
                children = (thread / "children").read_bytes()
            except OSError:
                continue
            found += [int(child) for child in children.split()]
    return found
