"""What spans say of an agent, by OpenTelemetry's conventions for generative AI; see `trace_spans.py`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from pingpong_bus.chain import Agent
from pingpong_bus.messages import AgentResult

PROVIDER: Final = "pingpong"
"""Who answers: none of the well-known names stands for an engine of one's own."""

Value = str | int | float | bool | Sequence[str]


def request_attributes(agent: Agent, model: str, *, texts: bool) -> dict[str, Value]:
    """What was asked for; stop strings only with `texts`."""
    attributes: dict[str, Value] = {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": agent.max_tokens,
        "gen_ai.request.temperature": agent.temperature,
        "gen_ai.request.top_p": agent.top_p,
    }
    if agent.seed is not None:
        attributes["gen_ai.request.seed"] = agent.seed
    if agent.stop and texts:
        attributes["gen_ai.request.stop_sequences"] = list(agent.stop)
    return attributes


def usage_attributes(found: AgentResult) -> dict[str, Value]:
    """Tokens, and how the answer ended."""
    attributes: dict[str, Value] = {
        "gen_ai.usage.input_tokens": found.prompt_tokens,
        "gen_ai.usage.output_tokens": found.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": found.cached_tokens,
    }
    if found.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [found.finish_reason]
    return attributes


def counted_attributes(found: AgentResult) -> dict[str, Value]:
    """How guessing its tokens and joining texts went, where there was any."""
    attributes: dict[str, Value] = {}
    if found.drafts is not None:
        attributes |= {
            "pingpong.drafts.steps": found.drafts.steps,
            "pingpong.drafts.tokens": found.drafts.drafted,
            "pingpong.drafts.accepted_tokens": found.drafts.accepted,
        }
    if found.seam is not None:
        attributes |= {
            "pingpong.seam.rollbacks": found.seam.rollbacks,
            "pingpong.seam.tokens": found.seam.tokens,
        }
    return attributes


def text_attributes(agent: Agent, found: AgentResult) -> dict[str, Value]:
    """The agent's prompt as it was submitted, with its references, and the output."""
    said = [(it.role, it.content) for it in agent.messages or ()]
    if agent.system is not None:
        said.append(("system", agent.system))
    prompt = agent.prompt if agent.prompt is not None else agent.raw_prompt
    if prompt is not None:
        said.append(("user", prompt))
    given = [{"role": role, "parts": [{"type": "text", "content": content}]} for role, content in said]
    answer = {
        "role": "assistant",
        "parts": [{"type": "text", "content": found.text}],
        "finish_reason": found.finish_reason or "error",
    }
    return {
        "gen_ai.input.messages": msgspec.json.encode(given).decode(),
        "gen_ai.output.messages": msgspec.json.encode([answer]).decode(),
    }
