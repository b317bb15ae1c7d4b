"""Timelines of chains that a real daemon has run, one of them through a worker's death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from daemon_process import DaemonProcess, StartDaemon, simulated_config
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.messages import ChainResult
from pingpong_client import AsyncClient, SubmitOptions
from pingpong_client.timeline_account import account
from pingpong_client.timeline_spans import chain_spans, flows


def chain_of(outputs: int) -> Chain:
    first = {"name": "a", "prompt_ids": list(range(1, 1500)), "max_tokens": outputs, "ignore_eos": True}
    second = {
        "name": "b",
        "prompt_ids": [*range(1, 1200), "{{a}}", 7, 8],
        "max_tokens": 20,
        "ignore_eos": True,
    }
    return parse_chain(json.dumps({"name": "pair", "agents": [first, second]}).encode())


def timeline(daemon: DaemonProcess, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pingpong_client", "--socket", str(daemon.socket), "timeline", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_account(result: ChainResult) -> None:
    """What must hold of any chain that has finished."""
    made = account(result)
    assert result.e2e_ms is not None
    assert sum(step.ms for step in made.path) == pytest.approx(result.e2e_ms, abs=0.01)
    for agent in result.agents:
        assert sum(hop.tokens for hop in agent.hops) == agent.output_tokens
        assert agent.hops[-1].state == "finished"
    for hop in chain_spans(result):
        assert hop.entry.worker in result.devices
        appended = sum(span.tokens for span in hop.spans if span.kind == "append")
        if hop.entry.finalized_ms is not None:
            assert appended + hop.entry.final_tokens == hop.entry.prompt_tokens


async def test_a_chain_that_read_ahead(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(simulated_config(step_ms=2.0))
    async with daemon.client() as client:
        result = await client.run(chain_of(200), {}, SubmitOptions(mode="ping-pong"))
    check_account(result)
    made = account(result)
    assert made.hidden_tokens > 1000
    assert made.hidden_ms > 0
    # Every token of the first agent was taken by the second, once.
    assert sum(flow.tokens for flow in flows(result)) == 200
    assert result.devices == {"a": ["cpu:0"], "b": ["cpu:0"]}
    text = await asyncio.to_thread(timeline, daemon, result.id)
    assert f"{result.e2e_ms:,.0f} ms =" in text
    path = tmp_path / "trace.json"
    await asyncio.to_thread(timeline, daemon, result.id, "-o", str(path))
    trace = json.loads(path.read_bytes())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "s", "f"}


async def test_a_worker_that_dies_is_in_the_timeline(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(step_ms=5.0))
    async with daemon.client() as client:
        chain = await client.submit(chain_of(300), {}, SubmitOptions(mode="ping-pong"))
        await _kill_writer(client, chain)
        result = await client.wait(chain)
    assert result.state == "finished"
    check_account(result)
    lost, *_, last = result.agents[0].hops
    assert (lost.state, lost.tokens_before) == ("lost", 0)
    assert "signal 9" in lost.why
    assert last.tokens_before == lost.tokens > 0
    assert account(result).wasted.resumed_tokens == last.tokens_before
    assert "✗" in await asyncio.to_thread(timeline, daemon, result.id)


async def _kill_writer(client: AsyncClient, chain: str) -> None:
    """Kill the first agent's worker once it has written some tokens, and before it has written all."""
    async with asyncio.timeout(60):
        while True:
            agent = (await client.result(chain)).agents[0]
            if agent.output_tokens > 20:
                break
            await asyncio.sleep(0.01)
    (pid,) = [worker.pid for worker in (await client.status()).workers if worker.name == agent.worker]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
