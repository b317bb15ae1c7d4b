"""What the kernel says of a group's processes: CPU time, waiting for cores, faults, swapping, pressure, steal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from pingpong_bus.messages import HostState
from pingpongd.cgroups import CgroupProbe, Pressure
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
_SCAN_SHARE: Final = 0.0004
"""Of a core: for finding the busiest threads of one group."""
_SCAN_S: Final = 5.0


class _Thread(msgspec.Struct):
    """One of a group's busiest threads."""

    pid: int
    at_s: float
    reading: ThreadReading


class _Process(msgspec.Struct):
    """One process of a group at the look before."""

    at_s: float
    reading: ProcessReading
    busiest: int
    """The thread whose `status` is read."""
    status: StatusReading | None = None


class _Group(msgspec.Struct):
    """What is remembered of a group between looks."""

    processes: dict[int, _Process] = {}
    threads: dict[int, _Thread] = {}
    scanned: dict[int, int] = {}
    """Nanoseconds that each thread had run at the latest scan."""
    known: set[int] = set()
    """The processes that it looked into."""
    pace: Pace = msgspec.field(default_factory=lambda: Pace(_SCAN_SHARE, _SCAN_S))


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
        for gone in group.processes.keys() - set(pids):
            del group.processes[gone]
        used = faults = 0.0
        rss = swapped = 0
        compared = knows_swap = False
        switches: list[float] = []
        pressure = Pressure()
        for pid in dict.fromkeys(pids):
            text = read_file(f"{self._proc}/{pid}/stat")
            if text is None:
                group.processes.pop(pid, None)
                continue
            now, reading, before = self._clock(), parse_process(text), group.processes.get(pid)
            if before is not None and before.reading.started != reading.started:
                before = None
            thread = self._busiest(group, pid)
            status_text = read_file(f"{self._proc}/{pid}/task/{thread}/status")
            status = None if status_text is None else parse_status(status_text)
            group.processes[pid] = _Process(now, reading, thread, status)
            if status is not None:
                rss += status.rss_bytes
                swapped += status.swapped_bytes or 0
                knows_swap |= status.swapped_bytes is not None
            # The engine's, which is named last, where the processes of a group are in several.
            pressure = self._cgroups.look(pid)
            if before is None or now <= before.at_s:
                continue
            compared, passed = True, now - before.at_s
            used += (reading.cpu_s - before.reading.cpu_s) / passed
            faults += (reading.major_faults - before.reading.major_faults) / passed
            if status is not None and before.status is not None and before.busiest == thread:
                switches.append((status.involuntary - before.status.involuntary) / passed)
        waited = self._waited(group)
        self._scan(group)
        if not compared:
            return None
        return HostState(
            cpu=max(0.0, used),
            runnable_wait=waited,
            involuntary_switches=max(0.0, sum(switches)) if switches else None,
            steal=self._steal,
            major_faults=max(0.0, faults),
            swapped_bytes=swapped if knows_swap else None,
            rss_bytes=rss,
            pressure_cpu=pressure.cpu,
            pressure_memory=pressure.memory,
            pressure_io=pressure.io,
            throttled=pressure.throttled,
        )

    def _busiest(self, group: _Group, pid: int) -> int:
        """The thread of a process that had run most; the same one from look to look unless another overtakes it."""
        own = [(thread.reading.ran_ns, tid) for tid, thread in group.threads.items() if thread.pid == pid]
        return max(own)[1] if own else pid

    def _waited(self, group: _Group) -> float | None:
        """The part of the time in which the thread that wanted to run most had no core."""
        most, waited = -1.0, None
        for tid, thread in list(group.threads.items()):
            text = read_file(f"{self._proc}/{thread.pid}/task/{tid}/schedstat")
            reading = None if text is None else parse_thread(text)
            if reading is None:
                del group.threads[tid]
                continue
            now, before = self._clock(), thread.reading
            if now > thread.at_s:
                wait = max(0, reading.waited_ns - before.waited_ns)
                wanted = max(0, reading.ran_ns - before.ran_ns) + wait
                if wanted > most:
                    most, waited = wanted, min(1.0, wait * _NS / (now - thread.at_s))
            thread.at_s, thread.reading = now, reading
        return waited

    def _scan(self, group: _Group) -> None:
        """Find the threads that are worth a look every time."""
        now = self._clock()
        if not group.pace.due(now) and group.processes.keys() <= group.known:
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
        group.pace.spent(now, time.thread_time() - began)


def _machine_times() -> tuple[float, float | None]:
    times = psutil.cpu_times()
    # A guest's time is counted in `user` already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - guests, getattr(times, "steal", None)
