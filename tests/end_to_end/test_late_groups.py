"""A group whose steps begin to take three times as long, under a daemon that watches it."""

from __future__ import annotations

import asyncio

from daemon_process import StartDaemon
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import SubmitOptions

CONFIG = """
engine = "simulated"
slots = 16
[simulated]
step_ms = 8.0
max_model_len = 4096
[[groups]]
name = "steady"
devices = ["cpu:0"]
[[groups]]
name = "late"
devices = ["cpu:0"]
[groups.simulated]
step_ms = 8.0
max_model_len = 4096
burst_factor = 3.0
burst_after_s = 6.0
burst_every_s = 0.01
burst_s = 1000000.0
"""


def chain(tokens: int) -> Chain:
    return Chain(
        name="long", agents=[Agent(name="writer", prompt_ids=[*range(200)], max_tokens=tokens, ignore_eos=True)]
    )


async def test_hops_are_moved_off_it_and_no_other_comes(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(CONFIG)
    series = SubmitOptions(mode="serial")
    async with daemon.client() as client:
        beside, late = await asyncio.gather(*(client.run(chain(1500), None, series) for _ in range(2)))
        if late.agents[0].hops[0].worker == "steady":
            beside, late = late, beside
        later = await client.run(chain(20), None, series)
        status = await client.status()
    (agent,) = late.agents
    assert [(hop.worker, hop.state) for hop in agent.hops] == [("late", "moved"), ("steady", "finished")]
    assert agent.hops[0].tokens + agent.hops[1].tokens == agent.output_tokens == 1500
    assert agent.output_ids == beside.agents[0].output_ids
    assert late.resumed
    assert agent.resumed[0].why.startswith("moved to steady: of late, its tokens take ")
    assert later.agents[0].worker == "steady"
    assert "without late: " in later.why
    steady, slow = status.workers
    assert (steady.health.state, steady.health.episodes) == ("healthy", 0)
    assert slow.health.episodes == 1
    (episode,) = daemon.log_events("decode_jitter")
    assert episode["worker"] == "late"
    (moved,) = daemon.log_events("hop_moved")
    assert (moved["worker"], moved["to"], moved["chain"]) == ("late", "steady", late.id)
    assert moved["tokens"] == agent.hops[0].tokens < 1400
    assert float(str(moved["there_ms"])) < float(str(moved["left_ms"]))
