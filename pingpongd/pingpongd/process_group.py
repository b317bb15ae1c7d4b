"""What /proc tells of processes and their groups; standard library only, for the sweeper is to stay small."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """One process for good: a number alone is given away again."""

    pid: int
    born: int
    """Clock ticks from the machine's start to the process's."""


class ProcessStat(NamedTuple):
    """One process now."""

    id: ProcessId
    parent: int
    group: int
    zombie: bool


def read_stat(pid: int) -> ProcessStat | None:
    """What /proc/PID/stat says; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may hold anything; the third field comes after the last of them.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(
        id=ProcessId(pid, int(fields[19])),
        parent=int(fields[1]),
        group=int(fields[2]),
        zombie=fields[0] in (b"Z", b"X"),
    )


def all_processes() -> Iterator[ProcessStat]:
    """Every process that this one can see, zombies too."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := read_stat(int(entry.name))) is not None:
            yield stat


def group_exists(group: int) -> bool:
    """Whether a group has a process of this user's, or a zombie."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def group_lives(group: int) -> bool:
    """Whether a process of the group runs that is not a zombie: a container's init may not reap orphans."""
    if not group_exists(group):  # the usual answer, and much cheaper than to look at every process
        return False
    return any(stat.group == group and not stat.zombie for stat in all_processes())


def kill_process(process: ProcessId) -> None:
    """SIGKILL to a process, and never to another that has got its number."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        stat = read_stat(process.pid)
        if stat is not None and stat.id == process:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        return
    finally:
        os.close(descriptor)
