"""What a real daemon logs while chains run, fail and are refused: known events only, and nothing that users wrote."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import psutil
import pytest

from daemon_process import DaemonProcess, StartDaemon, simulated_config, until
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import SubmitOptions
from pingpongd.log_catalogue import EVENTS
from pingpongd.log_fields import COMMON

SAID = "zanzibarquux"
"""Stands in every prompt and input, and nowhere else."""
SECRET = "correct-horse-battery"


def chain(*agents: dict[str, Any], **more: Any) -> Chain:
    return parse_chain(json.dumps({"name": "test", "agents": list(agents), **more}).encode())


def lines_of(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.read_text().splitlines()]


async def test_nothing_that_users_wrote_is_logged(start_daemon: StartDaemon) -> None:
    config = f'log_level = "debug"\nlog_worker_output = true\n{simulated_config(step_ms=20.0)}'
    config += f'[environment]\nHF_TOKEN = "{SECRET}"\n'
    daemon = await start_daemon(config)
    said = f"{SAID} is what I said, and " * 8
    writer = {
        "name": "x",
        "system": said,
        "prompt": f"{said} {{{{input.topic}}}}",
        "max_tokens": 60,
        "ignore_eos": True,
    }
    reader = {"name": "y", "prompt": f"{said} {{{{x}}}}", "max_tokens": 4, "ignore_eos": True}
    good = chain(writer, reader, inputs={"topic": SAID})
    too_long = chain({"name": "x", "prompt": "x", "max_tokens": 100_000})
    async with daemon.client() as client:
        assert (await client.run(good, options=SubmitOptions(mode="ping-pong"))).state == "finished"
        for wrong, inputs in ((too_long, {}), (good, {"other": said}), (good, {"topic": SAID * 20_000})):
            with pytest.raises(PingpongError):
                await client.run(wrong, inputs)
        run = asyncio.create_task(client.run(good, {"topic": "other"}, SubmitOptions(mode="ping-pong")))
        await until(lambda: len(daemon.log_events("chain_started")) == 2, "the chain runs")
        victim = next(worker.pid for worker in (await client.status()).workers if worker.pid is not None)
        psutil.Process(victim).kill()
        assert (await run).state == "finished"
    lines = lines_of(daemon)
    assert SAID not in daemon.log.read_text()
    assert SECRET not in daemon.log.read_text()
    names = {line["event"] for line in lines}
    assert {"request_refused", "worker_died", "chain_ended", "agent_finished"} <= names
    for line in lines:
        event = EVENTS[line["event"]]
        assert line["level"] in event.levels
        assert set(line) <= {*event.fields, *COMMON}, line
