"""Chains for the soak, and what the simulated engine writes for them."""

from __future__ import annotations

import json
import random
from typing import Any

from faults.service import WATCH
from faults.soak import Job
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.messages import Sampling, SubmitOptions
from pingpong_worker.simulated_request import EOS, Request

SIMULATED = """
engine = "simulated"
calibrate = false
log_level = "warning"
slots = 64
drain_seconds = 5
[simulated]
step_ms = 1
row_us = 20
kv_tokens = 4096
max_num_seqs = 16
max_model_len = 2048
[[groups]]
name = "a"
devices = ["cpu:0"]
[[groups]]
name = "b"
devices = ["cpu:0"]
""" + WATCH.replace("give_up_after = 20", "give_up_after = 1000000").replace(
    "backoff_max_s = 1.0", "backoff_max_s = 0.5"
)
"""Room for a handful of chains at once: the others wait, for logs and for memory."""


def simulated_jobs(count: int, seed: int) -> list[Job]:
    """Chains of every form: series, fan-in, on one group and on two, on the grid, by both kinds of session."""
    rng = random.Random(seed)
    jobs = []
    for number in range(count):
        chain = _chain(rng, number)
        mode = rng.choices(["ping-pong", "serial", "auto", "overlap"], [6, 1, 3, 2])[0]
        session = rng.choice([None, "prefix-cache", "streaming-input"])
        grid = mode != "overlap" and session != "streaming-input" and rng.random() < 0.2
        options = SubmitOptions(
            mode=mode, session=session, priority=rng.randint(-2, 2), exactness="grid" if grid else None
        )
        jobs.append(Job(chain, options, outputs_of(chain)))
    return jobs


def _chain(rng: random.Random, number: int) -> Chain:
    agents: list[dict[str, Any]] = []
    for index in range(rng.randint(1, 5)):
        ids: list[Any] = [rng.randint(300, 3999) for _ in range(rng.randint(1, 200))]
        for reads in rng.sample(range(index), min(index, rng.choice([1, 1, 1, 2, 3]))):
            ids += [f"{{{{a{reads}}}}}", rng.randint(300, 3999)]
        agents.append({"name": f"a{index}", "prompt_ids": ids, "max_tokens": rng.randint(1, 60)})
    start = rng.choices(["first_token", "immediate"], [4, 1])[0]
    return parse_chain(json.dumps({"name": f"soak {number}", "start": start, "agents": agents}).encode())


def outputs_of(chain: Chain) -> list[list[int]]:
    """What the simulated engine writes: a function of each prompt's ids."""
    outputs: list[list[int]] = []
    names = {agent.name: index for index, agent in enumerate(chain.agents)}
    for agent in chain.agents:
        request = Request("", None)
        for item in agent.prompt_ids or []:
            request.extend([item] if isinstance(item, int) else outputs[names[item.strip("{}")]])
        written: list[int] = []
        while len(written) < agent.max_tokens and (token := request.sample(Sampling(max_tokens=1))) != EOS:
            written.append(token)
            request.extend([token])
        outputs.append(written)
    return outputs
