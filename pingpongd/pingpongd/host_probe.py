"""What the kernel says of a group's processes: CPU time, waiting for cores, faults, swapping, pressure, steal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from pingpong_bus.messages import HostState
from pingpongd.cgroups import CgroupProbe
from pingpongd.pace import Pace
from pingpongd.proc_files import (
    ProcessReading,
    StatusReading,
    ThreadReading,
    parse_process,
    parse_status,
    parse_thread,
    read_file,
    threads,
)

_NS: Final = 1e-9
_BUSY: Final = 4
"""Threads of a group that are looked at every time for each of: what they did of late, what they did in their lives.
An engine has hundreds, of which one or a few make its steps."""
_SCAN_SHARE: Final = 0.0001
"""Of a core: for finding the busiest threads of one group."""
_SEARCH_SHARE: Final = 0.0004
"""The same where those that are known do less than half of the work: others have become busy."""
_SCAN_S: Final = 5.0
_WORKS: Final = 0.05
"""Of a core: a group that uses less has nothing to search for."""
_IDLE_S: Final = 10.0


class _Thread(msgspec.Struct):
    """One of a group's busiest threads."""

    pid: int
    at_s: float
    reading: ThreadReading


class _Status(msgspec.Struct, frozen=True):
    """One reading of a `status`."""

    at_s: float
    thread: int
    reading: StatusReading


class _Process(msgspec.Struct, frozen=True):
    """One process of a group at a look."""

    at_s: float
    reading: ProcessReading
    status: _Status | None = None


class _Group(msgspec.Struct):
    """What is remembered of a group between looks."""

    processes: dict[int, _Process] = {}
    threads: dict[int, _Thread] = {}
    scanned: dict[int, int] = {}
    """Nanoseconds that each thread had run at the latest scan."""
    known: set[int] = set()
    """The processes that it looked into."""
    scan: Pace = msgspec.field(default_factory=lambda: Pace(_SCAN_SHARE, _SCAN_S))
    search: Pace = msgspec.field(default_factory=lambda: Pace(_SEARCH_SHARE, _SCAN_S))


class HostProbe:
    """Looks at processes; all rates are over the time since the look before at the same group."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        clock: Callable[[], float] = time.monotonic,
        machine: Callable[[], tuple[float, float | None]] | None = None,
    ) -> None:
        """Args:
        proc: where the kernel's files are.
        clock: in seconds.
        machine: all CPU time of this machine's cores, and what the hypervisor took of it, in seconds since boot; None
            for what psutil says.
        """
        self._proc = proc
        self._clock = clock
        self._machine = machine or _machine_times
        self._cgroups = CgroupProbe(proc, clock)
        self._groups: dict[str, _Group] = {}
        self._times: tuple[float, float | None] | None = None
        self._steal: float | None = None

    def begin(self) -> None:
        """A new look: what is the whole machine's is read once in it."""
        self._cgroups.begin()
        before, self._times = self._times, self._machine()
        (total, stolen), self._steal = self._times, None
        if before is not None and stolen is not None and before[1] is not None and total > before[0]:
            self._steal = min(1.0, max(0.0, (stolen - before[1]) / (total - before[0])))

    def forget(self, name: str) -> None:
        """A group's processes have ended."""
        self._groups.pop(name, None)

    def look(self, name: str, pids: Sequence[int]) -> HostState | None:
        """Look at a group.

        Returns:
            None at the first look at a process, and where none is there any more: a rate takes two readings.
        """
        group = self._groups.setdefault(name, _Group())
        before, group.processes = group.processes, {}
        used = faults = 0.0
        compared = False
        switches: list[float] = []
        for pid in dict.fromkeys(pids):
            known = before.get(pid)
            process = self._process(group, pid, known)
            if process is None:
                continue
            group.processes[pid] = process
            if known is None or known.reading.started != process.reading.started or process.at_s <= known.at_s:
                continue
            compared, passed = True, process.at_s - known.at_s
            used += (process.reading.cpu_s - known.reading.cpu_s) / passed
            faults += (process.reading.major_faults - known.reading.major_faults) / passed
            switches += _switches(known.status, process.status)
        waited, known_work = self._waited(group)
        self._scan(group, searching=used >= _WORKS and known_work < used / 2)
        if not group.processes:
            return None
        # A group's processes are in one cgroup: nobody moves an engine out of its worker's.
        pressure = self._cgroups.look(next(iter(group.processes)))
        if not compared:
            return None
        statuses = [process.status.reading for process in group.processes.values() if process.status is not None]
        swapped = [status.swapped_bytes for status in statuses if status.swapped_bytes is not None]
        return HostState(
            cpu=max(0.0, used),
            runnable_wait=waited,
            involuntary_switches=sum(switches) if switches else None,
            steal=self._steal,
            major_faults=max(0.0, faults),
            swapped_bytes=sum(swapped) if swapped else None,
            rss_bytes=sum(status.rss_bytes for status in statuses),
            pressure_cpu=pressure.cpu,
            pressure_memory=pressure.memory,
            pressure_io=pressure.io,
            throttled=pressure.throttled,
        )

    def _process(self, group: _Group, pid: int, known: _Process | None) -> _Process | None:
        """Read a process; None where it has ended. An engine has helpers by the dozen that do nothing: of one that has
        not run, memory and switches are read now and then."""
        text = read_file(f"{self._proc}/{pid}/stat")
        if text is None:
            return None
        now, reading = self._clock(), parse_process(text)
        status = known.status if known is not None and known.reading.started == reading.started else None
        idle = known is not None and known.reading.cpu_s == reading.cpu_s
        if status is None or not idle or now - status.at_s >= _IDLE_S:
            thread = self._busiest(group, pid)
            found = read_file(f"{self._proc}/{pid}/task/{thread}/status")
            status = None if found is None else _Status(now, thread, parse_status(found))
        return _Process(now, reading, status)

    def _busiest(self, group: _Group, pid: int) -> int:
        """The thread of a process that had run most; the same one from look to look unless another overtakes it."""
        own = [(thread.reading.ran_ns, tid) for tid, thread in group.threads.items() if thread.pid == pid]
        return max(own)[1] if own else pid

    def _waited(self, group: _Group) -> tuple[float | None, float]:
        """The part of the time in which the thread that ran most had no core; and the CPU time of all that are known,
        as a part of a core.

        Not the one that was ready most: vLLM's engine core on a CPU looks for results again and again, yields its core
        each time, and so is ready all the time: it was seen to run for 8 % of the time and to "wait" for 92 %.
        """
        most, waited, work = -1.0, None, 0.0
        for tid, thread in list(group.threads.items()):
            text = read_file(f"{self._proc}/{thread.pid}/task/{tid}/schedstat")
            reading = None if text is None else parse_thread(text)
            if reading is None:
                del group.threads[tid]
                continue
            now, before = self._clock(), thread.reading
            if now > thread.at_s:
                wait = max(0, reading.waited_ns - before.waited_ns)
                ran = max(0, reading.ran_ns - before.ran_ns)
                work += ran * _NS / (now - thread.at_s)
                if ran > most:
                    most, waited = ran, min(1.0, wait * _NS / (now - thread.at_s))
            thread.at_s, thread.reading = now, reading
        return waited, work

    def _scan(self, group: _Group, *, searching: bool) -> None:
        """Find the threads that are worth a look every time."""
        now = self._clock()
        due = (group.search if searching else group.scan).due(now)
        if not due and group.processes.keys() <= group.known:
            return
        began = time.thread_time()
        found: dict[int, _Thread] = {}
        for pid in group.processes:
            for tid in threads(self._proc, pid):
                text = read_file(f"{self._proc}/{pid}/task/{tid}/schedstat")
                if text is not None and (reading := parse_thread(text)) is not None:
                    found[tid] = _Thread(pid, self._clock(), reading)
        late = sorted(found, key=lambda tid: found[tid].reading.ran_ns - group.scanned.get(tid, 0))
        life = sorted(found, key=lambda tid: found[tid].reading.ran_ns)
        group.scanned = {tid: thread.reading.ran_ns for tid, thread in found.items()}
        # Of each process at least the one that has run most: its switches are counted.
        lead = {found[tid].pid: tid for tid in life}
        chosen = {*late[-_BUSY:], *life[-_BUSY:], *lead.values()}
        group.known = set(group.processes)
        group.threads = {tid: group.threads.get(tid, found[tid]) for tid in chosen}
        for pace in (group.scan, group.search):
            pace.spent(now, time.thread_time() - began)


def _switches(before: _Status | None, now: _Status | None) -> list[float]:
    """How often a second a thread was taken off its core; nothing where two readings of it are not there."""
    if before is not None and before is now:
        return [0.0]  # it has not run
    if before is None or now is None or before.thread != now.thread or now.at_s <= before.at_s:
        return []
    return [max(0, now.reading.involuntary - before.reading.involuntary) / (now.at_s - before.at_s)]


def _machine_times() -> tuple[float, float | None]:
    times = psutil.cpu_times()
    # A guest's time is counted in `user` already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - guests, getattr(times, "steal", None)
