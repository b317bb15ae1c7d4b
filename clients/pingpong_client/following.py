"""What of a chain its follower has been given: whatever is lost or sent twice on the way, each token is given once.

Events tell what has changed, a snapshot where everything stands. Both go through one `Following`, in the order in
which they came; what it lets through, applied in order, is the chain. A snapshot becomes the events that are missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pingpong_bus.messages import AgentResult, ChainEvent, ChainResult, EventKind

ENDED_STATES = frozenset({"finished", "failed", "cancelled"})

_RESTARTED = "it had to begin again"


@dataclass
class _Given:
    """What has been given of one agent's attempt."""

    attempt: int = 1
    ids: int = 0
    """Output tokens."""
    characters: int = 0
    opened: bool = False
    sent: int = 0
    """Prompt tokens that were reported as read."""
    finalized: bool = False
    writing: bool = False
    finished: bool = False
    resumed: int = 0
    """Workers that it has outlived."""
    resume_foretold: tuple[int, str] | None = None
    """Tokens and reason of the latest resumption, where a snapshot had it before its event came."""

    @property
    def anything(self) -> bool:
        return self.opened or self.finished or bool(self.ids or self.characters or self.resumed)

    def lose_worker(self) -> None:
        """The prompt is read anew; what was written stays."""
        self.opened = self.finalized = self.writing = False
        self.sent = 0
        self.resumed += 1


class Following:
    """One chain, as its follower knows it.

    Args:
        chain: its id.
        agents: names of its agents, where they are known; of these none may be missing at the end.
        stale: whether something happened before that a snapshot has to tell.
    """

    def __init__(self, chain: str, agents: Iterable[str] = (), *, stale: bool = False) -> None:
        self.chain = chain
        self.ended = False
        """Whether ``ended`` has been given: nothing comes after it."""
        self.stale = stale
        """Whether something was lost. Only a snapshot helps; until it comes, nothing is given."""
        self._started = False
        self._agents = {name: _Given() for name in agents}

    @classmethod
    def of_result(cls, result: ChainResult) -> Following:
        """A chain of which the follower knows this result."""
        following = cls(result.id)
        following.take(result)
        return following

    def take(self, news: ChainEvent | ChainResult) -> list[ChainEvent]:
        """The events to give on, now that an event or a snapshot has come."""
        if self.ended:
            return []
        if isinstance(news, ChainResult):
            return self._catch_up(news)
        if self.stale:
            return []  # the snapshot will have it
        if news.kind == "started":
            given_before, self._started = self._started, True
            return [] if given_before else [news]
        if news.kind == "ended":
            return self._take_end(news)
        return self._take_agent_event(news)

    # ------------------------------------------------------------------------------------------------------ events

    def _take_end(self, event: ChainEvent) -> list[ChainEvent]:
        if event.data.get("state") == "finished" and not all(given.finished for given in self._agents.values()):
            self.stale = True
            return []
        self.ended = True
        return [event]

    def _take_agent_event(self, event: ChainEvent) -> list[ChainEvent]:
        given = self._agents.setdefault(event.agent, _Given(attempt=event.attempt))
        if event.attempt < given.attempt:
            return []  # of an attempt that is void
        events: list[ChainEvent] = []
        if event.attempt > given.attempt:
            if event.kind != "agent_restarted" and given.anything:
                events.append(self._event("agent_restarted", event.agent, event.at_ms, event.attempt, why=_RESTARTED))
            given = self._begin_again(event.agent, event.attempt)
        elif event.kind == "agent_restarted":
            return []
        return events + self._take_of_attempt(event, given)

    def _take_of_attempt(self, event: ChainEvent, given: _Given) -> list[ChainEvent]:
        if given.finished:
            return []
        match event.kind:
            case "opened":
                given.opened = True
            case "reading":
                given.sent = max(given.sent, event.data.get("sent", 0))
            case "finalized":
                given.finalized = True
            case "writing":
                given.writing = True
            case "tokens":
                return self._take_tokens(event, given)
            case "agent_resumed":
                foretold, given.resume_foretold = given.resume_foretold, None
                times = event.data.get("times", 0)  # older daemons do not say
                if times:
                    known = times <= given.resumed
                else:
                    known = foretold == (event.data.get("tokens"), event.data.get("why"))
                if known:
                    return []
                given.lose_worker()
            case "agent_finished":
                lacks_text = event.data.get("characters", 0) > given.characters
                if event.data.get("output_tokens", 0) > given.ids or lacks_text:
                    self.stale = True
                    return []
                given.finished = True
        return [event]

    def _take_tokens(self, event: ChainEvent, given: _Given) -> list[ChainEvent]:
        """Cut off what has been given before."""
        ids, text = event.data.get("ids", []), event.data.get("text", "")
        first_index = event.data.get("first_index", given.ids)
        first_character = event.data.get("first_character", given.characters)
        if first_index > given.ids or first_character > given.characters:
            self.stale = True
            return []
        return self._tokens(
            event.agent, given, ids[given.ids - first_index :], text[given.characters - first_character :], event.at_ms
        )

    def _tokens(self, name: str, given: _Given, ids: list[int], text: str, at_ms: float) -> list[ChainEvent]:
        if not ids and not text:
            return []
        data = {
            "ids": ids,
            "text": text,
            "first_index": given.ids,
            "first_character": given.characters,
            "output_tokens": given.ids + len(ids),
        }
        given.ids += len(ids)
        given.characters += len(text)
        return [self._event("tokens", name, at_ms, given.attempt, **data)]

    # --------------------------------------------------------------------------------------------------- snapshots

    def _catch_up(self, result: ChainResult) -> list[ChainEvent]:
        """The events between what was given and a snapshot, which is never older than they are."""
        self.stale = False
        events: list[ChainEvent] = []
        if result.state == "queued":
            self._started = False
        elif not self._started and result.placement is not None:
            self._started = True
            events.append(self._event("started", "", 0.0, placement=result.placement, why=result.why))
        for agent in result.agents:
            events += self._catch_up_agent(agent)
        if result.state in ENDED_STATES:
            self.ended = True
            at_ms = max([result.e2e_ms or 0.0, *(_latest_ms(agent) for agent in result.agents)])
            events.append(self._event("ended", "", at_ms, state=result.state, error=result.error))
        return events

    def _catch_up_agent(self, agent: AgentResult) -> list[ChainEvent]:
        given = self._agents.setdefault(agent.name, _Given(attempt=agent.attempt))
        events: list[ChainEvent] = []

        def add(kind: EventKind, at_ms: float | None, **data: Any) -> None:
            at_ms = _latest_ms(agent) if at_ms is None else at_ms
            events.append(self._event(kind, agent.name, at_ms, agent.attempt, **data))

        if agent.attempt != given.attempt or _is_behind(agent, given):
            if given.anything:
                add("agent_restarted", None, why=_RESTARTED)
            resumed = min(given.resumed, len(agent.resumed))
            given = self._begin_again(agent.name, agent.attempt, resumed)
        for entry in agent.resumed[given.resumed :]:
            given.lose_worker()
            given.resume_foretold = (entry.tokens, entry.why)
            add("agent_resumed", entry.at_ms, worker=agent.worker, tokens=entry.tokens, why=entry.why)
        if agent.state != "waiting":
            if agent.opened_ms is not None and not given.opened:
                given.opened = True
                add("opened", agent.opened_ms, worker=agent.worker, prompt_tokens=agent.prompt_tokens)
            if agent.appends and agent.appends[-1].sent > given.sent:
                given.sent = agent.appends[-1].sent
                add("reading", agent.appends[-1].done_ms or agent.appends[-1].at_ms, sent=given.sent)
            if agent.finalized_ms is not None and not given.finalized:
                given.finalized = True
                add("finalized", agent.finalized_ms, prompt_tokens=agent.prompt_tokens)
            if agent.first_token_ms is not None and agent.state != "reading" and not given.writing:
                given.writing = True
                add("writing", agent.first_token_ms, cached_tokens=agent.cached_tokens, ttft_ms=agent.ttft_ms)
        ids, text = agent.output_ids[given.ids :], agent.text[given.characters :]
        events += self._tokens(agent.name, given, ids, text, _latest_ms(agent))
        if agent.state == "finished" and not given.finished:
            given.finished = True
            step = agent.kind != "agent"
            add(
                "agent_finished",
                agent.last_token_ms,
                finish_reason=agent.finish_reason,
                output_tokens=0 if step else agent.output_tokens,
                total_ms=agent.total_ms,
                **({"characters": agent.output_tokens} if step else {}),
            )
        return events

    def _begin_again(self, name: str, attempt: int, resumed: int = 0) -> _Given:
        """What was given of an agent is void."""
        self._agents[name] = _Given(attempt=attempt, resumed=resumed)
        return self._agents[name]

    def _event(self, kind: EventKind, agent: str, at_ms: float, attempt: int = 1, **data: Any) -> ChainEvent:
        return ChainEvent(chain=self.chain, kind=kind, at_ms=at_ms, agent=agent, attempt=attempt, data=data)


def _is_behind(agent: AgentResult, given: _Given) -> bool:
    """Whether a daemon knows less than was given: it was restarted, and lost what it had not stored."""
    unfinished = given.finished and agent.state != "finished"
    return unfinished or len(agent.output_ids) < given.ids or len(agent.text) < given.characters


def _latest_ms(agent: AgentResult) -> float:
    """When the last thing that is known of an agent happened, since the chain's submission."""
    times = (agent.last_token_ms, agent.first_token_ms, agent.finalized_ms, agent.opened_ms)
    return max((at for at in times if at is not None), default=0.0)
