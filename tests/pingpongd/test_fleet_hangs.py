"""Workers that hang: found by their heartbeats and steps, ended, replaced; and those that only seem to."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from fleet_host import CHAIN, fleet_config, fleet_host

QUICK = {"heartbeat_s": 0.1, "misses": 12, "stall_s": 1.5, "stop_s": 0.5}
"""Quick, and yet a busy machine keeps no healthy worker silent for so long."""
PATIENT = {"heartbeat_s": 0.1, "misses": 300, "stall_s": 30.0}


async def test_a_worker_that_is_stopped_is_replaced(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("ab", watch=QUICK)) as host:
        host.start_hop("a", max_tokens=4000)
        host.signal(signal.SIGSTOP, "a")
        await host.serves_again("a")
        ((name, why),) = host.notes.lost
        assert name == "a"
        assert why.startswith('worker "a" is gone: no heartbeat for ')
        assert host.notes.alive_when_lost == [False]


async def test_a_worker_that_goes_on_in_time_is_left_alone(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a", watch=PATIENT)) as host:
        pid, hop = host.pid(), host.start_hop(max_tokens=400)
        host.signal(signal.SIGSTOP)
        await asyncio.sleep(1)
        host.signal(signal.SIGCONT)
        await host.until(lambda: bool(host.notes.ended()), "the hop's end")
        assert [(end.hop, end.state, end.output_tokens) for end in host.notes.ended()] == [(hop, "finished", 400)]
        assert host.pid() == pid
        assert host.notes.lost == []


async def test_an_engine_that_makes_no_step_is_replaced(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a", watch=QUICK)) as host:
        host.start_hop(max_tokens=4000)
        await host.until(lambda: host["a"].output_tokens > 10, "steps, by which the next one is predicted")
        host.note()
        psutil.Process(host.engine_pid()).send_signal(signal.SIGSTOP)
        await host.serves_again()
        ((_, why),) = host.notes.lost
        assert why.startswith('worker "a" is gone: 1 submission has waited ')


async def test_a_slow_step_is_no_hang(folder: Path) -> None:
    """Each step takes longer than the stall's limit, as the first of them has shown."""
    config = fleet_config("a", watch=QUICK | {"stall_s": 0.6}, simulated={"step_ms": 400.0})
    async with fleet_host(folder, config) as host:
        host.start_hop(max_tokens=6)
        await host.until(lambda: bool(host.notes.ended()), "the hop's end")
        assert host.notes.ended()[0].state == "finished"
        assert host.notes.lost == []


async def test_a_machine_that_stood_still_blames_nobody(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("ab", watch=QUICK)) as host:
        pids = host.pid("a"), host.pid("b")
        for _ in range(2):
            host.signal(signal.SIGSTOP, "a")
            time.sleep(2)  # noqa: ASYNC251 - the event loop stands still, as if this process were stopped, too
            host.signal(signal.SIGCONT, "a")
            await asyncio.sleep(0.3)
        assert (host.pid("a"), host.pid("b")) == pids
        assert host.notes.lost == []


async def test_one_that_is_stopped_while_it_loads(folder: Path) -> None:
    config = fleet_config("a", watch=QUICK | {"misses": 2}, simulated={"start_ms": 1000.0})
    async with fleet_host(folder, config, start=False) as host:
        starting = host.start()
        await host.until(lambda: host["a"].stage.startswith("loading the"), "loading")
        host.signal(signal.SIGSTOP)
        await starting
        assert host["a"].number == 2
        assert host["a"].status().failure == "it stood stopped while it was loading, at 2 looks in a row"


async def test_an_engine_that_is_stopped_while_it_loads(folder: Path) -> None:
    config = fleet_config("a", watch=QUICK | {"misses": 2}, simulated={"start_ms": 1000.0})
    async with fleet_host(folder, config, start=False) as host:
        starting = host.start()
        await host.until(lambda: host["a"].stage.startswith("loading the"), "loading")
        await host.until(lambda: bool(psutil.Process(host.pid()).children()), "the engine's process")
        host.note()
        psutil.Process(host.engine_pid()).send_signal(signal.SIGSTOP)
        await starting
        assert host["a"].number == 2


async def test_a_request_finds_another_worker(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("ab", watch=QUICK)) as host:
        host.signal(signal.SIGSTOP, "a")
        async with asyncio.timeout(60):
            assert len(await host.fleet.prepare(CHAIN, {})) == 1
        await host.serves_again("a")


@pytest.mark.parametrize("fast", [False, True])
async def test_stopped_workers_do_not_hold_up_the_end(folder: Path, fast: bool) -> None:
    async with fleet_host(folder, fleet_config("ab", watch=PATIENT)) as host:
        host.start_hop("a", max_tokens=4000)
        host.signal(signal.SIGSTOP, "a")
        psutil.Process(host.engine_pid("b")).send_signal(signal.SIGSTOP)
        async with asyncio.timeout(9):  # less than what a worker that was asked may take
            await host.fleet.stop(fast=fast)


async def test_one_that_is_stopped_while_it_ends(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a", watch=PATIENT)) as host:
        stopping = asyncio.create_task(host.fleet.stop())
        await asyncio.sleep(0)
        os.kill(host.pid("a"), signal.SIGSTOP)  # at once: a simulated worker ends within milliseconds
        assert host["a"].state == "stopping"
        async with asyncio.timeout(9):
            await stopping


async def test_a_second_signal_kills_what_the_first_one_asked(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("ab", watch=PATIENT)) as host:
        host.start_hop("a", max_tokens=4000)
        stopping = asyncio.create_task(host.fleet.stop())
        await asyncio.sleep(0)
        await host.fleet.stop(fast=True)
        await stopping
        assert [host[name].state for name in "ab"] == ["dead", "dead"]


async def test_the_end_while_workers_load_or_wait(folder: Path) -> None:
    config = fleet_config("ab", restart={"backoff_s": 60.0, "backoff_max_s": 60.0}, simulated={"start_ms": 60_000.0})
    async with fleet_host(folder, config, start=False) as host:
        starting = host.start()
        await host.until(lambda: host["a"].state == host["b"].state == "loading", "loading")
        host.signal(signal.SIGKILL, "a")
        await host.until(lambda: host["a"].state == "waiting", "back-off")
        starting.cancel()
        async with asyncio.timeout(9):
            await host.fleet.stop()
