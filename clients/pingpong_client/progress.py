"""Where a chain stands, built from its events alone; what the live view shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import AgentResult, ChainEvent, ChainResult, Placement

Phase = Literal["waiting", "reading", "writing", "finished", "failed", "cancelled"]
OPEN_PHASES = frozenset({"waiting", "reading", "writing"})


@dataclass
class AgentProgress:
    """One agent, as far as events have told. Times are ms since the chain was submitted."""

    name: str
    kind: Literal["agent", "extract", "call"] = "agent"
    """An agent, or a step between agents: of one, `written` and `received` count characters."""
    phase: Phase = "waiting"
    worker: str = ""
    read: int = 0
    """Prompt tokens sent to the engine."""
    prompt_tokens: int = 0
    """Length of the prompt; while it still grows, a lower bound."""
    written: int = 0
    """Output tokens."""
    received: int = 0
    """Output tokens whose events have come."""
    text: str = ""
    attempt: int = 1
    """See `AgentResult.attempt`."""
    resumed: int = 0
    """Workers that it has outlived."""
    opened_ms: float | None = None
    first_token_ms: float | None = None
    last_ms: float | None = None
    """Of the last read or written token."""

    @property
    def has_all_text(self) -> bool:
        """Whether no event was lost, so that `text` is the whole text once the agent has finished."""
        return self.received == self.written

    @property
    def rate(self) -> float | None:
        """Tokens a second of the current phase: read since the session opened, or written since the first token."""
        if self.last_ms is None or self.kind != "agent":
            return None
        if self.phase == "reading":
            since, tokens = self.opened_ms, self.read
        else:
            since, tokens = self.first_token_ms, self.written - 1
        if since is None or self.last_ms <= since or tokens <= 0:
            return None
        return tokens * 1000 / (self.last_ms - since)


@dataclass
class ChainProgress:
    """A chain and its agents, in order."""

    id: str
    name: str
    agents: list[AgentProgress]
    placement: Placement | None = None
    state: str = "queued"
    error: str = ""
    why: str = ""
    """Of a queued chain that was attached to: what it waits for."""
    _by_name: dict[str, AgentProgress] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {agent.name: agent for agent in self.agents}

    @classmethod
    def of_chain(cls, chain_id: str, chain: Chain) -> ChainProgress:
        """A chain that has just been submitted."""
        return cls(chain_id, chain.name, [AgentProgress(agent.name, _kind_of(agent)) for agent in chain.agents])

    @classmethod
    def of_result(cls, result: ChainResult) -> ChainProgress:
        """A chain that has been attached to."""
        return cls(
            result.id,
            result.name,
            [_agent_of(agent) for agent in result.agents],
            placement=result.placement,
            state=result.state,
            error=result.error,
            why=result.why if result.state == "queued" else "",
        )

    def agent(self, name: str) -> AgentProgress | None:
        """The agent of that name."""
        return self._by_name.get(name)

    def apply(self, event: ChainEvent) -> None:
        """Take in one event; an unknown agent or kind, from a newer daemon, changes nothing."""
        data = event.data
        if event.kind == "started":
            self.state = "running"
            self.placement = data.get("placement", self.placement)
        elif event.kind == "ended":
            self.state = data.get("state", "failed")
            self.error = data.get("error", "")
            self._close(self.state)
        elif (agent := self._by_name.get(event.agent)) is not None:
            _apply_to_agent(agent, event)

    def _close(self, state: str) -> None:
        left: Phase = "cancelled" if state == "cancelled" else "failed"
        for agent in self.agents:
            if agent.phase in OPEN_PHASES:
                agent.phase = "finished" if state == "finished" else left


def count_phases(agents: Iterable[AgentProgress], phase: Phase) -> int:
    """How many agents are in a phase."""
    return sum(agent.phase == phase for agent in agents)


def _apply_to_agent(agent: AgentProgress, event: ChainEvent) -> None:
    data = event.data
    agent.attempt = max(agent.attempt, event.attempt)
    if event.kind == "agent_restarted":
        agent.phase = "waiting"
        agent.text, agent.worker = "", ""
        agent.read = agent.prompt_tokens = agent.written = agent.received = 0
        agent.opened_ms = agent.first_token_ms = agent.last_ms = None
    elif event.kind == "agent_resumed":
        agent.phase = "waiting"
        agent.resumed += 1
        agent.read = 0
    elif event.kind == "opened":
        agent.phase = "reading"
        agent.worker = data.get("worker", "")
        agent.prompt_tokens = data.get("prompt_tokens", 0)
        agent.opened_ms = event.at_ms
    elif event.kind == "reading":
        agent.read = data.get("sent", agent.read)
        agent.prompt_tokens = max(agent.prompt_tokens, agent.read)
        agent.last_ms = event.at_ms
    elif event.kind == "finalized":
        agent.prompt_tokens = data.get("prompt_tokens", agent.prompt_tokens)
    elif event.kind == "writing":
        agent.phase = "writing"
        agent.read = agent.prompt_tokens
        agent.last_ms = event.at_ms
        if agent.first_token_ms is None:  # of a resumed agent the first token is long since there
            agent.first_token_ms = event.at_ms
        agent.written = max(agent.written, 1)
    elif event.kind == "tokens":
        agent.text += data.get("text", "")
        if agent.kind == "agent":
            agent.received += len(data.get("ids", ()))
            agent.written = data.get("output_tokens", agent.received)
        else:
            agent.received += len(data.get("text", ""))
            agent.written = max(agent.written, agent.received)
        agent.last_ms = event.at_ms
    elif event.kind == "agent_finished":
        agent.phase = "finished"
        agent.written = data.get("output_tokens" if agent.kind == "agent" else "characters", agent.written)


def _kind_of(agent: Agent) -> Literal["agent", "extract", "call"]:
    if agent.extract is not None:
        return "extract"
    return "agent" if agent.call is None else "call"


def _agent_of(result: AgentResult) -> AgentProgress:
    sent = result.appends[-1].sent if result.appends else 0
    writes = result.first_token_ms is not None
    return AgentProgress(
        result.name,
        result.kind,
        phase=result.state,
        worker=result.worker,
        read=result.prompt_tokens if writes else sent,
        prompt_tokens=max(result.prompt_tokens, sent),
        written=result.output_tokens,
        received=result.output_tokens,
        text=result.text,
        attempt=result.attempt,
        resumed=len(result.resumed),
        opened_ms=result.opened_ms,
        first_token_ms=result.first_token_ms,
        last_ms=result.last_token_ms if writes else (result.appends[-1].at_ms if sent else None),
    )
