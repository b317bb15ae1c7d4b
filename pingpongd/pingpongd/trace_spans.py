"""The spans of a chain that has ended, by OpenTelemetry's conventions for generative AI. Pure; `traces.py` sends them.

::

    invoke_workflow CHAIN                     submission to last token
    ├── queue                                 until its turn
    ├── execute_tool STEP                     a step between agents, once its turn had come; linked like an agent
    └── invoke_agent AGENT                    from its first hop's start; linked to the agents that it reads
        ├── append                            one read-ahead prefill
        ├── hop WORKER                        only where it was lost or moved: one for each
        └── chat MODEL                        prompt complete to last token; event "first_token"

The conventions are in development. The names are those of version 1.41; version 0.1 of the conventions' own repository
has a workflow's name in `gen_ai.agent.name`, so both are set. Unless `texts` are asked for, no span holds anything of
a prompt, an input or an output; nor stop strings, nor errors' sentences, which may quote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import AgentResult, ChainResult, HopEntry
from pingpongd.trace_attributes import (
    PROVIDER,
    Value,
    counted_attributes,
    request_attributes,
    text_attributes,
    usage_attributes,
)

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.0"
MOST_APPENDS: Final = 64
"""Appends of one agent that get a span; of more, the first ones and the last."""


class SpanEvent(msgspec.Struct, frozen=True):
    """A moment in a span."""

    name: str
    at_ns: int


class SpanPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A span; times in ns since the epoch."""

    name: str
    start_ns: int
    end_ns: int
    parent: int | None
    """Which of the spans before it in the list; None: whatever the chain was submitted from."""
    attributes: dict[str, Value] = {}
    events: list[SpanEvent] = []
    links: list[int] = []
    """Spans before it in the list that it reads from."""
    error: str = ""
    """A class of errors; empty where it went well."""
    error_text: str = ""


class TracedChain(msgspec.Struct, frozen=True, kw_only=True):
    """A chain that has ended, with all that its spans tell."""

    chain: Chain
    """As submitted."""
    result: ChainResult
    reads: Sequence[Sequence[int]]
    """For each agent, the indices of the agents that it reads from."""
    model: str
    submitted_ns: int
    """Since the epoch."""
    ended_ns: int
    traceparent: str | None = None
    """W3C trace context of whoever submitted it."""
    texts: bool = False
    """Tell prompts and outputs."""

    def at(self, ms: float | None) -> int:
        """A moment that is given in ms since the submission; the chain's end for what never came."""
        return self.ended_ns if ms is None else self.submitted_ns + int(ms * 1e6)


def without_unneeded(traced: TracedChain) -> TracedChain:
    """The same chain, of which the same spans can be made, without what they do not tell: that may be megabytes."""
    chain, result, texts = traced.chain, traced.result, traced.texts
    replace = msgspec.structs.replace
    if not texts:
        chain = replace(chain, agents=[_without_prompt(agent) for agent in chain.agents], inputs={}, description="")
    found = [replace(it, output_ids=[], prompt_ids=None, text=it.text if texts else "") for it in result.agents]
    return replace(traced, chain=chain, result=replace(result, agents=found))


def _without_prompt(agent: Agent) -> Agent:
    """Of the prompt its kind alone is kept."""
    return msgspec.structs.replace(
        agent,
        system=None,
        prompt=None,
        messages=None,
        raw_prompt=None if agent.raw_prompt is None else "",
        prompt_ids=None if agent.prompt_ids is None else [],
        input=None,
        extract=None,
    )


def spans_of(traced: TracedChain) -> list[SpanPlan]:
    """All spans of a chain, each after its parent and those that it is linked to."""
    result = traced.result
    plans = [_chain_span(traced)]
    if result.started_ms is not None:
        end_ns = traced.at(result.started_ms)
        plans.append(SpanPlan(name="queue", start_ns=traced.submitted_ns, end_ns=end_ns, parent=0))
    spans: dict[int, int] = {}
    """Of the agents that ran."""
    for index, found in enumerate(result.agents):
        began_ms = found.opened_ms if found.kind != "agent" else _began_ms(found)
        if began_ms is None:
            continue
        links = [spans[upstream] for upstream in traced.reads[index] if upstream in spans]
        spans[index] = own = len(plans)
        if found.kind != "agent":
            plans.append(_step_span(traced, index, began_ms, links))
            continue
        plans.append(_agent_span(traced, index, began_ms, links))
        plans += _append_spans(traced, found, own)
        if len(found.hops) > 1:
            plans += _hop_spans(traced, found, own)
        if found.finalized_ms is not None:
            plans.append(_answer_span(traced, index, found.finalized_ms, own))
    return plans


def _chain_span(traced: TracedChain) -> SpanPlan:
    chain, result = traced.chain, traced.result
    last_ms = max((agent.last_token_ms or 0.0 for agent in result.agents), default=0.0)
    finished = result.state == "finished" and last_ms > 0
    optional: dict[str, Value | None] = {
        "pingpong.chain.placement": result.placement,
        "pingpong.chain.predicted_ms": result.predicted_ms,
        "pingpong.chain.why": result.why,
    }
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": chain.name,
        "gen_ai.agent.name": chain.name,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": traced.model,
        "gen_ai.usage.input_tokens": sum(agent.prompt_tokens for agent in result.agents),
        "gen_ai.usage.output_tokens": sum(agent.output_tokens for agent in result.agents if agent.kind == "agent"),
        "pingpong.chain.id": result.id,
        "pingpong.chain.state": result.state,
        "pingpong.chain.exactness": result.exactness,
        "pingpong.chain.resumed": result.resumed,
    }
    return SpanPlan(
        name=f"invoke_workflow {chain.name}",
        start_ns=traced.submitted_ns,
        end_ns=traced.at(last_ms if finished else None),
        parent=None,
        attributes=attributes | {name: value for name, value in optional.items() if value},
        error=_error(result.state),
        error_text=result.error if traced.texts else "",
    )


def _step_span(traced: TracedChain, index: int, began_ms: float, links: list[int]) -> SpanPlan:
    """Of a step between agents: to whoever reads spans it is a tool."""
    step, found = traced.chain.agents[index], traced.result.agents[index]
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": step.call or found.kind,
        "pingpong.step.name": step.name,
        "pingpong.step.kind": found.kind,
        "pingpong.step.characters": found.output_tokens,
        "pingpong.step.begun": len(found.hops),
    }
    if traced.texts and found.text:
        attributes["gen_ai.tool.call.result"] = found.text
    return _chain_part(traced, f"execute_tool {step.name}", found, began_ms, attributes, links)


def _agent_span(traced: TracedChain, index: int, began_ms: float, links: list[int]) -> SpanPlan:
    agent, found = traced.chain.agents[index], traced.result.agents[index]
    attributes = request_attributes(agent, found.model or traced.model, texts=traced.texts) | usage_attributes(found)
    attributes |= counted_attributes(found) | {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": agent.name,
        "pingpong.worker": found.worker,
        "pingpong.agent.attempt": found.attempt,
        "pingpong.agent.hops": max(1, len(found.hops)),
        "pingpong.agent.appends": len(found.appends),
    }
    if found.session is not None:
        attributes["pingpong.session"] = found.session
    return _chain_part(traced, f"invoke_agent {agent.name}", found, began_ms, attributes, links)


def _chain_part(
    traced: TracedChain,
    name: str,
    found: AgentResult,
    began_ms: float,
    attributes: dict[str, Value],
    links: list[int],
) -> SpanPlan:
    """What stands right under the chain's own span: an agent or a step."""
    return SpanPlan(
        name=name,
        start_ns=traced.at(began_ms),
        end_ns=traced.at(found.last_token_ms),
        parent=0,
        attributes=attributes,
        links=links,
        error=_error(found.state),
    )


def _answer_span(traced: TracedChain, index: int, finalized_ms: float, parent: int) -> SpanPlan:
    agent, found = traced.chain.agents[index], traced.result.agents[index]
    operation = "text_completion" if agent.raw_prompt is not None or agent.prompt_ids is not None else "chat"
    attributes = request_attributes(agent, found.model or traced.model, texts=traced.texts) | usage_attributes(found)
    attributes |= {"gen_ai.operation.name": operation, "gen_ai.request.stream": True}
    events = []
    if found.first_token_ms is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = round((found.first_token_ms - finalized_ms) / 1000, 6)
        events.append(SpanEvent("first_token", traced.at(found.first_token_ms)))
    if traced.texts:
        attributes |= text_attributes(agent, found)
    return SpanPlan(
        name=f"{operation} {found.model or traced.model}",
        start_ns=traced.at(finalized_ms),
        end_ns=traced.at(found.last_token_ms),
        parent=parent,
        attributes=attributes,
        events=events,
        error=_error(found.state),
    )


def _append_spans(traced: TracedChain, found: AgentResult, parent: int) -> list[SpanPlan]:
    half, appends = MOST_APPENDS // 2, found.appends
    told = appends if len(appends) <= MOST_APPENDS else [*appends[:half], *appends[-half:]]
    return [
        SpanPlan(
            name="append",
            start_ns=traced.at(append.at_ms),
            end_ns=traced.at(append.done_ms if append.done_ms is not None else found.finalized_ms),
            parent=parent,
            attributes={"pingpong.append.tokens": append.tokens, "pingpong.append.sent_tokens": append.sent},
        )
        for append in told
    ]


def _hop_spans(traced: TracedChain, found: AgentResult, parent: int) -> list[SpanPlan]:
    return [
        SpanPlan(
            name=f"hop {hop.worker}",
            start_ns=traced.at(hop.started_ms),
            end_ns=traced.at(hop.ended_ms),
            parent=parent,
            attributes=_of_hop(hop, texts=traced.texts),
        )
        for hop in found.hops
    ]


def _of_hop(hop: HopEntry, *, texts: bool) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "pingpong.worker": hop.worker,
        "pingpong.hop.state": hop.state,
        "pingpong.hop.tokens_before": hop.tokens_before,
        "pingpong.hop.tokens": hop.tokens,
    }
    if texts or hop.state in ("lost", "moved"):  # why one failed is an error's sentence
        attributes["pingpong.hop.why"] = hop.why
    return attributes


def _began_ms(found: AgentResult) -> float | None:
    """When an agent's work began; None where it never did."""
    moments = [found.opened_ms, *(hop.started_ms for hop in found.hops), found.finalized_ms, found.first_token_ms]
    return min((moment for moment in moments if moment is not None), default=None)


def _error(state: str) -> str:
    return {"failed": "chain_failed", "cancelled": "cancelled"}.get(state, "")
