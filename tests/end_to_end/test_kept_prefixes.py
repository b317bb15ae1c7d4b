"""A known chain comes back after others that filled the caches: through the daemon, on simulated engines."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from daemon_process import HANG_SECONDS, StartDaemon
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import AgentResult, SubmitOptions
from pingpong_client import AsyncClient
from prefix_reuse import ReuseRun, render
from runs import read_lines

ROOT = Path(__file__).parents[2]
CONFIG = """
instance = "test"
engine = "simulated"
calibrate = false

[simulated]
step_ms = 0.2
row_us = 1.0
kv_tokens = 4096
block_size = 16
max_num_batched_tokens = 2048

[prefixes]
keep = {keep}

[[groups]]
name = "one"
devices = ["cpu:0"]

[[groups]]
name = "two"
devices = ["cpu:0"]
"""
STATIC = 640


def chain(name: str, text: str, static: int = STATIC) -> Chain:
    """Two agents with long beginnings, and an input at the end of the first one's prompt."""

    def ids(agent: str) -> list[int]:
        draw = random.Random(f"{name} {agent}")
        return [draw.randrange(100, 250) for _ in range(static)]

    first = Agent(name="first", prompt_ids=[*ids("first"), *text.encode()], max_tokens=4, ignore_eos=True)
    second = Agent(name="second", prompt_ids=[*ids("second"), "{{first}}"], max_tokens=4, ignore_eos=True)
    return Chain(name=name, agents=[first, second])


async def run(client: AsyncClient, what: Chain, **options: object) -> list[AgentResult]:
    result = await client.run(what, None, SubmitOptions(**{"mode": "serial", "group": "one", **options}))  # type: ignore[arg-type]
    return result.agents


async def flood(client: AsyncClient) -> None:
    for other in range(30):
        await run(client, chain(f"other{other}", "input", 200))


@pytest.mark.parametrize(("keep", "found"), [(0.5, True), (0.0, False)])
async def test_a_known_chain_finds_its_beginnings_after_others(
    start_daemon: StartDaemon, keep: float, found: bool
) -> None:
    daemon = await start_daemon(CONFIG.format(keep=keep))
    async with AsyncClient(daemon.socket) as client:
        for text in ("one", "two"):
            await run(client, chain("known", text))
        await flood(client)
        agents = await run(client, chain("known", "three"))
        # 16 tokens to a block; what the first one's prompt begins with alike is known by 64s.
        assert [agent.cached_tokens for agent in agents] == ([STATIC, STATIC] if found else [0, 0])
        # `isolate` finds nothing, and teaches nothing.
        await run(client, chain("alone", "one"), isolate=True)
        await run(client, chain("alone", "two"), isolate=True)
        await run(client, chain("alone", "three"))
        await flood(client)
        assert [agent.cached_tokens for agent in await run(client, chain("alone", "four"))] == [0, 0]
        # And the daemon believes so: with nothing cold to read ahead, `auto` takes the group that has it all.
        again = await run(client, chain("known", "five"), mode="auto", group=None)
        assert ([agent.worker for agent in again] == ["one", "one"]) is found


async def test_the_benchmark_runs_and_shows_it(folder: Path) -> None:
    config = folder / "config.toml"
    config.write_text(CONFIG.split("[prefixes]")[0] + "[[groups]]" + CONFIG.split("[[groups]]")[1])
    out = folder / "reuse.jsonl"
    arguments = [
        "--config",
        config,
        "--out",
        out,
        "--rounds",
        "1",
        "--prefix",
        "320",
        "--other",
        "120",
        "--others",
        "30",
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *map(str, [ROOT / "benchmarks" / "prefix_reuse.py", *arguments]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    text, errors = await asyncio.wait_for(process.communicate(), HANG_SECONDS)
    assert process.returncode == 0, errors.decode()
    runs = read_lines(out, ReuseRun)
    assert [(run.side, run.moment) for run in runs] == [
        (side, moment) for side in ("nothing", "on the device") for moment in ("cold", "again", "warm", "after")
    ]
    nothing, kept = runs[3], runs[7]
    assert nothing.cached_tokens == [0, 0, 0]
    assert kept.cached_tokens == [320, 320, 320]
    assert kept.other_tokens > kept.kv_tokens
    assert render(runs) in text.decode()
    assert kept.provenance["engines"][0]["keep_tokens"] == 2048
