"""What a chain's devices did and when, as spans of time, made of its result. Pure.

A hop takes appends while it reads ahead, then a prefill from when its prompt was complete to its first token, then it
decodes. Times are ms since the chain was submitted. Results of daemons that kept no hops are read as if every agent
had had one. A step between agents has hops too, on no worker, each with one span.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from pingpong_bus.messages import AgentResult, AppendEntry, ChainResult, HopEntry

STEPS = "steps"
"""What the lane of steps is called."""
SpanKind = Literal["append", "prefill", "decode", "step"]


class Span(msgspec.Struct, frozen=True):
    """A stretch of work of one hop."""

    kind: SpanKind
    start_ms: float
    end_ms: float
    tokens: int
    """Prompt tokens that were handed over, or output tokens that were written; of a step, characters."""
    sent: int = 0
    """Of an append or a prefill: prompt tokens up to its end."""
    again: bool = False
    """It did what an earlier hop of the agent had done already; or it was void, for a later one began anew."""
    overtaken: bool = False
    """An append that was not computed yet when the prompt was complete."""


class HopSpans(msgspec.Struct, frozen=True):
    """A hop with what it did, in order, without overlaps."""

    agent: int
    number: int
    """Among the agent's hops, from 0."""
    entry: HopEntry
    spans: tuple[Span, ...]
    end_ms: float
    """Its end; of one that runs, the latest that is known of the chain."""


class Lane(msgspec.Struct, frozen=True):
    """A device group, or what runs beside all of them."""

    worker: str
    """Empty of steps between agents, which no group runs."""
    devices: tuple[str, ...]
    rows: tuple[tuple[HopSpans, ...], ...]
    """Hops that were open at the same time stand in different rows."""

    @property
    def title(self) -> str:
        """What it is called."""
        return self.worker or STEPS


class Flow(msgspec.Struct, frozen=True):
    """Output tokens that were read by another agent's append or prefill."""

    writer: HopSpans
    reader: HopSpans
    span: Span
    """The one that took them."""
    tokens: int
    at_ms: float
    """When it took them; by then they were written."""


def chain_end_ms(result: ChainResult) -> float:
    """The latest moment that is known of a chain."""
    known = [result.e2e_ms or 0.0, result.started_ms or 0.0]
    for agent in result.agents:
        known += [at for at in (agent.opened_ms, agent.finalized_ms, agent.last_token_ms) if at is not None]
        known += [entry.done_ms or entry.at_ms for entry in agent.appends]
        for hop in agent.hops:
            known += [at for at in (hop.started_ms, hop.first_token_ms, hop.ended_ms) if at is not None]
    return max(known)


def hops_of(agent: AgentResult) -> list[HopEntry]:
    """An agent's hops, in order."""
    if agent.hops or not agent.worker or agent.finalized_ms is None:
        return list(agent.hops)
    begun = [agent.finalized_ms, *(at for at in (agent.opened_ms,) if at is not None)]
    return [
        HopEntry(
            worker=agent.worker,
            started_ms=min([*begun, *(entry.at_ms for entry in agent.appends)]),
            opened_ms=agent.opened_ms,
            finalized_ms=agent.finalized_ms,
            first_token_ms=agent.first_token_ms,
            ended_ms=agent.last_token_ms,
            state="finished" if agent.last_token_ms is not None else "running",
            tokens=agent.output_tokens,
            prompt_tokens=agent.prompt_tokens,
            final_tokens=max(0, agent.prompt_tokens - (agent.appends[-1].sent if agent.appends else 0)),
            cached_tokens=agent.cached_tokens,
        )
    ]


def kept_from(hops: Sequence[HopEntry]) -> int:
    """The first of an agent's hops whose output counts: those before were void when it began anew."""
    return max((at for at, hop in enumerate(hops) if hop.tokens_before == 0), default=0)


def chain_spans(result: ChainResult) -> list[HopSpans]:
    """All hops of a chain, by agent and in order."""
    end = chain_end_ms(result)
    return [hop for index, agent in enumerate(result.agents) for hop in _agent_spans(index, agent, end)]


def lanes(result: ChainResult, workers: Sequence[str] = ()) -> list[Lane]:
    """The chain's device groups, those first that it came to first, and last what no group ran.

    Args:
        result: the chain.
        workers: groups to have lanes as well, in front, and in this order.
    """
    hops = sorted(chain_spans(result), key=lambda hop: (hop.entry.started_ms, hop.agent))
    names = sorted(dict.fromkeys([*workers, *(hop.entry.worker for hop in hops)]), key=lambda name: not name)
    return [
        Lane(name, tuple(result.devices.get(name, ())), _rows([hop for hop in hops if hop.entry.worker == name]))
        for name in names
    ]


def flows(result: ChainResult) -> list[Flow]:
    """Which outputs were read when, by every append and prefill that took some of their tokens."""
    by_agent: dict[int, list[HopSpans]] = {}
    for hop in chain_spans(result):
        by_agent.setdefault(hop.agent, []).append(hop)
    indices = {agent.name: index for index, agent in enumerate(result.agents)}
    found: list[Flow] = []
    for index, agent in enumerate(result.agents):
        for read in agent.reads:
            writers = by_agent.get(indices[read.agent], [])
            for hop in by_agent.get(index, []):
                for span in hop.spans:
                    tokens = _taken(span, read.at, read.tokens)
                    writer = _writer(writers, span.start_ms)
                    if tokens and writer is not None:
                        found.append(Flow(writer, hop, span, tokens, span.start_ms))
    return found


def handovers(result: ChainResult) -> list[tuple[HopSpans, HopSpans]]:
    """Each hop that was not its agent's last, with the one that took over from it."""
    hops = chain_spans(result)
    return [(hop, following) for hop, following in pairwise(hops) if hop.agent == following.agent]


def _taken(span: Span, at: int | None, tokens: int) -> int:
    """How many tokens of an output a span took; the whole of it where it went in as one text, or into a step."""
    if span.kind == "decode":
        return 0
    if span.kind == "step":
        return tokens
    if at is None:
        return tokens if span.kind == "prefill" else 0
    return max(0, min(span.sent, at + tokens) - max(span.sent - span.tokens, at))


def _writer(hops: Sequence[HopSpans], at_ms: float) -> HopSpans | None:
    """The hop that wrote last before a moment."""
    begun = [hop for hop in hops if hop.entry.first_token_ms is not None and hop.entry.first_token_ms <= at_ms]
    return begun[-1] if begun else None


def _agent_spans(index: int, agent: AgentResult, chain_end: float) -> list[HopSpans]:
    hops = hops_of(agent)
    kept, computed = kept_from(hops), 0
    found: list[HopSpans] = []
    for number, hop in enumerate(hops):
        following = hops[number + 1].started_ms if number + 1 < len(hops) else None
        end = max(hop.started_ms, hop.ended_ms if hop.ended_ms is not None else chain_end)
        # An append's report can come after its hop was given up, but none belongs to two hops.
        own = [
            entry
            for entry in agent.appends
            if entry.at_ms >= hop.started_ms and (following is None or entry.at_ms < following)
        ]
        spans = [*_append_spans(own, hop, end, computed), *_answer_spans(hop, end, computed)]
        if agent.kind != "agent":
            spans = _step_spans(hop, end, void=number < kept)
        computed = max([computed, *(span.sent for span in spans if not span.overtaken)])
        if number < kept:
            spans = [msgspec.structs.replace(span, again=True) if span.kind == "decode" else span for span in spans]
        found.append(HopSpans(index, number, hop, tuple(spans), end))
    return found


def _step_spans(hop: HopEntry, end: float, *, void: bool) -> list[Span]:
    """Of a step's hop; none before its turn has come."""
    if hop.opened_ms is None:
        return []
    return [Span("step", _within(hop, end, hop.opened_ms), end, hop.tokens, again=void)]


def _append_spans(appends: Sequence[AppendEntry], hop: HopEntry, end: float, computed: int) -> list[Span]:
    found: list[Span] = []
    complete = _complete(hop, end)
    at = hop.started_ms
    for entry in appends:
        done = complete if entry.done_ms is None else min(entry.done_ms, complete)
        start = min(max(entry.at_ms, at), complete)
        at = max(done, start)
        again, overtaken = entry.sent <= computed, entry.done_ms is None
        found.append(Span("append", start, at, entry.tokens, entry.sent, again=again, overtaken=overtaken))
    return found


def _answer_spans(hop: HopEntry, end: float, computed: int) -> list[Span]:
    if hop.finalized_ms is None:
        return []
    first = _within(hop, end, hop.first_token_ms)
    again = 0 < hop.prompt_tokens <= computed
    found = [Span("prefill", _complete(hop, end), first, hop.final_tokens, hop.prompt_tokens, again=again)]
    if hop.first_token_ms is not None:
        found.append(Span("decode", first, end, hop.tokens))
    return found


def _complete(hop: HopEntry, end: float) -> float:
    """When a hop's prompt was complete; its end where it never was."""
    if hop.finalized_ms is None:
        return end
    return min(_within(hop, end, hop.finalized_ms), _within(hop, end, hop.first_token_ms))


def _within(hop: HopEntry, end: float, at_ms: float | None) -> float:
    """A worker's time inside what the daemon saw of the hop: clocks may have been joined, to within some error."""
    return end if at_ms is None else min(max(at_ms, hop.started_ms), end)


def _rows(hops: Sequence[HopSpans]) -> tuple[tuple[HopSpans, ...], ...]:
    """Hops in as few rows as there were open at once; they come by their start."""
    rows: list[list[HopSpans]] = []
    for hop in hops:
        free = next((row for row in rows if row[-1].end_ms <= hop.entry.started_ms), None)
        if free is None:
            rows.append([hop])
        else:
            free.append(hop)
    return tuple(tuple(row) for row in rows)
