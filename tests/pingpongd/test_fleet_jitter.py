"""The jitter watchdog at real processes: an engine that stands still for a moment is noticed, and comes back."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil

from fleet_host import fleet_config, fleet_host
from pingpong_bus.messages import AbortHop


async def test_an_engine_that_is_stopped_for_a_moment_is_degraded_and_comes_back(folder: Path) -> None:
    config = fleet_config("a", simulated={"step_ms": 10.0, "max_model_len": 20_000}, jitter={"quiet_s": 2})
    async with fleet_host(folder, config) as host:
        worker, told = host["a"], list[tuple[str, float]]()
        host.fleet.health_listeners.append(lambda worker: told.append((worker.health.state, worker.itl.p50_ms)))
        hop = host.start_hop(max_tokens=15_000)
        await host.until(lambda: len(worker.itl.history_ms) >= 12 and worker.itl.usual_ms > 0, "what is usual")
        assert 9.0 < worker.itl.usual_ms < 20.0
        host.note()
        engine, before = psutil.Process(host.engine_pid()), len(told)
        engine.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.4)
        engine.send_signal(signal.SIGCONT)
        await host.until(lambda: worker.health.state != "healthy", "the alarm")
        assert worker.health.episodes > 0
        assert worker.health.cause is not None
        assert worker.view().degraded
        await host.until(lambda: worker.itl.worst_ms > 390, "the wait among the times")
        host.fleet.send(worker, AbortHop(hop=hop))
        await host.until(lambda: worker.health.state == "healthy", "the end of the episode")
        assert [state for state, _ in told[before:]][-1] == "healthy"
        assert worker.host is not None
        assert worker.host.rss_bytes > 0
