"""Runs chains: applies what happens to their states, and carries out the commands that follow.

It knows the fleet, the slab and the ledgers of the groups; `chains.py` knows clients, the queue and the store.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from pingpong_bus.errors import EngineError, PingpongError
from pingpong_bus.messages import (
    AbortHop,
    ChainEvent,
    EventKind,
    HopAppended,
    HopChecked,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopText,
    ResumeEntry,
    StartHop,
    StreamRef,
    WorkerMessage,
)
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.token_log import TokenLogReader, TokenLogWriter
from pingpongd.admission import prompt_bounds
from pingpongd.chain_record import ChainRecord
from pingpongd.chain_state import (
    LIVE,
    Abort,
    Admitted,
    Checked,
    Command,
    Dispatch,
    Ended,
    Event,
    FailAsked,
    Finish,
    FirstToken,
    Held,
    IllegalTransition,
    Lost,
    Moved,
    Opened,
    Phase,
    Renew,
    Retry,
    Stage,
    transition,
)
from pingpongd.config import DaemonConfig
from pingpongd.fleet import Fleet, Worker
from pingpongd.hop_specs import hop_spec
from pingpongd.ledger import GroupLedger, hop_tokens
from pingpongd.placement import GroupView, Plan, place, replacement

_log = structlog.get_logger()


class RunsListener(Protocol):
    """Who keeps what the runs bring about."""

    def start_waiting(self) -> None:
        """A group serves again: chains that wait may start."""

    def chain_started(self, record: ChainRecord) -> None:
        """It has its logs and a plan."""

    def agent_finished(self, record: ChainRecord, index: int) -> None:
        """An agent has written all, or its prompt has been checked since."""

    def chain_ended(self, record: ChainRecord, stage: Stage, error: str) -> None:
        """Its logs are free again."""


class ChainRuns:
    """The running chains and their hops; listens to the fleet (`FleetListener`)."""

    def __init__(
        self, config: DaemonConfig, slab: Slab, publish: Callable[[ChainEvent], None], listener: RunsListener
    ) -> None:
        """Args:
        config: the daemon's.
        slab: where token logs are.
        publish: called with every event of every chain.
        listener: told of beginnings and ends.
        """
        self.config = config
        self.fleet: Fleet | None = None
        self._slab = slab
        self._publish = publish
        self._listener = listener
        self._hops: dict[str, tuple[ChainRecord, int, str]] = {}
        """Hops that may still report: chain, agent, group."""
        self._ledgers: dict[str, GroupLedger] = {}
        self._left: set[str] = set()
        """Groups whose engine has died, as its hops say, and whose worker has not ended yet."""
        self._held: dict[tuple[int, int], tuple[ChainRecord, int]] = {}
        """Agents whose turn has come, by chain number and index, that wait for a group or for room."""
        self._depth = 0
        self._retrying = False

    # ---------------------------------------------------------------------------------------------------- for chains

    def groups(self) -> list[GroupView]:
        """The groups that take hops now, for placement."""
        return [view for view in self._fleet.views() if view.name not in self._left]

    def plan(self, record: ChainRecord) -> Plan:
        """Where the chain's agents are to run.

        A group that is down counts where the chain needs it: it comes back, or its agents run elsewhere meanwhile.

        Raises:
            PingpongError: a group that the chain needs is gone for good.
        """
        mode, group, ready = record.options.mode, record.options.group, self.groups()
        standing = [
            GroupView(worker.name, len(worker.hops))
            for worker in self._fleet.workers.values()
            if worker.state != "failed"
        ]
        if group is not None:
            names = [view.name for view in ready]
            return place(record.shape, mode, ready if group in names else standing, record.number, group)
        if mode == "ping-pong" and len(ready) < 2:
            if len(standing) >= 2:
                return place(record.shape, mode, standing, record.number)
            plan = place(record.shape, "serial", ready, record.number)
            return Plan(plan.placement, plan.groups, "asked for ping-pong, and one group is left")
        return place(record.shape, mode, ready, record.number)

    def start(self, record: ChainRecord) -> None:
        """Give a chain its logs and begin; there have to be as many free ones as it has agents."""
        try:
            record.plan = self.plan(record)
        except PingpongError as error:  # the groups have changed since it was accepted
            self.apply(record, FailAsked(str(error)))
            return
        for agent, phase, group in zip(record.agents, record.state.phases, record.plan.groups, strict=True):
            agent.stream = self._slab.allocate()
            if phase is Phase.DONE:  # written before the daemon's start, into a log that is gone
                writer = TokenLogWriter(self._slab, agent.stream)
                writer.append(agent.output_ids)
                writer.close(agent.finish_reason or "stop", agent.stop_token)
            else:
                agent.worker = group
        self._listener.chain_started(record)
        _log.info("chain_started", chain=record.id, placement=record.plan.placement, why=record.plan.why)
        self.event(record, "started", None, time.monotonic_ns(), placement=record.plan.placement, why=record.plan.why)
        self.apply(record, Admitted(record.plan.placement))

    def apply(self, record: ChainRecord, event: Event) -> None:
        """Apply an event and carry out what follows from it; a command that fails becomes the next event."""
        self._depth += 1
        events: deque[Event] = deque([event])
        try:
            while events:
                try:
                    record.state, commands = transition(record.state, events.popleft())
                except IllegalTransition as error:  # a fault of ours costs this chain, and no other
                    _log.error("illegal_transition", chain=record.id, error=str(error))
                    asked = FailAsked(f"a fault in the daemon: {error.event}")
                    record.state, commands = transition(record.state, asked)
                for command in commands:
                    events.extend(self._carry_out(record, command))
        finally:
            self._depth -= 1
        if self._depth == 0 and self._held:
            self._retry_held()

    # ------------------------------------------------------------------------------------------------ for the fleet

    def hop_message(self, worker: Worker, message: WorkerMessage) -> None:
        """A worker reports on one of its hops."""
        hop = getattr(message, "hop", "")
        found = self._hops.get(hop)
        if found is None or found[2] != worker.name:
            _log.debug("hop_unknown", worker=worker.name, hop=hop, message=type(message).__name__)
            return
        record, index, _ = found
        agent = record.agents[index]
        match message:
            case HopOpened(at_ns=at_ns):
                if not agent.output_ids:
                    agent.opened_ns = at_ns
                literal, _ = prompt_bounds(record.chain, record.prepared[index])
                self.event(record, "opened", index, at_ns, worker=worker.name, prompt_tokens=literal)
                self.apply(record, Opened(index))
            case HopAppended(append=append):
                agent.appends.append(append)
                self.event(record, "reading", index, append.done_ns or append.at_ns, sent=append.sent)
            case HopFinalized(at_ns=at_ns):
                if not agent.output_ids:
                    agent.finalized_ns = at_ns
                agent.prompt_tokens, agent.prompt_digest = message.prompt_tokens, message.prompt_digest
                self.event(record, "finalized", index, at_ns, prompt_tokens=message.prompt_tokens)
            case HopFirstToken(at_ns=at_ns, cached_tokens=cached):
                if not agent.first_token_ns:
                    agent.first_token_ns, agent.cached_tokens = at_ns, cached
                ttft = record.ttft_ms(index)
                self.event(record, "writing", index, at_ns, cached_tokens=cached, ttft_ms=ttft)
                self.apply(record, FirstToken(index))
            case HopText(upto=upto, text=text):
                self._take_output(record, index, upto, text)
            case HopEnded():
                self._hop_ended(worker, record, index, message)
            case HopChecked(prompt_token_match=match):
                agent.prompt_token_match = match
                del self._hops[hop]
                self._listener.agent_finished(record, index)
                self.apply(record, Checked(index))

    def worker_lost(self, worker: Worker, why: str) -> None:
        """A worker that served is gone, and its process reaped: nobody writes its hops' logs any more."""
        self._ledgers.pop(worker.name, None)
        worker.hops.clear()
        self._depth += 1  # hops are given to other groups once all that are lost are known
        try:
            for hop, (_, _, group) in list(self._hops.items()):
                if group == worker.name and hop in self._hops:  # its chain may have ended in this very loop
                    self._lose(hop, why, blamed=True)
        finally:
            self._depth -= 1
        self._retry_held()

    def worker_ready(self, worker: Worker) -> None:
        """A worker serves, for the first time or again."""
        assert worker.limits is not None  # noqa: S101 - it came with Ready
        self._ledgers[worker.name] = GroupLedger(worker.limits)
        self._left.discard(worker.name)
        self._retry_held()
        self._listener.start_waiting()

    def group_failed(self, worker: Worker, why: str) -> None:
        """No other worker will be tried for this group: chains that name it cannot go on."""
        for record, _ in list(self._held.values()):
            if record.options.group == worker.name:
                self.apply(record, FailAsked(f'the group "{worker.name}" is gone: {why}'))
        self._retry_held()

    # ---------------------------------------------------------------------------------------------------- hops' ends

    def _hop_ended(self, worker: Worker, record: ChainRecord, index: int, message: HopEnded) -> None:
        agent, state = record.agents[index], message.state
        if record.state.phases[index] not in LIVE:
            return  # it answers an AbortHop that crossed the hop's own end
        worker.hops.discard(message.hop)
        if state == "lost":
            self._left.add(worker.name)  # until another worker serves there
            self._lose(message.hop, message.message or "its engine is gone", blamed=worker.state == "ready")
            return
        if worker.name in self._ledgers:
            self._ledgers[worker.name].give_back(message.hop)
        assert agent.stream is not None  # noqa: S101 - set when the chain was started
        self._take_output(record, index, TokenLogReader(self._slab, agent.stream).peek()[0], "")
        agent.session = message.session
        if state == "finished":
            agent.last_token_ns = message.at_ns
            agent.finish_reason, agent.stop_token = message.finish_reason, message.stop_token
            self._remember_prefix(worker, record, index)
            self._tell_finished(worker, record, index)
            self._listener.agent_finished(record, index)
        else:
            self._hops.pop(message.hop, None)
        error = _blame(record, index, message.message) if message.message else ""
        self.apply(record, Ended(index, state, error))
        if state == "finished" and record.chain.agents[index].prompt_ids is not None:
            self._hops.pop(message.hop, None)  # gone already where the chain has ended with this hop
            self.apply(record, Checked(index))  # a prompt given as ids has no text to check

    def _tell_finished(self, worker: Worker, record: ChainRecord, index: int) -> None:
        agent = record.agents[index]
        total = record.total_ms(index)
        self.event(
            record,
            "agent_finished",
            index,
            agent.last_token_ns,
            finish_reason=agent.finish_reason,
            output_tokens=len(agent.output_ids),
            total_ms=total,
        )
        _log.info(
            "agent_finished",
            chain=record.id,
            agent=record.chain.agents[index].name,
            worker=worker.name,
            ttft_ms=record.ttft_ms(index),
            total_ms=total,
            prompt_tokens=agent.prompt_tokens,
            cached_tokens=agent.cached_tokens,
            output_tokens=len(agent.output_ids),
            appends=len(agent.appends),
            resumed=len(agent.resumed),
        )

    def _lose(self, hop: str, why: str, *, blamed: bool) -> None:
        """A hop is gone with its engine.

        Args:
            hop: that still may report.
            why: for people.
            blamed: the engine died under it; not so where its worker was asked to stop.
        """
        record, index, group = self._hops.pop(hop)
        if group in self._ledgers:
            self._ledgers[group].give_back(hop)
        agent, phase = record.agents[index], record.state.phases[index]
        if phase is Phase.WRITTEN:
            self.apply(record, Checked(index))  # written whole; only the check of its prompt is lost
        if phase not in LIVE:
            return
        assert agent.stream is not None  # noqa: S101 - set when the chain was started
        count, log = TokenLogReader(self._slab, agent.stream).peek()
        self._take_output(record, index, count, "")
        agent.losses += blamed
        _log.warning("hop_lost", chain=record.id, hop=hop, worker=group, phase=phase.value, tokens=count, reason=why)
        if log is LogState.ABORTED and phase is not Phase.YIELDING:
            self.apply(record, Ended(index, "failed", _blame(record, index, why)))
        elif agent.losses >= max(1, self.config.restart.give_up_after - 1):
            # Its own prompt may be what engines die of: it must not take one after the other along.
            error = f"engines died under it {agent.losses} times, at last: {why}"
            self.apply(record, Ended(index, "failed", _blame(record, index, error)))
        else:
            if record.state.stage is Stage.RUNNING and phase is not Phase.YIELDING:
                now = record.since_submission_ms(time.monotonic_ns())
                agent.resumed.append(ResumeEntry(at_ms=now, tokens=count, worker=group, why=why))
            # A log that was closed is whole, even where it is empty; what is left is to say so.
            self.apply(record, Lost(index, written=count > 0 or log is LogState.CLOSED))

    def _take_output(self, record: ChainRecord, index: int, upto: int, text: str) -> None:
        """Take the ids up to `upto` from the agent's log, with the text that goes with them."""
        agent = record.agents[index]
        assert agent.stream is not None  # noqa: S101 - set when the chain was started
        start = len(agent.output_ids)
        ids: list[int] = []
        if upto > start:
            ids = TokenLogReader(self._slab, agent.stream).read(start).ids[: upto - start]
            agent.output_ids += ids
        if text:
            agent.text.append(text)
        if ids or text:
            now, total = time.monotonic_ns(), len(agent.output_ids)
            self.event(record, "tokens", index, now, ids=ids, text=text, first_index=start, output_tokens=total)

    def _remember_prefix(self, worker: Worker, record: ChainRecord, index: int) -> None:
        digest, length = record.shape.prefixes[index]
        agent = record.agents[index]
        if length and not record.options.isolate:
            worker.memory.computed(digest, length, agent.prompt_tokens + len(agent.output_ids))

    # ------------------------------------------------------------------------------------------------------ commands

    def _carry_out(self, record: ChainRecord, command: Command) -> list[Event]:
        match command:
            case Dispatch(agent=index):
                return self._dispatch(record, index)
            case Abort(agent=index):
                self._abort(record, index)
            case Renew(agent=index):
                self._renew(record, index)
            case Finish(stage=stage, error=error):
                self._finish(record, stage, error)
        return []

    def _dispatch(self, record: ChainRecord, index: int) -> list[Event]:
        """Start an agent's hop where there is a group and room, in turn; else it is held."""
        agent = record.agents[index]
        key = record.number, index
        if (gone := self._gone(record)) is not None:
            return [Held(index), FailAsked(gone)]
        in_turn = self._retrying or not self._held or bool(agent.output_ids)
        worker = self._target(record, index) if in_turn else None
        hop = f"{record.id}/{index}/{agent.hops}"
        if worker is None or not self._ledgers[worker.name].take(hop, self._full_length(record, index)):
            self._held[key] = record, index
            return [Held(index)]
        moved = self._move(record, index, worker)
        agent.hop = hop
        try:
            spec = hop_spec(record, index, lambda at: self._stream(record, at), self.config.chunks)
            self._fleet.send(worker, StartHop(spec=spec))
        except EngineError as error:  # it is gone, and will be reported lost
            _log.warning("hop_not_sent", chain=record.id, hop=hop, worker=worker.name, error=str(error))
            self._ledgers[worker.name].give_back(hop)
            self._left.add(worker.name)
            self._held[key] = record, index
            return [*moved, Held(index)]
        agent.hops += 1
        self._hops[hop] = record, index, worker.name
        worker.hops.add(hop)
        if len(agent.resumed) > agent.resumes_told:
            agent.resumes_told, last = len(agent.resumed), agent.resumed[-1]
            now = time.monotonic_ns()
            self.event(record, "agent_resumed", index, now, worker=worker.name, tokens=last.tokens, why=last.why)
            _log.info("agent_resumed", chain=record.id, hop=hop, worker=worker.name, tokens=last.tokens)
        return moved

    def _gone(self, record: ChainRecord) -> str | None:
        """Why the group that the chain's submission names will not serve any more; None where it may."""
        name = record.options.group
        if name is None or (name in self._fleet.workers and self._fleet.workers[name].state != "failed"):
            return None
        return f'the group "{name}" is gone.'

    def _target(self, record: ChainRecord, index: int) -> Worker | None:
        """Where the agent's next hop can run: on its own group, or on another where that one does not serve."""
        workers, views = self._fleet.workers, self.groups()
        name = record.agents[index].worker
        if any(view.name == name for view in views):
            return workers[name]
        if record.options.group is not None:
            return None
        reads = record.state.upstreams
        near = [at for at in range(len(reads)) if at in reads[index] or index in reads[at]]
        avoid = frozenset(record.agents[at].worker for at in near if record.state.phases[at] in LIVE)
        other = replacement(views, avoid)
        return workers[other] if other is not None else None

    def _move(self, record: ChainRecord, index: int, worker: Worker) -> list[Event]:
        """Let an agent, and in series those that follow it there, run on another group."""
        agent = record.agents[index]
        before, agent.worker = agent.worker, worker.name
        if before == worker.name:
            return []
        for at, phase in enumerate(record.state.phases):
            if record.state.placement == "serial" and phase is Phase.WAITING and record.agents[at].worker == before:
                record.agents[at].worker = worker.name
        if record.state.placement == "ping-pong" and len(self.groups()) < 2:
            return [Moved("serial")]  # a reader beside its upstream in one engine would slow its decoding
        return []

    def _full_length(self, record: ChainRecord, index: int) -> int:
        """The most tokens that the agent's hop can come to."""
        done = (Phase.WRITTEN, Phase.DONE)
        written = {
            at: len(record.agents[at].output_ids)
            for at in record.state.upstreams[index]
            if record.state.phases[at] in done
        }
        return hop_tokens(record.chain, record.prepared, index, written)

    def _retry_held(self) -> None:
        """Dispatch those that wait, for whom there is a group and room: first who was interrupted, then by age.

        None overtakes another on the same group, so none starves.
        """
        if self._retrying:
            return
        self._retrying = True
        try:
            full: set[str] = set()
            for key, (record, index) in sorted(self._held.items(), key=_turn):
                worker = self._target(record, index) if key in self._held else None
                if worker is None or worker.name in full:
                    continue
                if not self._ledgers[worker.name].fits(self._full_length(record, index)):
                    full.add(worker.name)
                    continue
                del self._held[key]
                self.apply(record, Retry(index))
        finally:
            self._retrying = False

    def _abort(self, record: ChainRecord, index: int) -> None:
        agent = record.agents[index]
        found = self._hops.get(agent.hop)
        if found is None:
            return  # it was never sent
        try:
            self._fleet.send(self._fleet.workers[found[2]], AbortHop(hop=agent.hop))
        except EngineError as error:  # its end is reported by worker_lost
            _log.warning("abort_not_sent", chain=record.id, hop=agent.hop, error=str(error))

    def _renew(self, record: ChainRecord, index: int) -> None:
        agent = record.agents[index]
        assert agent.stream is not None  # noqa: S101 - set when the chain was started
        self._slab.free(agent.stream)
        agent.stream = self._slab.allocate()
        if agent.output_ids:
            agent.begin_anew()
            self.event(record, "agent_restarted", index, time.monotonic_ns(), why="it gave way to another agent")

    def _finish(self, record: ChainRecord, stage: Stage, error: str) -> None:
        for index, agent in enumerate(record.agents):
            self._hops.pop(agent.hop, None)
            self._held.pop((record.number, index), None)
            if agent.stream is not None:
                self._slab.free(agent.stream)
                agent.stream = None
        self._listener.chain_ended(record, stage, error)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _stream(self, record: ChainRecord, index: int) -> StreamRef:
        """The log of an agent, with the endpoint that rings for it."""
        agent = record.agents[index]
        assert agent.stream is not None  # noqa: S101 - allocated when the chain started
        over = record.state.phases[index] in (Phase.WRITTEN, Phase.DONE)
        bell = "" if over else self._fleet.workers[agent.worker].bell
        return StreamRef(slot=agent.stream.slot, generation=agent.stream.generation, bell=bell)

    @property
    def _fleet(self) -> Fleet:
        assert self.fleet is not None  # noqa: S101 - no chain runs before
        return self.fleet

    def event(self, record: ChainRecord, kind: EventKind, index: int | None, at_ns: int, **data: Any) -> None:
        """Tell the chain's followers."""
        self._publish(
            ChainEvent(
                chain=record.id,
                kind=kind,
                at_ms=record.since_submission_ms(at_ns),
                agent=record.chain.agents[index].name if index is not None else "",
                attempt=record.agents[index].attempt if index is not None else 1,
                data=data,
            )
        )


def _turn(item: tuple[tuple[int, int], tuple[ChainRecord, int]]) -> tuple[bool, int, int]:
    """Sorts held agents."""
    (number, index), (record, _) = item
    return record.state.phases[index] is not Phase.INTERRUPTED, number, index


def _blame(record: ChainRecord, index: int, why: str) -> str:
    """A failure's sentence, with the agent it happened to."""
    return f'agent "{record.chain.agents[index].name}": {why}'
