"""A daemon of two models that plans a chain with a step in it: where it goes, what it was predicted, what it learns."""

from __future__ import annotations

import pytest

from daemon_process import StartDaemon, simulated_config
from pingpong_bus.chain import Agent, Chain, Extract
from pingpong_bus.errors import UsageError
from pingpong_bus.messages import SubmitOptions
from pingpongd.shapes import STEP_MS

CONFIG = (
    simulated_config(step_ms=1.0).replace("calibrate = false\n", "").replace("row_us = 20.0", "row_us = 60.0")
    + """
model = "large"
[models.large]
model = "simulated-pairs"
[calls.slow]
command = ["python3", "-c", "import sys, time; time.sleep(0.3); print(len(sys.stdin.read()))"]
"""
)
WORDS = " ".join(f"word{number}" for number in range(140))
CHAIN = Chain(
    name="planned",
    agents=[
        Agent(name="write", raw_prompt="Write. " + WORDS, max_tokens=60, ignore_eos=True),
        Agent(name="size", input="{{write}}", call="slow", max_chars=100),
        Agent(name="judge", model="large", raw_prompt="Judge. " + WORDS + "{{size}}", max_tokens=60, ignore_eos=True),
        Agent(name="last", input="{{judge}}", extract=Extract(regex="(?s).{1,8}"), max_chars=100),
        Agent(name="edit", raw_prompt="Edit. " + WORDS + "{{last}}", max_tokens=60, ignore_eos=True),
    ],
)


async def test_a_chain_of_two_models_with_steps_is_planned_run_and_learned_from(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(CONFIG)
    async with daemon.client() as client:
        explained = await client.explain(CHAIN)
        first = await client.run(CHAIN)
        again = await client.explain(CHAIN)
        second = await client.run(CHAIN)
        series = await client.run(CHAIN, options=SubmitOptions(mode="serial", isolate=True))
        with pytest.raises(UsageError, match='"a" serves the default model'):
            await client.run(CHAIN, options=SubmitOptions(group="a"))
        with pytest.raises(UsageError, match="tokens of agent .write. are to be guessed"):
            await client.run(CHAIN, options=SubmitOptions(speculate=True))
    # One group of each model: the agents alternate by themselves, and what steps are read by is read ahead.
    assert explained.chosen is not None
    assert (explained.placement, explained.chosen.groups) == ("ping-pong", ("a", "", "b", "", "a"))
    assert [agent.worker for agent in first.agents if agent.kind == "agent"] == ["a", "b", "a"]
    assert [agent.kind for agent in first.agents] == ["agent", "call", "agent", "extract", "agent"]
    assert sum(len(agent.appends) for agent in first.agents) >= 2
    # How long the steps take was unknown before; now it is counted with.
    hops = [step.hops[-1] for step in first.agents if step.kind != "agent"]
    took_ms = [(hop.ended_ms or 0.0) - hop.started_ms for hop in hops]
    assert again.chosen is not None
    assert explained.chosen.steps_ms == 2 * STEP_MS
    assert took_ms[0] > 300
    assert again.chosen.steps_ms == pytest.approx(sum(took_ms), abs=1.0)
    assert again.chosen.e2e_ms > again.chosen.steps_ms
    assert [one.placement for one in series.predictions] == ["serial"]
    assert [agent.worker for agent in series.agents if agent.kind == "agent"] == ["a", "b", "a"]
    assert first.agents[-1].text == second.agents[-1].text == series.agents[-1].text
    assert {entry["chain"] for entry in daemon.log_events("prediction")} == {first.id, second.id, series.id}
