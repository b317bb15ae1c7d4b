"""Chains to put into a store: small ones that say what they hold, and any that hypothesis likes."""

from __future__ import annotations

from hypothesis import strategies as st

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import (
    AgentResult,
    AppendRecord,
    ChainResult,
    HopEntry,
    Literals,
    OutputOf,
    PreparedAgent,
    ResumeEntry,
    SubmitOptions,
)
from pingpongd.stored import AgentOutcome, Job


def job(number: int, text: str = "hello", key: str = "", submitted_at: float = 1000.0) -> Job:
    return Job(
        chain=Chain(name=f"name {text}"[:200], agents=[Agent(name="a", prompt=text)]),
        inputs={"topic": text},
        options=SubmitOptions(),
        prepared=[PreparedAgent(segments=[Literals(ids=[1, 2]), OutputOf(agent=0)])],
        model="m",
        number=number,
        submitted_at=submitted_at,
        key=key,
    )


def outcome(text: str = "written", attempt: int = 1) -> AgentOutcome:
    return AgentOutcome(
        worker="gpu0",
        output_ids=[3, 4],
        text=text,
        finish_reason="stop",
        stop_token=2,
        session="prefix-cache",
        prompt_tokens=5,
        prompt_digest="d",
        cached_tokens=0,
        prompt_token_match=True,
        appends=[AppendRecord(at_ns=1, done_ns=2, tokens=3, sent=3)],
        opened_ns=1,
        finalized_ns=2,
        first_token_ns=3,
        last_token_ns=4,
        attempt=attempt,
        resumed=[ResumeEntry(at_ms=1.5, tokens=1, worker="gpu1", why="it died")],
        hops=[
            HopEntry(worker="gpu1", started_ms=0.5, ended_ms=1.5, state="lost", tokens=1, why="it died"),
            HopEntry(worker="gpu0", started_ms=1.75, ended_ms=2.5, state="finished", tokens_before=1, tokens=1),
        ],
        devices={"gpu0": ["GPU-1"], "gpu1": ["GPU-2"]},
    )


def result(chain_id: str, text: str = "written") -> ChainResult:
    agents = [AgentResult(name="a", state="finished", text=text), AgentResult(name="b", state="failed")]
    return ChainResult(id=chain_id, name=f"name {text}"[:200], state="failed", e2e_ms=12.5, agents=agents, error=text)


_texts = st.text(st.characters(exclude_categories=["Cs"]))
_ids = st.lists(st.integers(0, 2**32 - 1), max_size=50)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | _texts, lambda s: st.lists(s, max_size=3)
)
_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)

jobs = st.builds(
    Job,
    chain=st.builds(
        Chain,
        name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200),
        agents=st.lists(
            st.builds(
                Agent,
                name=_names,
                prompt=st.none() | _texts,
                prompt_ids=st.none() | st.lists(st.integers(0, 2**32 - 1) | _texts, max_size=20),
                temperature=st.floats(0, 10),
                seed=st.none() | st.integers(0, 2**63 - 1),
                stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3),
                chat_template_kwargs=st.dictionaries(_texts, _json, max_size=3),
            ),
            min_size=1,
            max_size=3,
        ),
        inputs=st.dictionaries(_names, st.none() | _texts, max_size=3),
    ),
    inputs=st.dictionaries(_texts, _texts, max_size=3),
    options=st.builds(
        SubmitOptions,
        priority=st.integers(-100, 100),
        deadline_s=st.none() | st.floats(0.001, 1e6),
        append_tokens=st.none() | st.integers(1, 100),
    ),
    prepared=st.lists(
        st.builds(
            PreparedAgent,
            segments=st.lists(
                st.builds(Literals, ids=_ids) | st.builds(OutputOf, agent=st.integers(0, 999)), max_size=3
            ),
            note=_texts,
        ),
        max_size=3,
    ),
    model=_texts,
    number=st.integers(1, 2**53),
    submitted_at=st.floats(0, 1e11),
    key=st.text(st.characters(exclude_categories=["Cs"]), max_size=128),
)
outcomes = st.builds(
    AgentOutcome,
    worker=_texts,
    output_ids=_ids,
    text=_texts | st.integers(0, 20000).map(lambda n: "x" * n),
    finish_reason=st.sampled_from(["stop", "length"]),
    stop_token=st.none() | st.integers(0, 2**32 - 1),
    appends=st.lists(
        st.builds(
            AppendRecord,
            at_ns=st.integers(0, 2**62),
            done_ns=st.integers(0, 2**62),
            tokens=st.integers(0, 2**20),
            sent=st.integers(0, 2**20),
        ),
        max_size=3,
    ),
    prompt_tokens=st.integers(0, 2**31),
    cached_tokens=st.integers(0, 2**31),
    opened_ns=st.integers(0, 2**62),
    finalized_ns=st.integers(0, 2**62),
    first_token_ns=st.integers(0, 2**62),
    last_token_ns=st.integers(0, 2**62),
    attempt=st.integers(1, 1000),
    resumed=st.just([]),
)
