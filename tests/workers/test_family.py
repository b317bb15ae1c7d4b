"""Who belongs to a worker, and what its process is held up by."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from pingpong_worker import family as family_module
from pingpong_worker.family import Family
from pingpong_worker.garbage_watch import Collections, collections_of_this_process
from pingpong_worker.loop_watch import LoopWatch

HANG_S = 30
PARENT = """
import subprocess, sys, threading, time
sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]
children = [subprocess.Popen(sleeper)]
thread = threading.Thread(target=lambda: (children.append(subprocess.Popen(sleeper)), time.sleep(300)), daemon=True)
thread.start()
while len(children) < 2:
    time.sleep(0.01)
print(children[0].pid, children[1].pid, flush=True)
time.sleep(300)
"""


@pytest.fixture
def three() -> Iterator[list[int]]:
    """A process and two children, one of them started by a thread that still lives."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [process.pid, *map(int, process.stdout.readline().split())]
    yield pids
    for pid in reversed(pids):
        os.kill(pid, 9)
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("listed", [True, False], ids=["the kernel lists children", "it does not"])
def test_a_family_is_found_whichever_thread_has_started_it(
    three: list[int], listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not listed:
        monkeypatch.setattr(family_module, "_lists_children", lambda _: False)
    elif not family_module._lists_children(os.getpid()):
        pytest.skip("this kernel does not list children")
    family = Family(three[0])
    assert family.pids == three[:1]
    family.look()
    assert family.pids[0] == three[0]
    assert set(family.pids) == set(three)
    expected = sum(psutil.Process(pid).memory_info().rss for pid in three)
    assert family.rss_bytes() == pytest.approx(expected, rel=0.05)


def test_grandchildren_belong_to_it(three: list[int]) -> None:
    family = Family(os.getpid())
    family.look()
    assert family.pids[0] == os.getpid()
    assert set(three) <= set(family.pids)


def test_who_is_gone_is_forgotten() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    family = Family(os.getpid())
    family.look()
    assert child.pid in family.pids
    child.kill()
    child.wait()
    assert family.rss_bytes() > 0
    assert child.pid not in family.pids
    gone = Family(child.pid)
    gone.look()
    assert (gone.pids, gone.rss_bytes(), gone.pids) == ([child.pid], 0, [child.pid])


def test_collections_are_timed_once_a_process() -> None:
    watch = collections_of_this_process()
    assert collections_of_this_process() is watch
    assert gc.callbacks.count(watch) == 1
    before, begun = watch.total_ms, time.perf_counter()
    garbage = [[] for _ in range(200_000)]
    gc.collect()
    took = (time.perf_counter() - begun) * 1e3
    assert before < watch.total_ms <= before + took
    del garbage


def test_an_end_without_a_beginning_counts_nothing() -> None:
    watch = Collections()
    watch("stop", {})
    assert watch.total_ms == 0


async def test_a_loop_that_was_held_up_says_for_how_long() -> None:
    watch = LoopWatch(lambda: True)
    try:
        await asyncio.sleep(0.15)
        watch.take_ms()
        time.sleep(0.5)  # noqa: ASYNC251 - holds the loop up: this is what is measured
        held_up = watch.take_ms()
        assert 390 < held_up < HANG_S * 1e3
        async with asyncio.timeout(HANG_S):
            while watch.take_ms() > 100:  # once it is over, it is over
                await asyncio.sleep(0.05)
    finally:
        watch.stop()
