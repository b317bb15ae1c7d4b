"""A chain that has ended, for tests of its spans."""

from __future__ import annotations

from typing import Any

from pingpong_bus.chain import Agent, Chain, Message
from pingpong_bus.messages import AgentResult, AppendEntry, ChainResult
from pingpongd.trace_spans import TracedChain

SECRET = "a secret of the user's"
SUBMITTED_NS = 1_700_000_000_000_000_000


def traced(**given: Any) -> TracedChain:
    """Two agents, of which the second reads the first; everything that a user writes is `SECRET`."""
    chain = Chain(
        name="tips",
        agents=[
            Agent(name="adviser", system=SECRET, prompt=SECRET, max_tokens=20, stop=[SECRET]),
            Agent(name="editor", messages=[Message("user", "{{adviser}} " + SECRET)], temperature=0.5, seed=7),
        ],
    )
    first = AgentResult(
        name="adviser", state="finished", text=SECRET, prompt_tokens=100, cached_tokens=32, output_tokens=20,
        finish_reason="length", worker="a", opened_ms=5, finalized_ms=10, first_token_ms=30, last_token_ms=200,
        ttft_ms=30,
    )  # fmt: skip
    appends = [AppendEntry(at_ms=40, tokens=80, sent=80, done_ms=90), AppendEntry(at_ms=195, tokens=9, sent=89)]
    second = AgentResult(
        name="editor", state="finished", text=SECRET, prompt_tokens=150, output_tokens=30, finish_reason="stop",
        worker="b", session="prefix-cache", opened_ms=31, finalized_ms=201, first_token_ms=215, last_token_ms=400,
        ttft_ms=15, appends=appends,
    )  # fmt: skip
    result = ChainResult(
        id="c1", name="tips", state="finished", placement="ping-pong", e2e_ms=400, agents=[first, second],
        started_ms=3, predicted_ms=390, why="it should take least",
    )  # fmt: skip
    fields: dict[str, Any] = {"chain": chain, "result": result, "reads": ((), (0,)), "model": "m"}
    return TracedChain(**(fields | {"submitted_ns": SUBMITTED_NS, "ended_ns": at(410)} | given))


def at(ms: float) -> int:
    return SUBMITTED_NS + int(ms * 1e6)


def changed(**given: Any) -> TracedChain:
    """The same chain with another result."""
    before = traced().result
    fields = {name: getattr(before, name) for name in before.__struct_fields__}
    return traced(result=ChainResult(**(fields | given)))
