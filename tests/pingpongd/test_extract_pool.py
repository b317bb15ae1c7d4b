"""Extract steps run in processes that are kept, and replaced where they hang or die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from pingpong_bus.chain import Extract
from pingpong_bus.errors import ChainFailed
from pingpongd import extract_pool
from pingpongd.extract_pool import ExtractPool

HANGS = Extract(regex="(a+)+$")
ENDLESS = "a" * 60 + "b"


@pytest.fixture
async def pool() -> AsyncIterator[ExtractPool]:
    pool = ExtractPool(limit_s=1.0)
    yield pool
    await pool.close()
    assert not _children()


def _children() -> set[int]:
    found = set()
    for child in psutil.Process().children():
        try:
            if "pingpongd.extract_process" in child.cmdline():
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


async def test_a_process_is_kept_for_the_next_step(pool: ExtractPool) -> None:
    assert not _children()
    assert await pool.run(Extract(regex=r"\d+"), "n 1") == "1"
    first = _children()
    assert len(first) == 1
    assert await pool.run(Extract(json="$.a"), '{"a": "\\ud83d\\ude00 \\ud800"}') == "😀 �"
    assert await pool.run(Extract(fenced=""), "```\n" + "é" * 200_000 + "\n```") == "é" * 200_000
    assert _children() == first


async def test_nothing_found_is_an_error_or_what_is_taken_otherwise(pool: ExtractPool) -> None:
    with pytest.raises(ChainFailed, match="no JSON value"):
        await pool.run(Extract(json="$"), "none")
    assert await pool.run(Extract(json="$", otherwise=""), "none") == ""


async def test_an_expression_that_takes_for_ever_is_ended_and_holds_up_nobody(pool: ExtractPool) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    hanging = asyncio.create_task(pool.run(HANGS, ENDLESS))
    assert await pool.run(Extract(regex=r"\d+"), "n 1") == "1"
    with pytest.raises(ChainFailed, match="longer than 1 s"):
        await hanging
    assert loop.time() - began < 30
    assert await pool.run(Extract(regex=r"\d+"), "n 2") == "2"
    assert len(_children()) == 1


async def test_those_that_take_for_ever_hold_up_their_like_alone() -> None:
    pool = ExtractPool(limit_s=20.0)
    assert await pool.run(Extract(regex="a+"), "aa") == "aa"
    hanging = [asyncio.create_task(pool.run(HANGS, ENDLESS)) for _ in range(6)]
    await asyncio.sleep(0)
    async with asyncio.timeout(15):  # none of the six is through by then
        assert await pool.run(Extract(json="$.a"), '{"a": 1}') == "1"
        assert await pool.run(Extract(regex=r"\d+"), "n 1") == "1"
    assert not any(task.done() for task in hanging)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    await pool.close()
    assert not _children()


async def test_a_step_that_waits_has_not_begun() -> None:
    pool = ExtractPool(limit_s=20.0)
    began: list[int] = []

    def run(number: int) -> asyncio.Task[str]:
        return asyncio.create_task(pool.run(HANGS, ENDLESS, lambda: began.append(number)))

    tasks = [run(number) for number in range(4)]
    async with asyncio.timeout(15):
        while len(began) < 2:
            await asyncio.sleep(0.01)
    assert began == [0, 1]
    tasks[0].cancel()
    async with asyncio.timeout(15):
        while len(began) < 3:
            await asyncio.sleep(0.01)
    assert began == [0, 1, 2]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.close()


async def test_what_takes_longer_than_a_moment_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_pool, "_MOMENT", 0.001)
    pool = ExtractPool(limit_s=30.0)
    began: list[int] = []
    for _ in range(2):
        with pytest.raises(ChainFailed, match="matches nothing"):
            await pool.run(HANGS, "a" * 23 + "b", lambda: began.append(1))
    assert began == [1, 1]
    assert list(pool._known) == [HANGS.regex]
    await pool.close()


async def test_a_cancelled_step_ends_its_process(pool: ExtractPool) -> None:
    hanging = asyncio.create_task(pool.run(HANGS, ENDLESS))
    while not _children():
        await asyncio.sleep(0.01)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert not _children()


async def test_a_process_that_died_while_it_waited_is_replaced(pool: ExtractPool) -> None:
    assert await pool.run(Extract(regex=r"\d+"), "n 1") == "1"
    (pid,) = _children()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert await pool.run(Extract(regex=r"\d+"), "n 2") == "2"
    assert pid not in _children()


async def test_a_process_can_be_ready_before_the_first_step(pool: ExtractPool) -> None:
    pool.warm()
    pool.warm()
    async with asyncio.timeout(30):
        while not pool._idle:
            await asyncio.sleep(0.01)
    first = _children()
    assert len(first) == 1
    pool.warm()
    assert await pool.run(Extract(regex=r"\d+"), "n 1") == "1"
    assert _children() == first


async def test_one_that_is_being_made_ready_is_ended_with_the_pool(pool: ExtractPool) -> None:
    pool.warm()
    while not _children():
        await asyncio.sleep(0)
    await pool.close()
    assert not _children()
