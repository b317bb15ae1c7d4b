"""Looks at processes: the kernel's files read right, and real processes that are starved, stopped, and gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pingpong_bus.messages import HostState
from pingpongd.host_probe import HostProbe
from pingpongd.proc_files import (
    ThreadReading,
    descends,
    first_pid_namespace,
    parse_counts,
    parse_pressure,
    parse_process,
    parse_status,
    parse_thread,
    read_file,
)

_BUSY = """
import os, sys, threading, time
os.sched_setaffinity(0, [int(sys.argv[1])])
for _ in range(int(sys.argv[2])):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("up", flush=True)
while True:
    pass
"""
_LOOK_S = 0.3

Start = Callable[..., int]


@pytest.fixture
def core() -> int:
    return max(os.sched_getaffinity(0))


@pytest.fixture
def busy(core: int) -> Iterator[Start]:
    """Start a process that keeps one core busy, and give its pid."""
    started: list[subprocess.Popen[str]] = []

    def start(sleepers: int = 0) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", _BUSY, str(core), str(sleepers)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def look_until(
    probe: HostProbe, pids: list[int], wanted: Callable[[HostState], bool], limit_s: float = 20.0
) -> HostState:
    """Look until the state is what is wanted; the last one, whatever it is, at the end of the limit."""
    end = time.monotonic() + limit_s
    state = None
    while time.monotonic() < end:
        probe.begin()
        state = probe.look("group", pids)
        if state is not None and wanted(state):
            return state
        time.sleep(_LOOK_S)
    assert state is not None
    return state


# ------------------------------------------------------------------------------------------------- the kernel's files


def test_a_name_may_look_like_the_rest_of_the_line() -> None:
    reading = parse_process(b"123 (a) b) R 1 2 () x) S 77 1 1 0 -1 4194560 90 91 12 92 250 150 93 94 20 0 3 0 8877 5 6")
    assert (reading.parent, reading.major_faults, reading.started) == (77, 12, 8877)
    assert reading.cpu_s == pytest.approx(400 / os.sysconf("SC_CLK_TCK"))


def test_status_of_a_process_and_of_one_that_gave_its_memory_back() -> None:
    full = parse_status(b"Name:\tx: y\nVmRSS:\t    100 kB\nVmSwap:\t  8 kB\nnonvoluntary_ctxt_switches:\t42\n")
    assert (full.rss_bytes, full.swapped_bytes, full.involuntary) == (102400, 8192, 42)
    zombie = parse_status(b"Name:\tx\nState:\tZ (zombie)\nnonvoluntary_ctxt_switches:\t1\n")
    assert (zombie.rss_bytes, zombie.swapped_bytes) == (0, None)


def test_a_kernel_that_keeps_no_schedstat_says_nothing() -> None:
    assert parse_thread(b"0 0 0\n") is None
    assert parse_thread(b"1500 20 3\n") == ThreadReading(1500, 20)


def test_pressure_and_counts() -> None:
    assert parse_pressure(b"full avg10=0.00 total=1\nsome avg10=2.07 avg60=1.29 avg300=1.21 total=15217206672\n") == (
        15217206672
    )
    assert parse_pressure(b"") is None
    assert parse_counts(b"nr_periods 5\nodd line here\nname text\n") == {"nr_periods": 5}


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_file(str(tmp_path / "no")) is None
    assert read_file(str(tmp_path)) is None


def test_descent_is_found_over_generations(busy: Start) -> None:
    pid = busy()
    assert descends(Path("/proc"), pid, {os.getpid()})
    assert descends(Path("/proc"), pid, {os.getppid()})
    assert not descends(Path("/proc"), os.getpid(), {pid})
    assert not descends(Path("/proc"), 2**22 + 1, {os.getpid()})


def test_the_first_namespace_is_known_by_its_number(tmp_path: Path) -> None:
    assert not first_pid_namespace(tmp_path)


# --------------------------------------------------------------------------------------------------- fixed kernel files


class Kernel:
    """A /proc of one process with two threads, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.times = root, 10.0, (100.0, 1.0)
        self.state(cpu=0)

    def state(
        self, *, cpu: int = 0, faults: int = 0, started: int = 9, swap: int = 0, forced: int = 0, pid: int = 5
    ) -> None:
        """CPU time in ticks."""
        folder = self.root / str(pid)
        (folder / f"task/{pid}").mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(
            f"{pid} (x) S 1 1 1 0 -1 4194560 90 91 {faults} 92 {cpu} 0 93 94 20 0 3 0 {started} 5 6\n"
        )
        (folder / f"task/{pid}/status").write_text(
            f"Name:\tx\nVmRSS:\t 4 kB\nVmSwap:\t {swap} kB\nnonvoluntary_ctxt_switches:\t{forced}\n"
        )

    def thread(self, tid: int, ran_s: float, waited_s: float = 0.0, pid: int = 5) -> None:
        folder = self.root / f"{pid}/task/{tid}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{int(ran_s * 1e9)} {int(waited_s * 1e9)} 1\n")

    def probe(self) -> HostProbe:
        return HostProbe(self.root, clock=lambda: self.now, machine=lambda: self.times)

    def look(self, probe: HostProbe, *pids: int, after: float = 1.0) -> HostState | None:
        self.now += after
        probe.begin()
        return probe.look("group", pids or (5,))


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_rates_are_over_the_time_between_two_looks(kernel: Kernel) -> None:
    kernel.thread(5, 1.0)
    probe = kernel.probe()
    assert kernel.look(probe) is None
    kernel.state(cpu=50, faults=30, swap=3)
    kernel.times = (104.0, 2.0)
    state = kernel.look(probe, after=2.0)
    assert state is not None
    assert state.cpu == pytest.approx(50 / os.sysconf("SC_CLK_TCK") / 2)
    assert (state.major_faults, state.swapped_bytes, state.rss_bytes, state.steal) == (15.0, 3072, 4096, 0.25)
    assert (state.pressure_cpu, state.throttled) == (None, None)


def test_the_thread_that_ran_most_says_how_long_it_waited(kernel: Kernel) -> None:
    kernel.thread(5, 1.0)
    kernel.thread(6, 9.0)
    probe = kernel.probe()
    kernel.look(probe)
    kernel.thread(5, 1.0 + 0.1, 0.2)
    kernel.thread(6, 9.0 + 0.25, 0.7)
    state = kernel.look(probe)
    assert state is not None
    assert state.runnable_wait == pytest.approx(0.7)
    kernel.thread(5, 1.0 + 0.9, 0.2)
    state = kernel.look(probe)
    assert state is not None
    assert state.runnable_wait == 0.0  # the other one did all the work


def test_a_thread_that_yields_its_core_all_the_time_does_not_wait_for_one(kernel: Kernel) -> None:
    kernel.thread(5, 1.0)
    kernel.thread(6, 1.0)
    probe = kernel.probe()
    kernel.look(probe)
    kernel.thread(5, 1.0 + 0.8, 0.1)  # it computes
    kernel.thread(6, 1.0 + 0.08, 0.92)  # it looks whether the other one is through
    state = kernel.look(probe)
    assert state is not None
    assert state.runnable_wait == pytest.approx(0.1)


def test_a_thread_that_becomes_busy_is_found_within_a_few_looks(kernel: Kernel) -> None:
    for tid in range(5, 30):
        kernel.thread(tid, 1.0 + tid)
    probe = kernel.probe()
    for _ in range(3):
        kernel.look(probe)
    waits = []
    for second in range(1, 9):
        kernel.thread(5, 6.0 + 0.5 * second, 0.5 * second)
        kernel.thread(10, 11.0 + 0.3 * second, 0.4 * second)
        state = kernel.look(probe)
        assert state is not None
        waits.append(state.runnable_wait)
    assert waits[-1] == pytest.approx(0.5)  # of 25 threads the idle ones had run longer in their lives


def test_a_pid_that_another_process_has_by_now_starts_anew(kernel: Kernel) -> None:
    probe = kernel.probe()
    kernel.look(probe)
    kernel.state(cpu=100_000, started=10)
    assert kernel.look(probe) is None
    kernel.state(cpu=100_050, started=10)
    state = kernel.look(probe)
    assert state is not None
    assert state.cpu == pytest.approx(50 / os.sysconf("SC_CLK_TCK"))


def test_a_kernel_without_schedstat_is_not_scanned_every_time(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[int] = []

    def threads(proc: Path, pid: int) -> list[int]:
        scans.append(pid)
        return [pid]

    monkeypatch.setattr("pingpongd.host_probe.threads", threads)
    probe = kernel.probe()
    for _ in range(4):
        state = kernel.look(probe)
    assert state is not None
    assert state.runnable_wait is None
    assert scans == [5]


def test_steal_that_the_machine_does_not_count_is_none(kernel: Kernel) -> None:
    kernel.times = (100.0, None)  # type: ignore[assignment]
    probe = kernel.probe()
    kernel.look(probe)
    state = kernel.look(probe)
    assert state is not None
    assert state.steal is None


# ---------------------------------------------------------------------------------------------------- real processes


def test_a_core_of_its_own_and_then_a_shared_one(busy: Start) -> None:
    first = busy(sleepers=40)
    probe = HostProbe()
    alone = look_until(probe, [first], lambda state: state.cpu > 0.2)
    assert alone.rss_bytes > 1 << 20
    assert alone.runnable_wait is not None
    for _ in range(3):
        busy()
    starved = look_until(probe, [first], lambda state: (state.runnable_wait or 0.0) > 0.4 and state.cpu < 0.7)
    assert starved.runnable_wait is not None
    assert (starved.runnable_wait > 0.4, starved.cpu < 0.7) == (True, True)
    switched = look_until(probe, [first], lambda state: (state.involuntary_switches or 0.0) > 1.0)
    assert (switched.involuntary_switches or 0.0) > 1.0


def test_a_stopped_process_neither_runs_nor_waits(busy: Start) -> None:
    pid = busy()
    probe = HostProbe()
    look_until(probe, [pid], lambda state: state.cpu > 0.2)
    os.kill(pid, signal.SIGSTOP)
    state = look_until(probe, [pid], lambda state: state.cpu < 0.05)
    assert state.cpu < 0.05
    assert (state.runnable_wait or 0.0) < 0.5
    os.kill(pid, signal.SIGCONT)


def test_a_process_that_has_ended_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    probe = HostProbe()
    look_until(probe, [os.getpid(), process.pid], lambda _: True)
    process.communicate(b"\n")
    state = look_until(probe, [os.getpid(), process.pid], lambda _: True)
    assert state.rss_bytes > 0
    probe.begin()
    assert probe.look("gone", [process.pid]) is None
    assert probe.look("none", []) is None
