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
    assert await pool.run(Extract(regex=r"\d+"), "n 1") == "1"  # in the second process
    with pytest.raises(ChainFailed, match="longer than 1 s"):
        await hanging
    assert loop.time() - began < 30
    assert len(_children()) == 1
    assert await pool.run(Extract(regex=r"\d+"), "n 2") == "2"


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
