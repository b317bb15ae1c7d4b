"""Where a chain's time went: what reading ahead hid, what was waited for, what was done twice, and what had been
predicted. Pure.

The critical path is walked back from the last token, from each agent to the one that it waited for; its times add up
to the chain's (as those of a `Prediction` do). What was done beside the path costs no time of its own: appends before
their agent's turn had come are what reading ahead hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Literal

import msgspec

from pingpong_bus.messages import AgentResult, ChainResult, DraftCounts, HopEntry, Prediction
from pingpong_client.guesses import all_drafts, is_step
from pingpong_client.timeline_spans import HopSpans, chain_spans, hops_of, kept_from
from pingpong_client.timeline_waste import Wasted, total, wasted

PathKind = Literal["queue", "wait", "prefill", "decode", "step", "recovery"]
PATH_KINDS: tuple[PathKind, ...] = ("queue", "wait", "prefill", "decode", "step", "recovery")


class PathStep(msgspec.Struct, frozen=True):
    """A stretch of the critical path.

    ``queue``: the chain had not left the queue. ``wait``: the agent's turn had come, and no hop of it ran. ``prefill``:
    from then, or from its hop's start, to its first token. ``decode``: until its last. ``step``: a step between agents
    ran. ``recovery``: what a loss or a move has cost: until its next hop ran, and its prompt was computed again.
    """

    kind: PathKind
    start_ms: float
    end_ms: float
    agent: str = ""
    worker: str = ""

    @property
    def ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.start_ms


class AgentAccount(msgspec.Struct, frozen=True):
    """One agent's part; ms, None where it has not come to that."""

    name: str
    workers: tuple[str, ...]
    """Of its hops, in order."""
    ready_ms: float | None
    """When its turn had come: nothing was left to wait for but its own work."""
    prefill_ms: float | None
    """Exposed: from then to its first token."""
    decode_ms: float | None
    hidden_ms: float
    """Appends before its turn had come."""
    hidden_tokens: int
    """Of its prompt, appended by then and computed."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hops: int
    wasted: Wasted
    on_path: bool
    kind: Literal["agent", "extract", "call"] = "agent"
    """Of a step `output_tokens` counts characters, and there is neither prefill nor decode."""
    step_ms: float | None = None
    """Of a step: what it took from its turn on."""
    model: str = ""
    drafts: DraftCounts | None = None


STEP_UNKNOWN = "step not known yet"
"""Stands for how far a prediction was off that counts with a step of which no run was known."""


class Comparison(msgspec.Struct, frozen=True):
    """A time as predicted and as it came, in ms."""

    name: Literal["end to end", "prefill", "decode", "steps", "wait"]
    predicted_ms: float
    took_ms: float
    known: bool = True
    """False: a step's time is in what was predicted, and no run of that step was known."""

    @property
    def off(self) -> float | None:
        """By which part it took longer; None where nothing was predicted, or a guess."""
        return self.took_ms / self.predicted_ms - 1 if self.predicted_ms > 0 and self.known else None

    @property
    def off_words(self) -> str:
        """`off`, for people."""
        if not self.known:
            return STEP_UNKNOWN
        return f"{self.off:+.1%}" if self.off is not None else "-"


class Account(msgspec.Struct, frozen=True):
    """A chain's account."""

    e2e_ms: float | None
    """None unless the chain has finished; then the sum of the path."""
    path: tuple[PathStep, ...]
    """In order of time; empty unless the chain has finished."""
    hidden_ms: float
    hidden_tokens: int
    wasted: Wasted
    agents: tuple[AgentAccount, ...]
    predicted: Prediction | None
    """Of the placement that was taken, as it was when the chain left the queue."""
    comparisons: tuple[Comparison, ...]
    """From when the chain left the queue, as predictions are; empty where nothing was predicted, it has not finished,
    or it is `recovered`. What is hidden is not among them: predicted is what it takes at full speed, and `hidden_ms` is
    how long it went on beside decodes."""

    drafts: DraftCounts | None
    """Of all agents together; None where no tokens were to be guessed."""
    recovered: bool
    """The daemon was restarted before it had finished: what was predicted is what was left then, not the whole."""

    def spent_ms(self, kind: PathKind) -> float:
        """What the path spent in one way."""
        return sum(step.ms for step in self.path if step.kind == kind)


def account(result: ChainResult) -> Account:
    """Make the account of a chain, whatever has become of it."""
    hops: dict[int, list[HopSpans]] = {}
    for hop in chain_spans(result):
        hops.setdefault(hop.agent, []).append(hop)
    path = _path(result) if result.state == "finished" else ()
    on_path = {step.agent for step in path}
    agents = tuple(
        _agent(result, index, hops.get(index, []), on_path=agent.name in on_path)
        for index, agent in enumerate(result.agents)
    )
    made = Account(
        e2e_ms=result.e2e_ms,
        path=path,
        hidden_ms=sum(agent.hidden_ms for agent in agents),
        hidden_tokens=sum(agent.hidden_tokens for agent in agents),
        wasted=total([agent.wasted for agent in agents]),
        agents=agents,
        predicted=taken_prediction(result),
        comparisons=(),
        drafts=all_drafts(result.agents),
        recovered=_recovered(result),
    )
    return msgspec.structs.replace(made, comparisons=_comparisons(made))


# --------------------------------------------------------------------------------------------------------- the path


def _upstreams(result: ChainResult, index: int) -> list[int]:
    """The agents that an agent waited for: those that it reads, and in series also the one before."""
    agent = result.agents[index]
    indices = {other.name: at for at, other in enumerate(result.agents)}
    found = [indices[read.agent] for read in agent.reads]
    if result.placement == "serial" and index > 0:
        found.append(index - 1)
    if not found and index > 0 and not agent.hops and agent.ttft_ms is not None and agent.first_token_ms is not None:
        # A result of a daemon that did not say who reads whom: it is the one that ended when the agent's turn came.
        ready = agent.first_token_ms - agent.ttft_ms
        before = [at for at in range(index) if abs((result.agents[at].last_token_ms or 0.0) - ready) < 0.01]
        found += before[-1:]
    return found


def _latest(result: ChainResult, among: Sequence[int]) -> int | None:
    """The agent that ended last."""
    return max(among, key=lambda at: result.agents[at].last_token_ms or 0.0, default=None)


def _ready_ms(result: ChainResult, index: int) -> float | None:
    """When an agent's turn had come; None while it has not."""
    lasts = [result.agents[at].last_token_ms for at in _upstreams(result, index)]
    known = [at for at in lasts if at is not None]
    if len(known) < len(lasts):
        return None
    return max([result.started_ms or 0.0, *known])


def _path(result: ChainResult) -> tuple[PathStep, ...]:
    """The critical path of a chain that has finished."""
    found: list[list[PathStep]] = []
    at = _latest(result, range(len(result.agents)))
    begin = 0.0
    while at is not None:
        begin = _ready_ms(result, at) or 0.0
        found.append(_steps(result.agents[at], begin))
        at = _latest(result, _upstreams(result, at))
    queue = [PathStep("queue", 0.0, begin)] if begin > 0 else []
    return (*queue, *(step for steps in reversed(found) for step in steps))


def _steps(agent: AgentResult, begin: float) -> list[PathStep]:
    """An agent's part of the path, from its turn to its last token, without gaps."""
    found: list[PathStep] = []
    hops, last = hops_of(agent), agent.last_token_ms or begin
    kept = kept_from(hops)
    cursor = begin

    def until(end: float, kind: PathKind, hop: HopEntry) -> None:
        nonlocal cursor
        end = min(end, last)
        if end > cursor:
            found.append(PathStep(kind, cursor, end, agent.name, hop.worker))
            cursor = end

    for number, hop in enumerate(hops):
        if is_step(agent):
            until(hop.opened_ms if hop.opened_ms is not None else last, "wait" if number == 0 else "recovery", hop)
            ends = last if number == kept or hop.ended_ms is None else hop.ended_ms
            until(ends, "step" if number == kept else "recovery", hop)
            continue
        until(hop.started_ms, "wait" if number == 0 else "recovery", hop)
        end = hop.ended_ms if hop.ended_ms is not None and number + 1 < len(hops) else last
        if number < kept or (hop.first_token_ms is None and number + 1 < len(hops)):
            until(end, "recovery", hop)
            continue
        if hop.first_token_ms is not None:
            until(min(hop.first_token_ms, end), "prefill" if number == kept else "recovery", hop)
            until(end, "decode", hop)
        else:
            until(end, "prefill", hop)
    return found


# ------------------------------------------------------------------------------------------------------------ agents


def _agent(result: ChainResult, index: int, hops: Sequence[HopSpans], *, on_path: bool) -> AgentAccount:
    agent, ready = result.agents[index], _ready_ms(result, index)
    steps = _steps(agent, ready) if ready is not None and agent.last_token_ms is not None else []
    ahead = [
        span for hop in hops for span in hop.spans if span.kind == "append" and (ready is None or span.start_ms < ready)
    ]
    through = max((span.sent for span in ahead if not span.overtaken and span.end_ms <= (ready or inf)), default=0)
    # Of an append that was not through, the caches may hold a part.
    held = min(agent.cached_tokens, max((span.sent for span in ahead), default=0))
    first = None if is_step(agent) else agent.first_token_ms
    exposed = first - ready if first is not None and ready is not None else None

    def spent(kind: PathKind) -> float | None:
        return sum(step.ms for step in steps if step.kind == kind) if steps else None

    return AgentAccount(
        name=agent.name,
        workers=tuple(hop.entry.worker for hop in hops),
        ready_ms=ready,
        prefill_ms=None if is_step(agent) else spent("prefill") if steps else exposed,
        decode_ms=None if is_step(agent) else spent("decode"),
        hidden_ms=sum((span.end_ms if ready is None else min(span.end_ms, ready)) - span.start_ms for span in ahead),
        hidden_tokens=max(through, held),
        prompt_tokens=agent.prompt_tokens,
        cached_tokens=agent.cached_tokens,
        output_tokens=agent.output_tokens,
        hops=len(hops),
        wasted=wasted(result, agent, hops),
        on_path=on_path,
        kind=agent.kind,
        step_ms=spent("step") if is_step(agent) else None,
        model=agent.model,
        drafts=agent.drafts,
    )


# ------------------------------------------------------------------------------------------------------- predictions


def taken_prediction(result: ChainResult) -> Prediction | None:
    """What the placement was taken for; None where nothing was predicted."""
    same = [found for found in result.predictions if found.placement == result.placement]
    return next((found for found in same if found.e2e_ms == result.predicted_ms), None)


def _recovered(result: ChainResult) -> bool:
    """Whether a restart of the daemon came between: no agent says why the chain was resumed, or one began anew more
    often than its hops were void, those of before a restart being gone."""
    if not result.resumed:
        return False
    anew = any(agent.attempt > 1 + _void_hops(agent) for agent in result.agents)
    return anew or not any(agent.resumed for agent in result.agents)


def _void_hops(agent: AgentResult) -> int:
    """Those with tokens that the next one did not find."""
    return sum(
        hop.tokens_before + hop.tokens > 0 and not after.tokens_before for hop, after in pairwise(hops_of(agent))
    )


def _comparisons(made: Account) -> tuple[Comparison, ...]:
    predicted = made.predicted
    if predicted is None or made.e2e_ms is None or made.recovered:
        return ()
    waited, stepped = made.spent_ms("wait") + made.spent_ms("recovery"), made.spent_ms("step")
    known = not predicted.unknown_steps
    steps = (Comparison("steps", predicted.steps_ms, stepped, known),) if predicted.steps_ms or stepped else ()
    return (
        Comparison("end to end", predicted.e2e_ms, made.e2e_ms - made.spent_ms("queue"), known),
        Comparison("prefill", predicted.prefill_ms, made.spent_ms("prefill")),
        Comparison("decode", predicted.decode_ms, made.spent_ms("decode")),
        *steps,
        Comparison("wait", predicted.wait_ms, waited),
    )
