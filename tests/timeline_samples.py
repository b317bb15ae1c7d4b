"""Results of chains to make timelines of."""

from __future__ import annotations

from typing import Literal

import msgspec

from pingpong_bus.messages import (
    AgentResult,
    AppendEntry,
    ChainResult,
    DraftCounts,
    HopEntry,
    OutputRead,
    Prediction,
    SeamCounts,
)


def hop(
    worker: str,
    moments: tuple[float, float | None, float | None, float | None],
    *,
    tokens: int = 8,
    before: int = 0,
    state: str = "finished",
    prompt: int = 100,
    final: int = 100,
    cached: int = 0,
    why: str = "",
) -> HopEntry:
    """A hop of its moments: started, finalized, first token, ended."""
    started, finalized, first, ended = moments
    return HopEntry(
        worker=worker,
        started_ms=started,
        opened_ms=started,
        finalized_ms=finalized,
        first_token_ms=first,
        ended_ms=ended,
        state=state,  # type: ignore[arg-type]
        tokens_before=before,
        tokens=tokens,
        prompt_tokens=prompt if finalized is not None else 0,
        final_tokens=final if finalized is not None else 0,
        cached_tokens=cached,
        why=why,
    )


def agent(
    name: str, hops: list[HopEntry], appends: list[AppendEntry] | None = None, reads: list[OutputRead] | None = None
) -> AgentResult:
    """An agent that has finished with its last hop."""
    last, first = hops[-1], next(hop for hop in hops if hop.first_token_ms is not None)
    return AgentResult(
        name=name,
        state="finished",
        worker=last.worker,
        session="prefix-cache",
        opened_ms=hops[0].opened_ms,
        finalized_ms=first.finalized_ms,
        first_token_ms=first.first_token_ms,
        last_token_ms=last.ended_ms,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=first.cached_tokens,
        output_tokens=sum(hop.tokens for hop in hops),
        appends=appends or [],
        hops=hops,
        reads=reads or [],
    )


def append(at: float, done: float | None, tokens: int, sent: int) -> AppendEntry:
    return AppendEntry(at_ms=at, done_ms=done, tokens=tokens, sent=sent)


def chain(agents: list[AgentResult], placement: str = "ping-pong", **fields: object) -> ChainResult:
    given: dict[str, object] = {
        "id": "c1",
        "name": "chain",
        "state": "finished",
        "placement": placement,
        "e2e_ms": max(agent.last_token_ms or 0.0 for agent in agents),
        "started_ms": 10.0,
        "submitted_at": "2026-01-01T00:00:00.000+00:00",
        "devices": {"a": ["GPU-11111111-2222-3333-4444-555555555555"], "b": ["cpu:0"]},
    }
    return ChainResult(agents=agents, **(given | fields))  # type: ignore[arg-type]


def read_ahead() -> ChainResult:
    """Two agents on two groups; the second reads the first as it writes."""
    first = agent("one", [hop("a", (11, 11, 111, 511), tokens=40, prompt=200, final=200)])
    second = agent(
        "two",
        [hop("b", (112, 512, 542, 742), tokens=20, prompt=160, final=10, cached=144)],
        [append(112, 212, 100, 100), append(300, 310, 32, 132), append(500, None, 18, 150)],
        [OutputRead(agent="one", at=110, tokens=40)],
    )
    predicted = Prediction(
        placement="ping-pong",
        groups=("a", "b"),
        e2e_ms=700.0,
        prefill_ms=120.0,
        decode_ms=580.0,
        wait_ms=0.0,
        hidden_ms=100.0,
    )
    return chain([first, second], predictions=[predicted], predicted_ms=700.0)


def in_series() -> ChainResult:
    """The same, one after the other on one group."""
    first = agent("one", [hop("a", (11, 11, 111, 511), tokens=40, prompt=200, final=200)])
    second = agent(
        "two",
        [hop("a", (513, 514, 664, 864), tokens=20, prompt=160, final=160)],
        reads=[OutputRead(agent="one", at=110, tokens=40)],
    )
    return chain([first, second], "serial")


def lost_once() -> ChainResult:
    """The first agent loses its worker in the middle of its answer and goes on elsewhere, while the second reads."""
    first = agent(
        "one",
        [
            hop("a", (11, 11, 111, 300), tokens=20, state="lost", prompt=200, final=200, why="it ended with signal 9."),
            hop("b", (320, 321, 421, 620), tokens=20, before=20, prompt=200, final=200, cached=80),
        ],
    )
    second = agent(
        "two",
        [hop("b", (112, 621, 641, 841), tokens=20, prompt=160, final=28, cached=128)],
        [append(112, 212, 100, 100), append(450, 470, 32, 132)],
        [OutputRead(agent="one", at=110, tokens=40)],
    )
    return chain([first, second])


def void_once() -> ChainResult:
    """An agent gives way after some tokens, and begins anew."""
    first = agent(
        "one",
        [
            hop("a", (11, 11, 111, 300), tokens=20, state="aborted", prompt=200, final=200, why="it gave way"),
            hop("a", (320, 321, 331, 731), tokens=40, prompt=200, final=200, cached=192),
        ],
    )
    return chain([first], "serial")


def step(
    name: str,
    kind: Literal["extract", "call"],
    moments: tuple[float, float, float],
    *,
    reads: str,
    characters: int = 30,
) -> AgentResult:
    """A step that has finished: sent, begun, ended; it reads one agent."""
    sent, began, ended = moments
    entry = HopEntry(
        worker="",
        started_ms=sent,
        opened_ms=began,
        first_token_ms=ended,
        ended_ms=ended,
        state="finished",
        tokens=characters,
    )
    return AgentResult(
        name=name,
        kind=kind,
        state="finished",
        finish_reason="stop",
        opened_ms=began,
        first_token_ms=ended,
        last_token_ms=ended,
        output_tokens=characters,
        text="x" * characters,
        hops=[entry],
        reads=[OutputRead(agent=reads, at=None, tokens=40)],
    )


def with_steps() -> ChainResult:
    """Two models, an extract and a call between them; the second agent has read its static parts ahead."""
    replace = msgspec.structs.replace
    first = agent("one", [hop("a", (11, 11, 111, 511), tokens=40, prompt=200, final=200)])
    first = replace(first, model="small", drafts=DraftCounts(steps=25, drafted=30, accepted=15))
    second = agent(
        "two",
        [hop("b", (112, 642, 662, 862), tokens=20, prompt=160, final=60, cached=96)],
        [append(112, 212, 100, 100)],
        [OutputRead(agent="call", at=None, tokens=60)],
    )
    second = replace(second, model="large", seam=SeamCounts(rollbacks=2, tokens=9))
    predicted = Prediction(
        placement="ping-pong",
        groups=("a", "", "", "b"),
        e2e_ms=800.0,
        prefill_ms=120.0,
        decode_ms=580.0,
        steps_ms=100.0,
    )
    return chain(
        [
            first,
            step("extract", "extract", (512, 512, 516), reads="one", characters=25),
            step("call", "call", (517, 540, 641), reads="extract", characters=60),
            second,
        ],
        predictions=[predicted],
        predicted_ms=800.0,
    )


def queued() -> ChainResult:
    return ChainResult(
        id="q", name="chain", state="queued", agents=[AgentResult(name="one")], why="2 chains are before it"
    )
