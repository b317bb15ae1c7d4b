"""Draining a worker: its hops finish, a fresh one takes its place, others go on meanwhile."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest

from chains_desk import LIMITS
from fleet_host import fleet_config, fleet_host
from pingpong_bus.errors import EngineError, EngineLost
from pingpongd.worker_handle import HopSet, Worker


async def test_an_idle_worker(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("ab")) as host:
        pid = host.pid("a")
        await host.fleet.drain(host["a"], 60.0)
        assert host["a"].state == "ready"
        assert host.pid("a") != pid
        assert host["a"].status().restarts == 1
        assert host["a"].status().failure == ""  # it did nothing wrong
        assert host["b"].number == 1


async def test_a_running_hop_finishes_first_and_others_are_refused(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("ab")) as host:
        hop = host.start_hop("a", max_tokens=300)
        draining = asyncio.create_task(host.fleet.drain(host["a"], 60.0))
        await host.until(lambda: host["a"].state == "draining", "draining")
        assert [view.name for view in host.fleet.views()] == ["b"]
        with pytest.raises(EngineLost, match="it is draining"):
            host.start_hop("a")
        with pytest.raises(EngineError, match="being drained already"):
            await host.fleet.drain(host["a"], 60.0)
        other = host.start_hop("b")
        await draining
        ends = {end.hop: (end.state, end.output_tokens) for end in host.notes.ended()}
        assert ends == {hop: ("finished", 300), other: ("finished", 8)}
        assert host["a"].number == 2


async def test_a_hop_that_runs_at_the_deadline_is_lost(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a", simulated={"step_ms": 20.0})) as host:
        hop = host.start_hop("a", max_tokens=4000)
        await host.fleet.drain(host["a"], 0.2)
        assert [(end.hop, end.state) for end in host.notes.ended()] == [(hop, "lost")]
        assert host.notes.lost == [("a", 'worker "a" is gone: it was drained.')]
        assert host.notes.alive_when_lost == [False]
        assert host["a"].number == 2


async def test_a_drain_that_is_given_up_changes_nothing(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a")) as host:
        host.start_hop("a", max_tokens=4000)
        draining = asyncio.create_task(host.fleet.drain(host["a"], 60.0))
        await host.until(lambda: host["a"].state == "draining", "draining")
        draining.cancel()
        await asyncio.wait({draining})
        assert host["a"].state == "ready"
        assert host["a"].number == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_that_dies_or_hangs_while_it_drains(folder: Path, number: signal.Signals) -> None:
    config = fleet_config("a", watch={"heartbeat_s": 0.1, "misses": 12})
    async with fleet_host(folder, config) as host:
        host.start_hop("a", max_tokens=4000)
        draining = asyncio.create_task(host.fleet.drain(host["a"], 600.0))
        await host.until(lambda: host["a"].state == "draining", "draining")
        host.signal(number)
        await draining
        assert host["a"].number == 2
        assert [name for name, _ in host.notes.lost] == ["a"]


async def test_one_that_does_not_serve_yet(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a", simulated={"start_ms": 300.0})) as host:
        host.signal(signal.SIGKILL)
        await host.until(lambda: host["a"].state in ("dead", "waiting", "loading"), "its end")
        await host.fleet.drain(host["a"], 60.0)
        assert host["a"].number == 2


async def test_no_fresh_one_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet_host(folder, fleet_config("ab", restart={"give_up_after": 2})) as host:
        monkeypatch.setenv("PYTHONHOME", "/nowhere")
        with pytest.raises(EngineError, match='no fresh worker serves group "a"'):
            await host.fleet.drain(host["a"], 60.0)
        assert [name for name, _ in host.notes.failed] == ["a"]


async def test_a_group_that_was_given_up_begins_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet_host(folder, fleet_config("ab", restart={"give_up_after": 2})) as host:
        await host.kill_until_given_up("a")
        await asyncio.gather(*(host.fleet.drain(host["a"], 60.0) for _ in range(2)))
        assert (host["a"].state, host["a"].number) == ("ready", 3)
        assert host.notes.ready == ["a", "b", "a", "a"] or host.notes.ready == ["b", "a", "a", "a"]
        hop = host.start_hop("a")
        await host.until(lambda: bool(host.notes.ended()), "the hop's end")
        assert [(end.hop, end.state) for end in host.notes.ended()] == [(hop, "finished")]
        host.signal(signal.SIGKILL)
        await host.serves_again(after=3)  # its old ends no longer count
        monkeypatch.setenv("PYTHONHOME", "/nowhere")
        await host.kill_until_given_up("a")
        with pytest.raises(EngineError, match='no fresh worker serves group "a"'):
            await host.fleet.drain(host["a"], 60.0)
        assert host["a"].state == "failed"
        assert [name for name, _ in host.notes.failed] == ["a", "a", "a"]


async def test_the_daemon_stops_meanwhile(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a", simulated={"start_ms": 2000.0})) as host:
        draining = asyncio.create_task(host.fleet.drain(host["a"], 60.0))
        await host.until(lambda: host["a"].number == 2, "the next start")
        await host.fleet.stop()
        with pytest.raises(EngineError, match="the daemon stops"):
            await draining


async def test_a_set_of_hops_tells_of_changes() -> None:
    told: list[str] = []
    hops = HopSet(lambda: told.append(repr(hops)))
    hops.add("x")
    hops.add("y")
    hops.discard("x")
    hops.clear()
    assert told == ["HopSet(['x'])", "HopSet(['x', 'y'])", "HopSet(['y'])", "HopSet([])"]
    assert not hops


def test_a_group_that_overlaps_without_our_scheduler_is_seen_as_not_paced() -> None:
    worker = Worker(fleet_config("a").groups[0], "")
    assert not worker.view().overlap
    worker.limits = msgspec.structs.replace(LIMITS, decode_first=False, overlap=True)
    assert (worker.view().overlap, worker.view().paced) == (True, False)


async def test_waiting_for_a_condition() -> None:
    worker = Worker(fleet_config("a").groups[0], "")
    waiting = asyncio.create_task(worker.until(lambda: worker.state == "ready" and not worker.hops))
    await asyncio.sleep(0)
    worker.hops.add("x")
    worker.state = "ready"
    await asyncio.sleep(0)
    assert not waiting.done()
    worker.hops.discard("x")
    await waiting
