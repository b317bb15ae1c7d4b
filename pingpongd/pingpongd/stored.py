"""What the chain store keeps of a chain; times are in ns since the chain's submission, as no clock outlives a boot."""

from __future__ import annotations

import msgspec

from pingpong_bus.chain import Chain, Exactness
from pingpong_bus.messages import (
    AppendRecord,
    ChainResult,
    ChainState,
    DraftCounts,
    FinishReason,
    HopEntry,
    Placement,
    PreparedAgent,
    ResumeEntry,
    SeamCounts,
    SessionKind,
    SubmitOptions,
)
from pingpongd.exactness import Exact


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What was accepted: enough to run the chain, whenever that is."""

    chain: Chain
    """With a seed wherever an agent's temperature is above 0."""
    inputs: dict[str, str]
    options: SubmitOptions
    prepared: list[PreparedAgent]
    model: str
    """The engines' model: the prompts are tokenized for it, and no other can run them. Of a chain over several, that of
    its first agent."""
    number: int
    """Chains are numbered from 1, in the order of their acceptance."""
    submitted_at: float
    """Seconds since the epoch; shown to people, and the base of deadlines and ages across restarts."""
    key: str = ""
    """Submitting again with it names this chain."""
    exact: Exact = Exact()
    """Chains that were accepted before there were levels are "fast"."""
    engine_models: list[str] = []
    """Per agent, its engine's model; "" of a step. Empty: `model`, of all."""

    def engine_model(self, index: int) -> str:
        """The model of the engines that can run an agent, as they report it; "" of a step."""
        return self.engine_models[index] if self.engine_models else self.model


class AgentOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that has finished."""

    worker: str
    output_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_token: int | None
    session: SessionKind | None
    prompt_tokens: int
    prompt_digest: str
    cached_tokens: int
    prompt_token_match: bool | None
    appends: list[AppendRecord]
    opened_ns: int
    finalized_ns: int
    first_token_ns: int
    last_token_ns: int
    attempt: int
    resumed: list[ResumeEntry]
    drafts: DraftCounts | None = None
    seam: SeamCounts | None = None
    hops: list[HopEntry] = []
    """Of an agent that an older version has kept: none."""
    devices: dict[str, list[str]] = {}
    """Of the workers of its hops; see `ChainResult.devices`."""


class LiveChain(msgspec.Struct, frozen=True, kw_only=True):
    """A chain that had not ended when the daemon did."""

    id: str
    job: Job
    started: bool
    """Some agent may have run."""
    attempt: int
    """Of its unfinished agents: 1, and one more for each start of the daemon, this one counted. That also where
    none may have run: their beginning may not have come to the disk."""
    outcomes: dict[int, AgentOutcome]
    """Of the agents that have finished, by index."""


class EndedChain(msgspec.Struct, frozen=True, kw_only=True):
    """A chain that has ended, for `list` and its like."""

    id: str
    name: str
    state: ChainState
    placement: Placement | None
    agents: int
    finished_agents: int
    submitted_at: float
    ended_at: float
    e2e_ms: float | None
    exactness: Exactness = "fast"


class StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an ended chain, with the ids of its prompts where they are known."""

    result: ChainResult
