"""A daemon that measures its engines, explains a chain, runs it and says how near it came."""

from __future__ import annotations

import pytest

from daemon_process import StartDaemon, simulated_config
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import SubmitOptions

SLOW_PROMPTS = (
    simulated_config(step_ms=1.0).replace("calibrate = false\n", "").replace("row_us = 20.0", "row_us = 60.0")
)
PREFIX = 1000
CHAIN = Chain(
    name="three",
    agents=[
        Agent(
            name=f"a{at}",
            prompt_ids=[*range(at * PREFIX, (at + 1) * PREFIX), *([f"{{{{a{at - 1}}}}}"] if at else [])],
            max_tokens=60,
            ignore_eos=True,
        )
        for at in range(3)
    ],
)


async def test_a_chain_is_explained_placed_by_prediction_and_compared(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(SLOW_PROMPTS)
    async with daemon.client() as client:
        assert all(worker.figures is not None for worker in (await client.status()).workers)
        explained = await client.explain(CHAIN)
        assert await client.list() == []
        result = await client.run(CHAIN)
        told = await client.run(CHAIN, options=SubmitOptions(mode="serial", group="b", isolate=True))
        kept = await client.result(result.id)
    # Prompts of 60 ms behind decodes of 60: two engines hide them.
    assert explained.placement == "ping-pong"
    assert explained.chosen is not None
    assert explained.chosen.hidden_ms > 40
    assert result.placement == explained.placement
    assert result.predicted_ms == pytest.approx(explained.chosen.e2e_ms, rel=0.1)
    assert result.predictions[0].e2e_ms < min(one.e2e_ms for one in result.predictions if one.placement == "serial")
    assert kept.predictions == result.predictions
    assert [one.placement for one in told.predictions] == ["serial"]
    assert [entry["chain"] for entry in daemon.log_events("prediction")] == [result.id, told.id]
