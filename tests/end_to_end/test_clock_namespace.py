"""Workers whose clock is not the daemon's: the times of a chain fit together all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import clock_namespace
from clock_namespace import AHEAD_S
from daemon_process import DaemonProcess, simulated_config
from pingpong_bus.chain import parse_chain
from pingpong_client import SubmitOptions

SCRIPT = str(Path(clock_namespace.__file__))


class ShiftedDaemon(DaemonProcess):
    program = (SCRIPT,)


def refused() -> str:
    """Why no time namespace can be had here; empty where one can."""
    tried = subprocess.run([sys.executable, SCRIPT, "--probe"], check=False, capture_output=True, text=True)
    return tried.stderr.strip().rsplit("\n", 1)[-1] if tried.returncode else ""


async def test_times_of_workers_in_another_time_namespace_are_brought_to_our_clock(folder: Path) -> None:
    if why := refused():
        pytest.skip(f"no time namespace: {why}")
    daemon = ShiftedDaemon(folder, simulated_config())
    try:
        await daemon.ready()
        agents = [
            {"name": "a", "prompt_ids": list(range(1, 200)), "max_tokens": 20},
            {"name": "b", "prompt_ids": [*range(1, 200), "{{a}}"], "max_tokens": 20},
        ]
        chain = parse_chain(json.dumps({"name": "c", "agents": agents}).encode())
        async with daemon.client() as client:
            result = await client.run(chain, {}, SubmitOptions(mode="ping-pong"))
        assert result.e2e_ms is not None
        assert result.started_ms is not None
        assert 0 < result.e2e_ms < 60_000
        for agent in result.agents:
            (hop,) = agent.hops
            moments = [hop.opened_ms, hop.finalized_ms, hop.first_token_ms, hop.ended_ms]
            known = [at for at in moments if at is not None]
            assert known == sorted(known)
            assert len(known) == 4
            # Joined to within what the two messages took; a clock that was not joined is off by 1,000 s.
            assert result.started_ms - 5000 < known[0] < known[-1] <= result.e2e_ms + 5000
        warned = daemon.log_events("worker_clock_off")
        assert {line["worker"] for line in warned} == {"a", "b"}
        for line in warned:
            offset, error = line["offset_ms"], line["error_ms"]
            assert isinstance(offset, float)
            assert isinstance(error, float)
            assert abs(offset - AHEAD_S * 1e3) <= error
    finally:
        await daemon.stop()
