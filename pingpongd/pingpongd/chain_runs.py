"""Runs chains: applies what happens to their states, and carries out the commands that follow.

It knows the fleet, the slab and the ledgers of the groups; `chains.py` knows clients, the queue and the store.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import msgspec
import structlog

from pingpong_bus.errors import EngineError, PingpongError
from pingpong_bus.messages import (
    AbortHop,
    ChainEvent,
    HopAppended,
    HopChecked,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopText,
    OutputSource,
    ReleaseHop,
    ResumeEntry,
    StartHop,
    StreamRef,
    WorkerMessage,
)
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.token_log import TokenLogReader, TokenLogWriter
from pingpongd.admission import prompt_bounds
from pingpongd.chain_queue import Turn, turn_of
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
    GiveWay,
    Held,
    IllegalTransition,
    Lost,
    Moved,
    Opened,
    Phase,
    Renew,
    Retry,
    RunStep,
    Stage,
    awaited_steps,
    transition,
)
from pingpongd.chain_steps import ChainSteps, StepTools
from pingpongd.chain_teller import ChainTeller
from pingpongd.config import DaemonConfig
from pingpongd.fleet import Fleet, Worker
from pingpongd.guessing import Guessing
from pingpongd.hop_record import HopRecord
from pingpongd.hop_room import HopRoom
from pingpongd.hop_specs import hop_spec
from pingpongd.kept_prefixes import KeptPrefixes
from pingpongd.model_names import agent_models
from pingpongd.mover import Mover
from pingpongd.moving import Move
from pingpongd.planner import Planner
from pingpongd.scoring import Scoring
from pingpongd.seams import output_sources
from pingpongd.step_runner import StepRunner

_log = structlog.get_logger()


class RunsListener(Protocol):
    """Who keeps what the runs bring about."""

    def start_waiting(self) -> None:
        """A group serves again: chains that wait may start."""

    def chain_started(self, record: ChainRecord) -> None:
        """It has its logs and a plan."""

    def agent_restarted(self, record: ChainRecord, index: int) -> None:
        """An agent begins anew; what it had written is void."""

    def agent_finished(self, record: ChainRecord, index: int) -> Future[None] | None:
        """An agent or a step has written all, or its prompt has been checked since; see `StepsListener`."""

    def chain_ended(self, record: ChainRecord, stage: Stage, error: str) -> None:
        """Its logs are free again."""


class ChainRuns:
    """The running chains and their hops; listens to the fleet (`FleetListener`)."""

    def __init__(
        self,
        config: DaemonConfig,
        slab: Slab,
        publish: Callable[[ChainEvent], None],
        listener: RunsListener,
        tools: StepTools | None = None,
    ) -> None:
        """Args:
        config: the daemon's.
        slab: where token logs are.
        publish: called with every event of every chain.
        listener: told of beginnings and ends.
        tools: that run steps; None: some of its own, with nobody who ends them where this process cannot.
        """
        self.room = HopRoom(config)
        self.planner = Planner(self.room)
        self.mover = Mover(self.room, self.planner)
        self.guessing = Guessing(config)
        self.planner.guesses = config.speculation.enabled
        self.prefixes = KeptPrefixes()
        self.tell = ChainTeller(publish)
        tools = tools or StepTools(StepRunner(config.calls, os.environ))
        self.steps = ChainSteps(tools, slab, self.tell, listener, self.apply)
        self.configure(config)
        self.scoring = Scoring(self.room, self._retry_held)
        self._slab = slab
        self._listener = listener
        self._hops: dict[str, tuple[ChainRecord, int, str]] = {}
        """Hops that may still report: chain, agent, group."""
        self._depth = 0
        self._turn: tuple[ChainRecord, int] | None = None
        """Whose turn it is among those that are held: a chain's agent."""

    # ---------------------------------------------------------------------------------------------------- for chains

    def configure(self, config: DaemonConfig) -> None:
        """Take a configuration, the first or one that was read again.

        Raises:
            ConfigError: a call names a variable that the environment lacks.
        """
        self.config = config
        self.room.configure(config)
        self.steps.runner.configure(config.calls)
        self.guessing.configure(config)
        self.mover.enabled = config.jitter.enabled and config.jitter.route and config.jitter.move
        # One loss before a group would be given up: who is alone then and loses another engine has failed.
        self.room.suspect_after = max(1, config.restart.give_up_after - 2)

    def start(self, record: ChainRecord) -> None:
        """Give a chain its logs and begin; there have to be as many free ones as it has agents."""
        try:
            record.plan = self.planner.plan(record)
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
                agent.worker = group  # of a step, none
        record.started_ns = record.started_ns or time.monotonic_ns()
        self.prefixes.began(record)
        self.steps.runner.expect(record.chain.agents)
        self.planner.began(record)
        self._listener.chain_started(record)
        self.tell.started(record)
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
        if self._depth == 0 and self.room.waited_for:
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
        entry = agent.entries[-1]  # a hop is started when the one before can report no more
        match message:
            case HopOpened(at_ns=at_ns):
                entry.opened_ns = at_ns
                if not agent.output_ids:
                    agent.opened_ns = at_ns
                literal, _ = prompt_bounds(record.chain, record.prepared[index])
                self.tell.event(record, "opened", index, at_ns, worker=worker.name, prompt_tokens=literal)
                self.apply(record, Opened(index))
            case HopAppended(append=append):
                agent.appends.append(append)
                self.tell.event(record, "reading", index, append.done_ns or append.at_ns, sent=append.sent)
            case HopFinalized(at_ns=at_ns):
                entry.finalized_ns, entry.final_tokens = at_ns, message.final_tokens
                entry.prompt_tokens = message.prompt_tokens
                if not agent.output_ids:
                    agent.finalized_ns = at_ns
                agent.prompt_tokens, agent.prompt_digest = message.prompt_tokens, message.prompt_digest
                if record.prepared[index].text:
                    most = message.prompt_tokens + record.chain.agents[index].max_tokens
                    self.room.recount(worker.name, hop, most)
                    self._retry_held()
                self.tell.event(record, "finalized", index, at_ns, prompt_tokens=message.prompt_tokens)
            case HopFirstToken(at_ns=at_ns, cached_tokens=cached):
                entry.first_token_ns, entry.cached_tokens = at_ns, cached
                if not agent.first_token_ns:
                    agent.first_token_ns, agent.cached_tokens = at_ns, cached
                ttft = record.ttft_ms(index)
                self.tell.event(record, "writing", index, at_ns, cached_tokens=cached, ttft_ms=ttft)
                self.apply(record, FirstToken(index))
                if hop in self._hops:
                    self._move_hops(only=hop)
            case HopText(upto=upto, text=text):
                self._take_output(record, index, upto, text)
            case HopEnded():
                self._hop_ended(worker, record, index, message)
            case HopChecked(prompt_token_match=match):
                agent.prompt_token_match = match
                del self._hops[hop]
                self._listener.agent_finished(record, index)
                self.apply(record, Checked(index))

    def look_at_health(self) -> None:
        """Act on how steadily groups decode: to be called when that has changed, and every second."""
        if self.mover.changed():
            self._retry_held()
        self._move_hops()

    def worker_lost(self, worker: Worker, why: str) -> None:
        """A worker that served is gone, and its process reaped: nobody writes its hops' logs any more."""
        worker.hops.clear()
        blamed = worker.order is None or not worker.order.expected
        self._depth += 1  # hops are given to other groups once all that are lost are known
        try:
            for hop, (_, _, group) in list(self._hops.items()):
                if group == worker.name and hop in self._hops:  # its chain may have ended in this very loop
                    self._lose(hop, why, blamed=blamed)
        finally:
            self._depth -= 1
        self.room.lost(worker.name)
        self._retry_held()

    def worker_ready(self, worker: Worker) -> None:
        """A worker serves, for the first time or again."""
        self.room.serves(worker)
        self._retry_held()
        self._listener.start_waiting()

    def group_failed(self, worker: Worker, why: str) -> None:
        """No other worker will be tried for this group: chains that name it cannot go on."""
        for record in self.room.held_on(worker.name):
            self.apply(record, FailAsked(f'the group "{worker.name}" is gone: {why}'))
        self._retry_held()

    # ---------------------------------------------------------------------------------------------------- hops' ends

    def _hop_ended(self, worker: Worker, record: ChainRecord, index: int, message: HopEnded) -> None:
        agent, state = record.agents[index], message.state
        if record.state.phases[index] not in LIVE:
            return  # it answers an AbortHop that crossed the hop's own end
        worker.hops.discard(message.hop)
        move = self.mover.over(message.hop)
        if state == "lost":
            self.room.shun(worker.name)
            self._lose(message.hop, message.message or "its engine is gone", blamed=worker.state == "ready")
            return
        if state == "released":
            if record.state.stage is Stage.RUNNING and record.state.phases[index] is not Phase.YIELDING:
                self._lose(message.hop, message.message or "its worker has left it", blamed=False, move=move)
                return
            state = "aborted"  # it has been told so since, and nobody goes on from here
        self.room.give_back(worker.name, message.hop)
        assert agent.stream is not None  # noqa: S101 - set when the chain was started
        self._take_output(record, index, TokenLogReader(self._slab, agent.stream).peek()[0], "")
        agent.session = message.session
        agent.add_counts(message.drafts, message.seam)
        yielded = record.state.phases[index] is Phase.YIELDING
        why = _gave_way(record, index) if yielded else message.message
        agent.entries[-1].end(state, message.at_ns, len(agent.output_ids), why)
        if state == "finished":
            agent.last_token_ns, agent.waits_for = message.at_ns, ""
            agent.finish_reason, agent.stop_token = message.finish_reason, message.stop_token
            self._remember_prefix(worker, record, index)
            self.guessing.finished(record, index)
            self.tell.agent_finished(record, index)
            agent.kept = self._listener.agent_finished(record, index)
        else:
            self._hops.pop(message.hop, None)
        error = _blame(record, index, message.message) if message.message else ""
        self.apply(record, Ended(index, state, error))
        if state == "finished" and record.chain.agents[index].prompt_ids is not None:
            self._hops.pop(message.hop, None)  # gone already where the chain has ended with this hop
            self.apply(record, Checked(index))  # a prompt given as ids has no text to check

    def _lose(self, hop: str, why: str, *, blamed: bool, move: Move | None = None) -> None:
        """A hop is gone with its engine, or has left it.

        Args:
            hop: that still may report.
            why: for people.
            blamed: the engine died under it; not so where its worker was asked to stop.
            move: its worker has left it to another, as it was asked to.
        """
        record, index, group = self._hops.pop(hop)
        self.mover.over(hop)
        alone = self.room.is_alone(group, hop) and self.room.is_suspect(record, index)
        self.room.give_back(group, hop)
        agent, phase = record.agents[index], record.state.phases[index]
        if phase is Phase.WRITTEN:
            self.apply(record, Checked(index))  # written whole; only the check of its prompt is lost
        if phase not in LIVE:
            return
        assert agent.stream is not None  # noqa: S101 - set when the chain was started
        count, log = TokenLogReader(self._slab, agent.stream).peek()
        self._take_output(record, index, count, "")
        if move is not None:
            why = f"moved to {move.to}: of {group}, {self.mover.lateness(group)}"
            self.tell.hop_moved(self.mover.moved(record, index, hop, group, move))
        else:
            _log.warning(
                "hop_lost",
                chain=record.id,
                agent=record.chain.agents[index].name,
                hop=hop,
                worker=group,
                phase=phase.value,
                tokens=count,
                reason=why,
            )
        agent.entries[-1].end("lost" if move is None else "moved", time.monotonic_ns(), len(agent.output_ids), why)
        agent.losses += blamed
        if log is LogState.ABORTED and phase is not Phase.YIELDING:
            self.apply(record, Ended(index, "failed", _blame(record, index, why)))
        elif alone and blamed and log is not LogState.CLOSED:
            # Its own prompt seems to be what engines die of: it must not take one after the other along.
            error = f"engines died under it {agent.losses} times, at last when it ran alone: {why}"
            self.apply(record, Ended(index, "failed", _blame(record, index, error)))
        else:
            kept = count > 0 or move is None  # one that has only read, and reads elsewhere, has nothing to go on from
            if record.state.stage is Stage.RUNNING and phase is not Phase.YIELDING and kept:
                now = record.since_submission_ms(time.monotonic_ns())
                agent.resumed.append(ResumeEntry(at_ms=now, tokens=count, worker=group, why=why))
            # A log that was closed is whole, even where it is empty; what is left is to say so.
            self.apply(record, Lost(index, written=count > 0 or log is LogState.CLOSED))

    def _take_output(self, record: ChainRecord, index: int, upto: int, text: str) -> None:
        """Take the ids up to `upto` from the agent's log, with the text that goes with them."""
        agent = record.agents[index]
        assert agent.stream is not None  # noqa: S101 - set when the chain was started
        start, characters = len(agent.output_ids), agent.text_chars
        if upto > start:
            agent.output_ids += TokenLogReader(self._slab, agent.stream).read(start).ids[: upto - start]
        if text:
            agent.text.append(text)
        self.tell.tokens(record, index, start, text, characters)

    def _remember_prefix(self, worker: Worker, record: ChainRecord, index: int) -> None:
        agent = record.agents[index]
        if record.shape.prefixes[index][1] and not record.options.isolate:
            total = agent.prompt_tokens + len(agent.output_ids)
            keep = self.prefixes.of(record, index)
            worker.memory.computed(record.shape.rungs[index], total, keep, time.monotonic())

    # ------------------------------------------------------------------------------------------------------ commands

    def _carry_out(self, record: ChainRecord, command: Command) -> list[Event]:
        match command:
            case Dispatch(agent=index):
                return self._dispatch(record, index)
            case RunStep(agent=index):
                self.steps.begin(record, index)
            case Abort(agent=index):
                self._abort(record, index)
            case Renew(agent=index):
                self._renew(record, index)
            case Finish(stage=stage, error=error):
                self._finish(record, stage, error)
        return []

    def _dispatch(self, record: ChainRecord, index: int) -> list[Event]:
        """Start an agent's hop where there is a group and room, in turn; else it is held."""
        if (gone := self.room.gone(record, index)) is not None:
            return [Held(index), FailAsked(gone)]
        agent, room = record.agents[index], self.room
        in_turn = self._turn == (record, index) or not room.waited_for or bool(agent.output_ids)
        rerouted = self._reroute(record, index)
        if any(isinstance(event, Held) for event in rerouted):
            return rerouted
        hop = f"{record.id}/{index}/{agent.hops}"
        worker = room.take(record, index, hop) if in_turn else None
        if worker is None:
            room.hold(record, index)
            return [*rerouted, Held(index)]
        moved = [*rerouted, *self._move(record, index, worker)]
        agent.hop = hop
        started_ns = time.monotonic_ns()  # its worker may be at it before the message is on its way
        try:
            spec = hop_spec(
                record, index, lambda at: self._stream(record, at), self.config, self._sources(record, index)
            )
            spec = msgspec.structs.replace(spec, keep=self.prefixes.of(record, index))
            drafts = self.guessing.drafts(record, index, worker.limits)
            if drafts is not None:
                spec = msgspec.structs.replace(spec, speculate=True, drafts=drafts)
            self._fleet.send(worker, StartHop(spec=spec))
        except EngineError as error:  # it is gone, and will be reported lost
            _log.warning(
                "hop_not_sent",
                chain=record.id,
                agent=record.chain.agents[index].name,
                hop=hop,
                worker=worker.name,
                error=str(error),
            )
            room.give_back(worker.name, hop)
            room.shun(worker.name)
            room.hold(record, index)
            return [*moved, Held(index)]
        room.release(record, index)
        agent.hops += 1
        agent.entries.append(HopRecord(worker.name, started_ns, len(agent.output_ids)))
        record.devices[worker.name] = [gpu.uuid for gpu in worker.gpus] or worker.group.devices
        self._hops[hop] = record, index, worker.name
        worker.hops.add(hop)
        self.tell.resumed(record, index)
        return moved

    def _reroute(self, record: ChainRecord, index: int) -> list[Event]:
        """Let an agent, and those that have not started, run elsewhere than on a group whose tokens come late."""
        phases = record.state.phases
        if phases[index] is not Phase.DISPATCHED or (new := self.mover.replan(record, index)) is None:
            return []
        assert record.plan is not None  # noqa: S101 - made at its start
        group, name = record.agents[index].worker, record.chain.agents[index].name
        for agent, worker in zip(record.agents, new.groups, strict=True):
            agent.worker = worker or agent.worker  # steps have no group
        late = self.mover.lateness(group)
        why = f'{record.plan.why}; "{name}" on {new.groups[index]}, not {group}: {late}'
        record.plan, record.rerouted = msgspec.structs.replace(record.plan, why=why), True
        self.tell.agent_rerouted(record, index, group, new.placement, late)
        events: list[Event] = [] if new.placement == record.state.placement else [Moved(new.placement)]
        if new.placement == "serial" and any(phase not in (Phase.WRITTEN, Phase.DONE) for phase in phases[:index]):
            events += [Held(index), Retry(index)]  # its turn comes when those before it have written
        return events

    def _move_hops(self, only: str | None = None) -> None:
        """Have workers leave the hops that are better off elsewhere."""
        for move in self.mover.moves(self._hops, only):
            record, index, group = self._hops[move.hop]
            try:
                self._fleet.send(self._fleet.workers[group], ReleaseHop(hop=move.hop))
            except EngineError as error:  # its end is reported by worker_lost
                self.mover.over(move.hop)
                name = record.chain.agents[index].name
                _log.warning(
                    "release_not_sent", chain=record.id, agent=name, hop=move.hop, worker=group, error=str(error)
                )

    def _move(self, record: ChainRecord, index: int, worker: Worker) -> list[Event]:
        """Let an agent, and those that were to follow it there in its one-group chain, run on another group."""
        agent = record.agents[index]
        before, agent.worker = agent.worker, worker.name
        if before == worker.name:
            return []
        placement, shape = record.state.placement, record.shape
        for at, phase in enumerate(record.state.phases):
            follows = placement != "ping-pong" and phase is Phase.WAITING and record.agents[at].worker == before
            if follows and shape.model(at) == worker.model:
                record.agents[at].worker = worker.name
        if placement == "ping-pong" and not self._alternates(record, index):
            return [Moved("serial")]  # a reader beside its upstream in one engine would slow its decoding
        if placement == "overlap" and not worker.view().overlap:
            return [Moved("serial")]  # and here nothing would hold the reader back
        return []

    def _alternates(self, record: ChainRecord, index: int) -> bool:
        """Whether an agent that has come to another group still runs beside no neighbour, or has one to go to."""
        shape, own = record.shape, record.agents[index].worker
        if sum(view.model == shape.model(index) for view in self.room.groups()) > 1:
            return True
        near = [at for at, reads in enumerate(shape.sources()) if at in shape.sources()[index] or index in reads]
        return len(shape.wanted) > 1 and all(record.agents[at].worker != own for at in near)

    def _retry_held(self) -> None:
        """Dispatch those that wait, as far as there are groups and room."""
        if self._turn is not None:
            return
        try:
            passed = True
            while passed:  # what a pass ends may let others begin, and those be held in turn
                passed = False
                for record, index in self.room.turns():
                    passed = True
                    self._turn = record, index
                    self.apply(record, Retry(index))
        finally:
            self._turn = None
        self._make_way()

    def _make_way(self) -> None:
        """Have agents that wait for a call give way to those that wait for their groups: one at a time, the last in the
        queue first. A call may take minutes, an `extract` step has ended before anyone would gain."""
        for group in self.room.wanted() if self.room.waited_for else ():
            hops = [(record, index) for record, index, at in self._hops.values() if at == group]
            if any(record.state.phases[index] is Phase.YIELDING for record, index in hops):
                continue  # room is about to come
            idle = [(record, index) for record, index in hops if self._awaited_calls(record, index)]
            if idle:
                record, index = max(idle, key=lambda hop: (_turn_of(hop[0]), hop[1]))
                names = ", ".join(f'"{record.chain.agents[at].name}"' for at in self._awaited_calls(record, index))
                record.agents[index].waits_for = f'the step {names}: it gave way to others on the group "{group}"'
                self.apply(record, GiveWay(index))

    def _awaited_calls(self, record: ChainRecord, index: int) -> list[int]:
        """The calls under way that a hop waits for which has written nothing."""
        begun = record.state.phases[index] in (Phase.DISPATCHED, Phase.READING)
        if record.state.stage is not Stage.RUNNING or not begun:
            return []
        return [at for at in awaited_steps(record.state, index) if record.chain.agents[at].call is not None]

    def _abort(self, record: ChainRecord, index: int) -> None:
        if record.is_step(index):
            self.steps.abort(record, index)
            return
        agent = record.agents[index]
        found = self._hops.get(agent.hop)
        if found is None:
            return  # it was never sent
        try:
            self._fleet.send(self._fleet.workers[found[2]], AbortHop(hop=agent.hop))
        except EngineError as error:  # its end is reported by worker_lost
            _log.warning(
                "abort_not_sent",
                chain=record.id,
                agent=record.chain.agents[index].name,
                hop=agent.hop,
                error=str(error),
            )

    def _renew(self, record: ChainRecord, index: int) -> None:
        agent = record.agents[index]
        assert agent.stream is not None  # noqa: S101 - set when the chain was started
        self._slab.free(agent.stream)
        agent.stream = self._slab.allocate()
        if agent.output_ids:
            agent.begin_anew()
            self._listener.agent_restarted(record, index)
            self.tell.event(record, "agent_restarted", index, why="it gave way to another agent")

    def _finish(self, record: ChainRecord, stage: Stage, error: str) -> None:
        for index, agent in enumerate(record.agents):
            self._hops.pop(agent.hop, None)
            self.room.release(record, index)
            if agent.stream is not None:
                self._slab.free(agent.stream)
                agent.stream = None
        self.planner.ended(record, stage)
        self._listener.chain_ended(record, stage, error)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _stream(self, record: ChainRecord, index: int) -> StreamRef:
        """The log of an agent, with the endpoint that rings for it."""
        agent = record.agents[index]
        assert agent.stream is not None  # noqa: S101 - allocated when the chain started
        over = record.state.phases[index] in (Phase.WRITTEN, Phase.DONE)
        writer = self.steps.bell if record.is_step(index) else self._fleet.workers[agent.worker].bell
        bell = "" if over else writer
        return StreamRef(slot=agent.stream.slot, generation=agent.stream.generation, bell=bell)

    def _sources(self, record: ChainRecord, index: int) -> dict[int, OutputSource]:
        """How the logs that an agent reads become text, where its prompt is joined as text."""
        if not record.prepared[index].text:
            return {}
        models = agent_models(record.chain)
        return output_sources(
            record.chain,
            index,
            record.state.upstreams[index],
            self.room.tokenizers(models),
            lambda at: self._fleet.tokenizer_source(models[at] or ""),
            record.prepared,
        )

    @property
    def _fleet(self) -> Fleet:
        assert self.room.fleet is not None  # noqa: S101 - no chain runs before
        return self.room.fleet


def _turn_of(record: ChainRecord) -> Turn:
    """Where a chain stands in the queue; the lowest is first."""
    return turn_of(record.options.priority, record.deadline_ns, record.submitted_ns, record.number)


def _gave_way(record: ChainRecord, index: int) -> str:
    """Why a hop has given its memory back."""
    if index in record.state.gave_way:
        return "it gave way to others: a step that it reads was still running"
    return "it gave way: an agent that it reads from waits"


def _blame(record: ChainRecord, index: int, why: str) -> str:
    """A failure's sentence, with the agent it happened to."""
    return f'agent "{record.chain.agents[index].name}": {why}'
