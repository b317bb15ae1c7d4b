"""Chains for the soak on real engines."""

from __future__ import annotations

import json

import msgspec

from faults.engine_story import CONFIG
from faults.service import Service
from faults.soak import Job
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.messages import SubmitOptions

REAL = CONFIG.replace("slots = 3", "slots = 24").replace("give_up_after = 20", "give_up_after = 1000000")
_TOPICS = ("tides", "bees", "bridges", "clocks", "salt", "maps", "glass", "wind", "paper", "bread")


async def real_jobs(service: Service, count: int) -> list[Job]:
    """So many chains, each of ten kinds in turn; run undisturbed and in series first, for what they write."""
    service.start(REAL)
    await service.ready(patience_s=300)
    outputs = []
    async with service.client() as client:
        for topic in _TOPICS:
            result = await client.run(_chain(topic), options=SubmitOptions(mode="serial", isolate=True))
            outputs.append([agent.output_ids for agent in result.agents])
    await service.stop()
    options = SubmitOptions(mode="ping-pong")
    kinds = [Job(_chain(topic), options, output) for topic, output in zip(_TOPICS, outputs, strict=True)]
    streaming = msgspec.structs.replace(options, session="streaming-input")
    kinds += [msgspec.structs.replace(kind, options=streaming) for kind in kinds]
    return [kinds[number % len(kinds)] for number in range(count)]


def _chain(topic: str) -> Chain:
    agents = [
        {"name": "facts", "prompt": f"Write some facts about {topic}.", "max_tokens": 24, "ignore_eos": True},
        {"name": "story", "prompt": "Make a story of this: {{facts}} Be brief.", "max_tokens": 16, "ignore_eos": True},
        {
            "name": "title",
            "prompt": "Give this a title: {{story}} From: {{facts}}",
            "max_tokens": 6,
            "ignore_eos": True,
        },
    ]
    return parse_chain(json.dumps({"name": topic, "agents": agents}).encode())
