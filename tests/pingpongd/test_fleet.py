"""The fleet with real processes: workers that die, hang, crash in a loop, are drained; none is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fleet_host import CHAIN, fleet_config, fleet_host


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("f")


async def test_a_worker_that_is_killed_is_replaced(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("ab")) as host:
        host.start_hop("a", max_tokens=4000)
        host.signal(signal.SIGKILL, "a")
        await host.serves_again("a")
        assert host.notes.lost == [("a", 'worker "a" is gone: it ended with signal 9.')]
        assert host.notes.alive_when_lost == [False]
        assert host.notes.ready == ["a", "b", "a"] or host.notes.ready == ["b", "a", "a"]
        assert (host["a"].status().restarts, host["b"].status().restarts) == (1, 0)
        assert host["a"].status().failure == "it ended with signal 9"
        assert len(host["a"].hops) == 0
        assert len(await host.fleet.prepare(CHAIN, {})) == 1
        hop = host.start_hop("a")
        await host.until(lambda: bool(host.notes.ended()), "the hop's end")
        assert [(end.hop, end.state) for end in host.notes.ended()] == [(hop, "finished")]
