"""What a killed supervisor leaves: nothing with a sweeper, and nothing after the next start without one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pingpong_worker.shared_memory_names import FOLDER, instance_prefix, segments
from pingpongd import sweeper_process
from pingpongd.leftovers import clear_abandoned
from pingpongd.process_group import ProcessId, ProcessStat, group_lives, read_stat
from pingpongd.runtime_dir import RuntimeDir
from pingpongd.sweeper_process import SweeperProcess
from pingpongd.worker_remains import ProcessTable, WorkerRemains

SUPERVISOR = Path(__file__).with_name("supervisor_process.py")
LIMIT_S = 30


class Supervisor:
    """A started supervisor, its sweeper and its worker's family."""

    def __init__(self, folder: Path, *kinds: str) -> None:
        self.folder = folder / "run"
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), str(self.folder), *kinds],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.pids: dict[str, int] = {}
        self.names: list[str] = []
        self.prefix = ""
        self.members: set[ProcessId] = set()

    def listen(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        family = json.loads(line)
        self.pids, self.names, self.prefix = family["pids"], family["names"], family["prefix"]
        for pid in self.pids.values():
            stat = read_stat(pid) if pid else None
            if stat is not None:
                self.members.add(stat.id)

    def ask(self) -> None:
        """Let it say again who is who."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.listen()

    def kill(self, *names: str, number: signal.Signals = signal.SIGKILL) -> None:
        for name in names:
            os.kill(self.pids[name], number)

    def running(self) -> list[str]:
        by_pid = {pid: name for name, pid in self.pids.items()}
        stats = [(member, read_stat(member.pid)) for member in self.members]
        return [
            by_pid.get(member.pid, str(member.pid))
            for member, stat in stats
            if stat is not None and stat.id == member and not stat.zombie
        ]

    def leftovers(self) -> list[str]:
        """Every process, segment and file that is left."""
        files = [entry.name for entry in self.folder.iterdir()] if self.folder.exists() else []
        return [*self.running(), *segments(self.prefix), *files, *(n for n in self.names if (FOLDER / n).exists())]

    def close(self) -> None:
        for member in self.members:
            stat = read_stat(member.pid)
            if stat is not None and stat.id == member:
                os.kill(member.pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()
        for name in [*segments(self.prefix or "none"), *self.names]:
            (FOLDER / name).unlink(missing_ok=True)


Start = Callable[..., Supervisor]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Supervisor] = []
    with tempfile.TemporaryDirectory(prefix="pp-") as folder:  # a short path, for sockets

        def go(*kinds: str) -> Supervisor:
            started.append(Supervisor(Path(folder), *kinds))
            started[-1].listen()
            return started[-1]

        yield go
        for supervisor in started:
            supervisor.close()


def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def nothing_left(supervisor: Supervisor) -> None:
    until(lambda: not supervisor.leftovers(), supervisor.leftovers)


def test_a_clean_stop_leaves_nothing_and_the_sweeper_says_nothing(start: Start) -> None:
    supervisor = start()
    supervisor.process.communicate(timeout=LIMIT_S)
    assert supervisor.process.returncode == 0
    assert supervisor.leftovers() == []
    assert supervisor.log.read_text() == ""


@pytest.mark.parametrize("kinds", [(), ("loyal",), ("escaped", "foreign")], ids=["stubborn", "loyal", "escaped"])
def test_a_killed_supervisor_leaves_nothing(start: Start, kinds: tuple[str, ...]) -> None:
    supervisor = start(*kinds)
    supervisor.kill("supervisor")
    nothing_left(supervisor)
    line = json.loads(supervisor.log.read_text())
    assert line["event"] == "supervisor_swept"
    assert line["runtime_dir"] == "cleared"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["timestamp"])  # as structlog's


def test_a_supervisor_killed_while_it_is_stopped_leaves_nothing(start: Start) -> None:
    supervisor = start()
    supervisor.kill("supervisor", number=signal.SIGSTOP)
    supervisor.kill("supervisor")
    nothing_left(supervisor)


def test_workers_that_are_stopped_go_with_their_supervisor(start: Start) -> None:
    supervisor = start("escaped")
    supervisor.kill("leader", "child", "tracker", "escaped", number=signal.SIGSTOP)
    supervisor.kill("supervisor")
    nothing_left(supervisor)


def test_a_group_killed_with_its_supervisor_leaves_no_segment(start: Start) -> None:
    supervisor = start()
    supervisor.kill("tracker", "supervisor", "leader", "child")
    nothing_left(supervisor)


def test_what_left_a_workers_group_ends_with_the_worker(start: Start) -> None:
    supervisor = start("escaped")
    supervisor.kill("leader")
    until(lambda: supervisor.running() in (["supervisor", "sweeper"], ["sweeper", "supervisor"]), supervisor.running)
    assert segments(supervisor.prefix) == []


def test_a_worker_that_dies_under_a_stopped_supervisor_leaves_nothing(start: Start) -> None:
    supervisor = start()
    supervisor.kill("supervisor", number=signal.SIGSTOP)
    supervisor.kill("tracker", "leader")
    until(lambda: not segments(supervisor.prefix), lambda: segments(supervisor.prefix))
    assert "child" not in supervisor.running()
    supervisor.kill("supervisor", number=signal.SIGCONT)
    supervisor.process.communicate(timeout=LIMIT_S)
    assert supervisor.leftovers() == []


def test_signals_that_stop_services_do_not_end_the_sweeper(start: Start) -> None:
    supervisor = start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        supervisor.kill("sweeper", number=number)
    before = supervisor.pids["sweeper"]
    supervisor.ask()
    assert supervisor.pids["sweeper"] == before
    supervisor.kill("supervisor")
    nothing_left(supervisor)


@pytest.mark.parametrize("stopped", [False, True], ids=["alive", "stopped"])
def test_a_sweeper_that_dies_is_replaced(start: Start, stopped: bool) -> None:
    supervisor = start("escaped")
    before = supervisor.pids["sweeper"]
    if stopped:
        supervisor.kill("sweeper", number=signal.SIGSTOP)
    supervisor.kill("sweeper")

    def replaced() -> bool:
        supervisor.ask()
        return supervisor.pids["sweeper"] not in (None, before)

    until(replaced, lambda: supervisor.pids)
    supervisor.kill("supervisor")
    nothing_left(supervisor)


def test_a_stopped_sweeper_does_not_hold_up_a_clean_stop(start: Start) -> None:
    supervisor = start()
    supervisor.kill("sweeper", number=signal.SIGSTOP)
    supervisor.process.communicate(timeout=LIMIT_S)
    assert supervisor.process.returncode == 0
    assert supervisor.leftovers() == []


def test_what_a_supervisor_and_its_sweeper_left_goes_at_the_next_start(start: Start) -> None:
    supervisor = start("loyal")
    supervisor.kill("sweeper", "tracker", "supervisor")
    until(lambda: not supervisor.running(), supervisor.running)
    assert segments(supervisor.prefix), "else this test would show nothing"
    with RuntimeDir(supervisor.folder, "test") as runtime:
        assert runtime.segment_prefix == supervisor.prefix
        assert segments(supervisor.prefix) == []
        assert sorted(entry.name for entry in supervisor.folder.iterdir()) == ["lock", "tmp"]
        assert list(runtime.temporary.iterdir()) == []
    assert supervisor.leftovers() == []


def test_a_daemon_that_has_started_meanwhile_keeps_its_files(start: Start) -> None:
    supervisor = start()
    supervisor.kill("sweeper", number=signal.SIGSTOP)
    supervisor.kill("supervisor")
    supervisor.process.wait()
    with RuntimeDir(supervisor.folder, "test") as runtime, socket.socket(socket.AF_UNIX) as control:
        control.bind(str(supervisor.folder / "control.sock"))
        ours = FOLDER / f"{runtime.segment_prefix}-11111111-1"
        ours.touch()
        supervisor.kill("sweeper", number=signal.SIGCONT)
        until(lambda: not supervisor.running(), supervisor.running)
        assert sorted(entry.name for entry in supervisor.folder.iterdir()) == ["control.sock", "lock", "tmp"]
        assert segments(supervisor.prefix) == [ours.name]
    assert supervisor.leftovers() == []


def test_the_next_start_waits_for_a_sweeper_at_its_work(start: Start) -> None:
    supervisor = start()
    for _ in range(3):
        supervisor.kill("supervisor")
        supervisor.process.communicate()
        supervisor = start()  # no waiting: it meets the sweeper
    supervisor.process.communicate(timeout=LIMIT_S)
    assert supervisor.leftovers() == []


def test_a_folder_that_is_gone_is_nobodys(tmp_path: Path) -> None:
    assert not clear_abandoned(tmp_path / "gone")


def test_instances_users_and_paths_have_names_of_their_own(tmp_path: Path) -> None:
    prefixes = {instance_prefix(tmp_path / name) for name in ("a", "b", "a/b")}
    assert len(prefixes) == 3
    assert not any(one.startswith(f"{other}-") for one in prefixes for other in prefixes)


def test_the_sweeper_imports_nothing_heavy() -> None:
    script = "import pingpongd.sweeper_process, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"asyncio", "multiprocessing", "msgspec", "psutil", "structlog", "zmq"} & set(done.stdout.split())


def test_the_sweeper_is_small_and_idle(start: Start) -> None:
    supervisor = start()
    sweeper = psutil.Process(supervisor.pids["sweeper"])
    assert sweeper.memory_info().rss < 25e6, "an interpreter alone has 9 MB"
    assert len(list(Path(f"/proc/{sweeper.pid}/fd").iterdir())) <= 6


def test_nobody_looks_for_what_has_no_names_until_its_group_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    look = WorkerRemains.look

    def note(worker: WorkerRemains, table: ProcessTable) -> None:
        looked_at.append(worker.leader.pid)
        look(worker, table)

    monkeypatch.setattr(WorkerRemains, "look", note)
    given, told = os.pipe()
    monkeypatch.setattr(sweeper_process, "_STDIN", given)
    sweeper = SweeperProcess(os.getppid(), Path("/nowhere"))
    thread = threading.Thread(target=sweeper.run)
    thread.start()
    try:
        for script in ("read line", "sleep 300 & read line"):
            with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True) as command:
                born = read_stat(command.pid)
                assert born is not None
                os.write(told, f"{command.pid} {born.id.born} -\n".encode())
                until(lambda: bool(sweeper._workers), lambda: "it is not watched")
            until(lambda: not sweeper._workers and not sweeper._just_ended, lambda: "it is still watched")
            if script == "read line":
                assert looked_at == []
        until(lambda: not group_lives(command.pid), lambda: "its group lives")
        assert set(looked_at) == {command.pid}
    finally:
        os.write(told, b"quit\n")
        thread.join()
        os.close(given)
        os.close(told)


LEADER = ProcessId(100, 1000)


def table(*stats: tuple[int, int, int, int]) -> dict[int, ProcessStat]:
    """Processes by (pid, born, parent, group)."""
    return {pid: ProcessStat(ProcessId(pid, born), parent, group, False) for pid, born, parent, group in stats}


def test_a_number_that_was_given_away_again_is_left_alone() -> None:
    worker = WorkerRemains(LEADER, "x")
    before = table((100, 1000, 1, 100), (101, 1001, 100, 100), (102, 1002, 101, 102))
    worker.look(before)
    assert {process.pid for process in worker.living(before)} == {100, 101, 102}
    worker.ended = 2000
    after = table((100, 3000, 1, 100), (101, 3001, 100, 100), (102, 1002, 1, 102))
    worker.look(after)
    assert worker.living(after) == {ProcessId(102, 1002)}, "it outlives its parent, and the rest are others"


def test_members_that_were_born_unseen_are_known_by_their_group() -> None:
    worker = WorkerRemains(LEADER, "x")
    worker.ended = 2000
    later = table((101, 1999, 1, 100), (102, 2500, 101, 102), (103, 2500, 1, 100))
    worker.look(later)
    assert {process.pid for process in worker.living(later)} == {101, 102}


def test_a_worker_that_has_ended_and_whose_number_is_anothers_harms_nobody(tmp_path: Path) -> None:
    """What a sweeper is told that takes another's place."""
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0)
    command = [sys.executable, "-m", "pingpongd.sweeper_process", str(os.getpid()), str(tmp_path)]
    sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    prefix = f"{instance_prefix(tmp_path)}-11111111"
    name = FOLDER / f"{prefix}-1"
    name.touch()
    try:
        assert sweeper.stdin is not None
        sweeper.stdin.write(f"{bystander.pid} 1 {prefix}\n")
        sweeper.stdin.flush()
        until(lambda: not name.exists(), lambda: "the name of the one that ended is still there")
        sweeper.communicate("quit\n", timeout=LIMIT_S)
        assert sweeper.returncode == 0
        assert bystander.poll() is None
    finally:
        name.unlink(missing_ok=True)
        sweeper.kill()
        sweeper.communicate()
        bystander.communicate(b"\n")
    assert bystander.returncode == 0
