"""The daemon with two models of different tokenizers, on simulated engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import msgspec
import pytest

from daemon_process import DaemonProcess, StartDaemon
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import ChainError, ChainFailed
from pingpong_bus.messages import ChainResult, SubmitOptions
from pingpong_client.verification import verify

CONFIG = """
engine = "simulated"
calibrate = false
[simulated]
step_ms = 2.0
row_us = 20.0
max_model_len = 3000
[models.pairs]
model = "simulated-pairs"
[calls.same]
command = ["cat"]
[[groups]]
name = "a"
devices = ["cpu:0"]
[[groups]]
name = "b"
devices = ["cpu:0"]
model = "pairs"
[[groups]]
name = "c"
devices = ["cpu:0"]
model = "pairs"
"""
LONG = "the static part of a long instruction. " * 12


def chain(*agents: dict[str, Any], **more: Any) -> Chain:
    document = {"name": "two", "agents": [{"ignore_eos": True, **agent} for agent in agents]} | more
    return parse_chain(json.dumps(document).encode())


CHAIN = chain(
    {"name": "one", "prompt": "write", "max_tokens": 40},
    {"name": "two", "model": "pairs", "prompt": f"{LONG} a{{{{one}}}}b, and shorten", "max_tokens": 40},
    {"name": "three", "prompt": f"{LONG} compare {{{{one}}}} with {{{{two}}}}", "max_tokens": 40},
    {"name": "four", "model": "pairs", "join": "text", "prompt": f"{LONG}{{{{two}}}}{{{{three}}}}", "max_tokens": 40},
)


async def run(daemon: DaemonProcess, found: Chain, mode: str, **options: Any) -> ChainResult:
    async with daemon.client() as client:
        given = SubmitOptions(mode=mode, isolate=True, **options)  # type: ignore[arg-type]
        return await client.run(found, options=given)


async def test_reading_ahead_over_two_tokenizers_gives_what_series_gives(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(CONFIG)
    series = await run(daemon, CHAIN, "serial")
    assert series.state == "finished", series.error
    for mode in ("ping-pong", "auto"):
        ahead = await run(daemon, CHAIN, mode)
        assert ahead.state == "finished", ahead.error
        for first, second in zip(series.agents, ahead.agents, strict=True):
            assert (first.prompt_digest, first.output_ids) == (second.prompt_digest, second.output_ids)
        assert [agent.worker == "a" for agent in ahead.agents] == [True, False, True, False]
    assert all(agent.appends for agent in ahead.agents[1:])
    assert all(agent.session == "prefix-cache" for agent in ahead.agents)
    assert [agent.model for agent in ahead.agents][1::2] == ["pairs", "pairs"]
    async with daemon.client() as client:
        assert [worker.model for worker in (await client.status()).workers] == ["", "pairs", "pairs"]


async def test_equal_on_the_grid_too(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(CONFIG)
    series = await run(daemon, CHAIN, "serial", exactness="grid")
    ahead = await run(daemon, CHAIN, "ping-pong", exactness="grid")
    assert [agent.output_ids for agent in series.agents] == [agent.output_ids for agent in ahead.agents]
    assert [agent.prompt_digest for agent in series.agents] == [agent.prompt_digest for agent in ahead.agents]


async def test_verify_certifies_a_chain_over_two_models(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(CONFIG)
    async with daemon.client() as client:
        certificate = await verify(client, CHAIN, runs=2)
    assert (certificate.verdict, certificate.proof, certificate.mode) == ("equal", True, "ping-pong")
    assert certificate.models == ["simulated", "simulated-pairs"]


async def test_a_chain_goes_on_when_the_daemon_and_a_models_worker_are_killed(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(CONFIG)
    reference = await run(daemon, CHAIN, "serial")
    slow = msgspec.structs.replace(
        CHAIN, agents=[msgspec.structs.replace(agent, max_tokens=agent.max_tokens * 5) for agent in CHAIN.agents]
    )
    undisturbed = await run(daemon, slow, "ping-pong")
    async with daemon.client() as client:
        number = await client.submit(slow, options=SubmitOptions(mode="ping-pong", isolate=True))
        while not (agents := (await client.result(number)).agents)[1].output_ids:
            await asyncio.sleep(0.01)
        status = await client.status()
        worker = next(worker for worker in status.workers if worker.name == agents[1].worker)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        result = await client.wait(number)
    assert result.state == "finished", result.error
    assert [agent.output_ids for agent in result.agents] == [agent.output_ids for agent in undisturbed.agents]
    assert all(hop.worker in "bc" for at in (1, 3) for hop in result.agents[at].hops)
    async with daemon.client() as client:
        number = await client.submit(CHAIN, options=SubmitOptions(mode="ping-pong", isolate=True))
    daemon.signal(signal.SIGKILL)
    await daemon.ended()
    again = DaemonProcess(daemon.folder, CONFIG)
    try:
        await again.ready()
        async with again.client() as client:
            result = await client.wait(number)
        assert [agent.output_ids for agent in result.agents] == [agent.output_ids for agent in reference.agents]
    finally:
        await again.stop()


async def test_a_text_that_comes_out_too_long_fails_its_chain_alone(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(CONFIG)
    # Counted as 2,000 ids at submission, for it may have 4,000 characters; here each of them is one.
    long = chain(
        {"name": "one", "prompt": "write", "max_tokens": 4},
        {"name": "step", "input": "{{one}}{{input.text}}", "call": "same", "max_chars": 4000, "ignore_eos": False},
        {"name": "two", "model": "pairs", "prompt": "read {{step}}", "max_tokens": 10},
        inputs={"text": "1" * 3500},
    )
    with pytest.raises(ChainFailed, match=r'agent "two": 35\d\d prompt tokens and 10 to write pass the engine\'s 3000'):
        await run(daemon, long, "auto")
    after = await run(daemon, CHAIN, "auto")
    assert after.state == "finished", after.error
    async with daemon.client() as client:
        assert [worker.restarts for worker in (await client.status()).workers] == [0, 0, 0]


async def test_what_is_too_long_by_any_count_is_refused(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(CONFIG)
    wide = chain(
        {"name": "one", "prompt": "write", "max_tokens": 2000},
        {"name": "two", "model": "pairs", "prompt": "{{one}}", "max_tokens": 10},
    )
    with pytest.raises(ChainError, match=r'agent "two" needs up to 30\d\d tokens .* up to 3000 read'):
        await run(daemon, wide, "auto")
