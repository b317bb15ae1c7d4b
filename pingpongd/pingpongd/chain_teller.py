"""What followers and the log are told of a chain, as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from pingpong_bus.log_records import HopMoved
from pingpong_bus.messages import ChainEvent, EventKind, Placement
from pingpongd.chain_record import ChainRecord, kind_of

_log = structlog.get_logger()
_PIECE = 1 << 15
"""Characters of a step's output in an event."""


class ChainTeller:
    """Makes events of what has been entered into a chain's record."""

    def __init__(self, publish: Callable[[ChainEvent], None]) -> None:
        """Args:
        publish: called with every event of every chain.
        """
        self._publish = publish

    def event(
        self, record: ChainRecord, kind: EventKind, index: int | None, at_ns: int | None = None, **data: Any
    ) -> None:
        """Tell the chain's followers.

        Args:
            record: the chain.
            kind: see `ChainEvent`.
            index: the agent; None: the chain itself.
            at_ns: when; None: now.
            data: what `kind` says there is.
        """
        self._publish(
            ChainEvent(
                chain=record.id,
                kind=kind,
                at_ms=record.since_submission_ms(time.monotonic_ns() if at_ns is None else at_ns),
                agent=record.chain.agents[index].name if index is not None else "",
                attempt=record.agents[index].attempt if index is not None else 1,
                data=data,
            )
        )

    def started(self, record: ChainRecord) -> None:
        """It has its logs and a plan."""
        assert record.plan is not None  # noqa: S101 - made at its start
        placement, why = record.plan.placement, record.plan.why
        _log.info("chain_started", chain=record.id, placement=placement, why=why, exactness=record.job.exact.level)
        self.event(record, "started", None, placement=placement, why=why)

    def tokens(self, record: ChainRecord, index: int, first: int, text: str, characters: int) -> None:
        """An agent has written ids, from `first` on, or there is text for some, behind so many `characters`."""
        ids = record.agents[index].output_ids
        if len(ids) > first or text:
            self.event(
                record,
                "tokens",
                index,
                ids=ids[first:],
                text=text,
                first_index=first,
                first_character=characters,
                output_tokens=len(ids),
            )

    def agent_finished(self, record: ChainRecord, index: int) -> None:
        """An agent has written all."""
        agent = record.agents[index]
        total = self._finished(record, index, output_tokens=len(agent.output_ids))
        _log.info(
            "agent_finished",
            chain=record.id,
            agent=record.chain.agents[index].name,
            model=record.chain.agents[index].model or record.job.engine_model(index),
            worker=agent.worker,
            ttft_ms=record.ttft_ms(index),
            total_ms=total,
            prompt_tokens=agent.prompt_tokens,
            cached_tokens=agent.cached_tokens,
            output_tokens=len(agent.output_ids),
            appends=len(agent.appends),
            resumed=len(agent.resumed),
            draft_tokens=agent.drafts.drafted if agent.drafts is not None else None,
            accepted_tokens=agent.drafts.accepted if agent.drafts is not None else None,
            taken_back_tokens=agent.seam.tokens if agent.seam is not None else None,
        )

    def step_finished(self, record: ChainRecord, index: int) -> None:
        """A step has given its output, all at once."""
        agent, spec = record.agents[index], record.chain.agents[index]
        text = "".join(agent.text)
        for start in range(0, len(text), _PIECE):
            self.event(
                record,
                "tokens",
                index,
                agent.last_token_ns,
                ids=[],
                text=text[start : start + _PIECE],
                first_index=0,
                first_character=start,
                output_tokens=0,
            )
        total = self._finished(record, index, output_tokens=0, characters=len(text))
        _log.info(
            "step_finished",
            chain=record.id,
            agent=spec.name,
            kind=kind_of(spec),
            call=spec.call,
            total_ms=total,
            characters=len(text),
        )

    def _finished(self, record: ChainRecord, index: int, **written: int) -> float | None:
        """Send the event of an agent's or a step's end; gives what it took, in ms."""
        agent, total = record.agents[index], record.total_ms(index)
        self.event(
            record,
            "agent_finished",
            index,
            agent.last_token_ns,
            finish_reason=agent.finish_reason,
            **written,
            total_ms=total,
        )
        return total

    def step_failed(self, record: ChainRecord, index: int, state: str, why: str) -> None:
        """A step has failed, or was ended with its chain."""
        spec = record.chain.agents[index]
        _log.info(
            "step_failed",
            chain=record.id,
            agent=spec.name,
            kind=kind_of(spec),
            call=spec.call,
            state=state,
            error=why,
        )

    def step_repeated(self, record: ChainRecord, index: int) -> None:
        """A call begins that may have run when the daemon ended: nobody can say what has come of it."""
        agent, spec = record.agents[index], record.chain.agents[index]
        agent.resumes_told, last = len(agent.resumed), agent.resumed[-1]
        _log.warning("call_repeated", chain=record.id, agent=spec.name, call=spec.call)
        times = agent.resumes_told
        self.event(record, "agent_resumed", index, worker="", tokens=0, why=last.why, times=times)

    def agent_rerouted(self, record: ChainRecord, index: int, group: str, placement: Placement, late: str) -> None:
        """An agent runs elsewhere than on the group that it was planned for.

        Args:
            record: its chain, which knows where it runs.
            index: the agent.
            group: that it was planned for.
            placement: of what is left of its chain.
            late: why, in a clause.
        """
        _log.info(
            "agent_rerouted",
            chain=record.id,
            agent=record.chain.agents[index].name,
            worker=group,
            to=record.agents[index].worker,
            placement=placement,
            reason=late,
        )

    def hop_moved(self, moved: HopMoved) -> None:
        """A hop was taken off a group whose tokens come late."""
        _log.info(
            "hop_moved",
            chain=moved.chain,
            agent=moved.agent,
            hop=moved.hop,
            worker=moved.worker,
            to=moved.to,
            tokens=moved.tokens,
            left_ms=moved.left_ms,
            there_ms=moved.there_ms,
            cause=moved.cause,
        )

    def resumed(self, record: ChainRecord, index: int) -> None:
        """A new hop goes on where one was lost; said once for each."""
        agent = record.agents[index]
        if len(agent.resumed) == agent.resumes_told:
            return
        agent.resumes_told, last = len(agent.resumed), agent.resumed[-1]
        times = agent.resumes_told
        self.event(record, "agent_resumed", index, worker=agent.worker, tokens=last.tokens, why=last.why, times=times)
        _log.info(
            "agent_resumed",
            chain=record.id,
            agent=record.chain.agents[index].name,
            hop=agent.hop,
            worker=agent.worker,
            tokens=last.tokens,
        )
