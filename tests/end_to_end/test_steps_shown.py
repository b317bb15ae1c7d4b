"""What the commands show of a chain of two models with steps, run by a real daemon."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest

from daemon_process import DaemonProcess, StartDaemon, simulated_config
from pingpong_bus.messages import ChainResult
from pingpong_client.timeline_account import account
from pingpong_client.timeline_spans import chain_spans, flows, lanes

WORDS = " ".join(f"word{number}" for number in range(140))
CONFIG = (
    simulated_config(step_ms=1.0)
    + """
model = "large"
[models.large]
model = "simulated-pairs"
[calls.count]
command = ["python3", "-c", "import sys, time; time.sleep(0.2); print(len(sys.stdin.read()))"]
[http]
listen = "127.0.0.1:0"
"""
)
CHAIN = {
    "name": "counted",
    "agents": [
        {"name": "write", "raw_prompt": f"Write. {WORDS}", "max_tokens": 40, "ignore_eos": True},
        {"name": "size", "input": "{{write}}", "call": "count", "max_chars": 100},
        {"name": "judge", "model": "large", "raw_prompt": f"Judge. {WORDS}{{{{size}}}}", "max_tokens": 30,
         "ignore_eos": True},
        {"name": "start", "input": "{{judge}}", "extract": {"regex": "(?s).{1,8}"}, "max_chars": 100},
    ],
}  # fmt: skip


def command(daemon: DaemonProcess, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pingpong_client", "--socket", str(daemon.socket), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_steps_and_models_are_shown_by_every_command(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(CONFIG)
    file = tmp_path / "counted.json"
    file.write_text(json.dumps(CHAIN))

    async def shown(*words: str) -> str:
        return await asyncio.to_thread(command, daemon, *words)

    submitted = (await shown("submit", str(file))).splitlines()
    chain_id = submitted[-1].split(":")[0]
    rows = {line.split()[0]: line.split() for line in submitted if line}
    assert rows["agent"][1] == "model"
    assert rows["size"][2] == "(call)"
    assert rows["start"][2:9] == ["(extract)", "-", "-", "8", "chars", "-", rows["start"][8]]
    assert rows["write"][1] != rows["judge"][1]

    result = msgspec.json.decode(await shown("result", chain_id, "--json"), type=ChainResult)
    made = account(result)
    assert sum(step.ms for step in made.path) == pytest.approx(result.e2e_ms, abs=0.01)
    assert 200 <= made.spent_ms("step") < 2000
    assert [lane.title for lane in lanes(result)] == ["a", "b", "steps"]
    assert made.agents[2].hidden_tokens >= 100  # its static beginning, while the call still ran
    readers = [(flow.writer.agent, flow.reader.agent) for flow in flows(result)]
    assert {(0, 1), (1, 2), (2, 3)} <= set(readers)
    assert all(hop.entry.worker == "" for hop in chain_spans(result) if result.agents[hop.agent].kind != "agent")

    assert "═" in await shown("timeline", chain_id)
    await shown("timeline", chain_id, "-o", str(tmp_path / "t.html"))
    assert "step between agents" in (tmp_path / "t.html").read_text()
    await shown("timeline", chain_id, "-o", str(tmp_path / "t.json"))
    trace = json.loads((tmp_path / "t.json").read_text())
    assert "steps between agents" in {event["args"].get("name") for event in trace["traceEvents"] if event["ph"] == "M"}
    status = await shown("status")
    assert any(line.split()[:3] == ["worker", "devices", "model"] for line in status.splitlines())
    assert "model" in await shown("top", "--once")
    verified = await shown("verify", str(file), "--exactness", "fast", "--mode", "ping-pong")
    assert "verdict    equal: 1 of 1 runs equal" in verified
    assert any(line.split()[:2] == ["start", "-"] for line in verified.splitlines())

    (serving,) = daemon.log_events("http_serving")
    page = await asyncio.to_thread(_get, f"http://127.0.0.1:{serving['port']}/metrics")
    assert 'pingpong_chain_steps_total{kind="call",state="finished"} 3.0' in page
    assert 'pingpong_prompt_tokens_total{worker=""}' not in page


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - of our own daemon
        body: bytes = answer.read()
    return body.decode()
