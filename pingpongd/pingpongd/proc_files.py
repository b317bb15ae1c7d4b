"""What the kernel's files say, read as cheaply as can be: one open, one read, no object kept.

psutil does not tell the time that a thread waited for a core, its own switches or major faults, and reads two files for
what stands in one. `smaps` is never read: it takes the lock that the process's page faults take.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

_PAGE: Final = 1 << 16
_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
_KIB: Final = 1024
_GENERATIONS: Final = 16
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
"""Linux's PROC_PID_INIT_INO."""
_PARENT, _FAULTS, _USER, _SYSTEM, _STARTED = 1, 9, 11, 12, 19
"""Fields of /proc/PID/stat, counted from the one behind the name."""


class ProcessReading(msgspec.Struct, frozen=True):
    """Of /proc/PID/stat."""

    started: int
    """Ticks since boot: two processes that had the same pid differ in it."""
    cpu_s: float
    """Used by all its threads since then."""
    major_faults: int
    """Page faults that had to wait for a disk, since then."""
    parent: int
    """The pid of the process that started it, or has taken it over."""


class StatusReading(msgspec.Struct, frozen=True):
    """Of /proc/PID/task/TID/status."""

    rss_bytes: int
    swapped_bytes: int | None
    """None where the kernel has no swap."""
    involuntary: int
    """Times that this thread was taken off its core."""


class ThreadReading(msgspec.Struct, frozen=True):
    """Of /proc/PID/task/TID/schedstat."""

    ran_ns: int
    waited_ns: int
    """Ready to run, and without a core."""


def read_file(path: str) -> bytes | None:
    """The first 64 KiB of a file; None where it cannot be read or is empty, as when its process has ended."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _PAGE) or None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def parse_process(text: bytes) -> ProcessReading:
    """`/proc/PID/stat`; the name may hold spaces and parentheses, so it is read from behind the last one."""
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessReading(
        int(fields[_STARTED]),
        (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_S,
        int(fields[_FAULTS]),
        int(fields[_PARENT]),
    )


def parse_status(text: bytes) -> StatusReading:
    """`/proc/PID/task/TID/status`; a process that has given its memory back has no lines about it."""
    rss, swapped = _number(text, b"\nVmRSS:"), _number(text, b"\nVmSwap:")
    return StatusReading(
        (rss or 0) * _KIB,
        None if swapped is None else swapped * _KIB,
        _number(text, b"\nnonvoluntary_ctxt_switches:") or 0,
    )


def _number(text: bytes, name: bytes) -> int | None:
    """What stands behind a name; of some sixty lines three are wanted."""
    at = text.find(name)
    return None if at < 0 else int(text[at + len(name) : text.index(b"\n", at + 1)].split()[0])


def parse_thread(text: bytes) -> ThreadReading | None:
    """A `schedstat`; None where the kernel keeps none, and writes zeros."""
    ran, waited = map(int, text.split()[:2])
    return ThreadReading(ran, waited) if ran else None


def parse_pressure(text: bytes) -> int | None:
    """The microseconds in which some task waited, of a PSI file: "some avg10=0.00 ... total=123"."""
    for line in text.splitlines():
        if line.startswith(b"some ") and b"total=" in line:
            return int(line.rsplit(b"total=", 1)[1])
    return None


def parse_counts(text: bytes) -> dict[str, int]:
    """A file of lines "name number", such as a cgroup's `cpu.stat`."""
    pairs = (line.split() for line in text.decode().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def threads(proc: Path, pid: int) -> list[int]:
    """A process's threads; none where it has ended."""
    try:
        return [int(entry.name) for entry in Path(f"{proc}/{pid}/task").iterdir()]
    except OSError:
        return []


def descends(proc: Path, pid: int, family: Collection[int]) -> bool:
    """Whether a process was started by one of others, or by one that they started."""
    for _ in range(_GENERATIONS):
        text = read_file(f"{proc}/{pid}/stat")
        if text is None:
            return False
        pid = parse_process(text).parent
        if pid in family:
            return True
    return False


def first_pid_namespace(proc: Path) -> bool:
    """Whether this process's pids are the machine's own, and it is in no container that numbers them anew."""
    try:
        return (proc / "self/ns/pid").stat().st_ino == _FIRST_NAMESPACE
    except OSError:
        return False
