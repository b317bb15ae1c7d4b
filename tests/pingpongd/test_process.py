"""Ending workers: whatever dies, in whatever order, no process and no segment of theirs is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pingpong_worker.shared_memory_names import PREFIX_VARIABLE, segments
from pingpongd.process import WorkerProcess
from pingpongd.process_group import group_lives

FAMILY = Path(__file__).with_name("family_process.py")
LIMIT_S = 30
PREFIX = f"pingpong-test-{os.getpid()}"


class Guard:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.watched: list[tuple[int, str]] = []
        self.forgotten: list[int] = []

    def watch(self, pid: int, prefix: str) -> None:
        self.watched.append((pid, prefix))

    def forget(self, pid: int) -> None:
        self.forgotten.append(pid)


async def start(*kinds: str, guard: Guard | None = None) -> tuple[WorkerProcess, dict[str, int]]:
    """A family that has everything it will have; its members by their names."""
    environment = os.environ | {PREFIX_VARIABLE: PREFIX}
    worker = WorkerProcess([sys.executable, str(FAMILY), *kinds], b"", environment, [], guard)
    lines: asyncio.Queue[str] = asyncio.Queue()
    worker.on_line = lines.put_nowait
    async with asyncio.timeout(LIMIT_S):
        family = json.loads(await lines.get())
    assert worker.segment_prefix is not None
    assert set(family["names"]) <= set(segments(worker.segment_prefix))
    assert len(segments(worker.segment_prefix)) == 3, "two segments and a semaphore"
    return worker, family["pids"]


async def over(worker: WorkerProcess) -> None:
    async with asyncio.timeout(LIMIT_S):
        await worker.over()


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(worker: WorkerProcess, family: dict[str, int]) -> None:
    assert [name for name, pid in family.items() if running(pid)] == []
    assert segments(PREFIX) == []
    assert worker.exit_code is not None
    assert not psutil.pid_exists(worker.pid), "it has been reaped"


@pytest.mark.parametrize(
    "victims",
    [
        ["leader"],
        ["tracker", "leader"],
        ["leader", "tracker"],
        ["child", "tracker", "leader"],
        ["child", "leader"],
        ["leader", "child", "tracker"],
    ],
    ids="-".join,
)
async def test_whoever_is_killed_first_nothing_is_left(victims: list[str]) -> None:
    worker, family = await start()
    for victim in victims:
        os.kill(family[victim], signal.SIGKILL)
    await over(worker)
    all_gone(worker, family)
    assert worker.exit_code == -signal.SIGKILL


@pytest.mark.parametrize(
    "kill",
    [lambda worker: os.killpg(worker.pid, signal.SIGKILL), lambda worker: worker.kill()],
    ids=["group", "leader"],
)
async def test_members_that_are_stopped_are_ended(kill: Callable[[WorkerProcess], None]) -> None:
    worker, family = await start()
    os.killpg(worker.pid, signal.SIGSTOP)
    kill(worker)
    await over(worker)
    all_gone(worker, family)


async def test_one_that_ends_by_itself_keeps_its_exit_code() -> None:
    worker, family = await start()
    await worker.end(LIMIT_S / 10)
    all_gone(worker, family)
    assert worker.exit_code == 0


async def test_one_workers_segments_stay_while_anothers_go() -> None:
    first, first_family = await start()
    second, second_family = await start()
    first.kill()
    await over(first)
    assert second.segment_prefix is not None
    assert len(segments(second.segment_prefix)) == 3
    assert segments(PREFIX) == segments(second.segment_prefix)
    second.kill()
    await over(second)
    all_gone(first, first_family)
    all_gone(second, second_family)


async def test_one_that_has_just_ended_can_be_killed_all_the_same() -> None:
    """Before the event loop has seen its end, and after."""
    worker, family = await start()
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the loop is not to see it
    worker.kill()
    await over(worker)
    worker.kill()
    await worker.end(1)
    all_gone(worker, family)


async def test_the_guard_knows_a_worker_from_its_first_moment_to_its_last() -> None:
    guard = Guard()
    worker, _ = await start(guard=guard)
    assert guard.watched == [(worker.pid, worker.segment_prefix)]
    assert guard.forgotten == []
    worker.kill()
    await over(worker)
    assert guard.forgotten == [worker.pid]


async def test_one_killed_at_any_moment_of_its_start_leaves_nothing() -> None:
    """Also between the fork of a child and its first line of ours, when nothing ties it to its parent yet."""
    for moment in range(12):
        environment = os.environ | {PREFIX_VARIABLE: PREFIX}
        worker = WorkerProcess([sys.executable, str(FAMILY)], b"", environment, [])
        await asyncio.sleep(moment * 0.03)
        worker.kill()
        await over(worker)
        assert not group_lives(worker.pid)
        assert segments(PREFIX) == []


async def test_descriptors_and_children_stay_flat() -> None:
    counts = []
    for _ in range(4):
        worker, _ = await start()
        worker.kill()
        await over(worker)
        counts.append((psutil.Process().num_fds(), len(psutil.Process().children())))
    assert len(set(counts)) == 1, counts


async def test_a_child_that_holds_the_output_open_hides_no_end() -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    worker = WorkerProcess([sys.executable, "-c", script], b"", dict(os.environ), [])
    await over(worker)
    assert worker.exit_code == 0
    os.kill(int(worker.tail[-1]), signal.SIGKILL)
