"""The chains: accepts them, applies what happens to their state, and carries out the commands that follow."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, Literal

import structlog

from pingpong_bus.chain import Part, RenderedMessage, raw_parts, rendered_messages, resolve_inputs, upstreams
from pingpong_bus.chain import validate_chain as check_chain
from pingpong_bus.errors import ChainNotFound, EngineError, Overloaded, PingpongError, UsageError
from pingpong_bus.messages import (
    AbortHop,
    ChainEvent,
    ChainSummary,
    ChunkSettings,
    HopAppended,
    HopChecked,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopSegment,
    HopSpec,
    HopText,
    JoinedPrompt,
    Literals,
    Sampling,
    StartHop,
    StreamRef,
    StreamSegment,
    Submit,
    WorkerMessage,
)
from pingpong_bus.messages import ChainState as ChainStateName
from pingpong_bus.slab import Slab
from pingpong_bus.token_log import TokenLogReader
from pingpongd.admission import Room, check_fits, check_queue, prompt_bounds
from pingpongd.chain_record import AgentRecord, ChainRecord
from pingpongd.chain_state import (
    ENDED,
    LIVE,
    Abort,
    Admitted,
    CancelAsked,
    Checked,
    Command,
    Dispatch,
    Ended,
    Event,
    Finish,
    FirstToken,
    IllegalTransition,
    Opened,
    Phase,
    Stage,
    Unplaceable,
    new_chain,
    transition,
)
from pingpongd.config import DaemonConfig
from pingpongd.fleet import Fleet, Worker
from pingpongd.placement import chain_shape, place

_log = structlog.get_logger()
EventKind = Literal["started", "opened", "reading", "finalized", "writing", "tokens", "agent_finished", "ended"]


class Chains:
    """Every chain that the daemon knows."""

    def __init__(self, config: DaemonConfig, slab: Slab, publish: Callable[[ChainEvent], None]) -> None:
        """Args:
        config: the daemon's.
        slab: where token logs are.
        publish: called with every event of every chain.
        """
        self._config = config
        self._slab = slab
        self._publish = publish
        self.fleet: Fleet | None = None
        """Set once there is one; nothing is accepted before."""
        self.draining = False
        self.idle = asyncio.Event()
        """Set while no chain is under way."""
        self.idle.set()
        self._records: OrderedDict[str, ChainRecord] = OrderedDict()
        self._queue: deque[ChainRecord] = deque()
        self._ended: deque[str] = deque()
        """Ids of the ended chains that are kept, in the order of their end."""
        self._hops: dict[str, tuple[ChainRecord, int]] = {}
        self._count = 0

    # ------------------------------------------------------------------------------------------------ for clients

    async def submit(self, request: Submit) -> ChainRecord:
        """Check, tokenize and accept a chain; it starts at once or waits for token logs.

        Raises:
            PingpongError: it cannot run, or not now.
        """
        submitted_ns = time.monotonic_ns()
        self._require_serving()
        fleet = self._fleet
        check_chain(request.chain)
        inputs = resolve_inputs(request.chain, request.inputs)
        room = Room(self._slab.slots, self._slab.capacity, self._config.max_queued)
        check_queue(len(self._queue), room)
        prepared = await fleet.prepare(request.chain, inputs)
        self._require_serving()  # tokenizing took a moment: once more
        check_queue(len(self._queue), room)
        limits = [worker.limits for worker in fleet.ready if worker.limits is not None]
        check_fits(request.chain, prepared, limits, room)
        self._check_options(request, limits[0].sessions)
        reads = tuple(tuple(upstreams(request.chain, index)) for index in range(len(request.chain.agents)))
        shape = chain_shape(reads, prepared)
        # Placement is asked once now, so that what cannot be placed is refused, and again when the chain starts.
        place(shape, request.options.mode, fleet.views(), self._count, request.options.group)
        record = ChainRecord(
            id=self._new_id(),
            number=self._count,
            chain=request.chain,
            inputs=inputs,
            options=request.options,
            prepared=prepared,
            shape=shape,
            submitted_ns=submitted_ns,
            state=new_chain(reads, request.chain.start),
            agents=[AgentRecord() for _ in request.chain.agents],
        )
        self._count += 1
        self._records[record.id] = record
        self.idle.clear()
        self._queue.append(record)
        _log.info("chain_accepted", chain=record.id, name=record.chain.name, agents=len(record.agents))
        return record

    def start_waiting(self) -> None:
        """Start the waiting chains for which there are token logs."""
        # First come, first served: none overtakes, so none starves; each gets all its logs at once, so no two chains
        # can wait for each other. Asked anew each time: a chain that cannot start ends, and lets others start.
        while self._queue and len(self._queue[0].agents) <= self._slab.free_slots:
            self._start(self._queue.popleft())

    def find(self, chain: str) -> ChainRecord:
        """The chain of that id.

        Raises:
            ChainNotFound: there is none.
        """
        try:
            return self._records[chain]
        except KeyError:
            raise ChainNotFound(f'there is no chain "{chain}".', hint="See `pingpong-client list`.") from None

    def cancel(self, chain: str, why: str = "cancelled") -> None:
        """End a chain; nothing happens to one that has ended."""
        record = self.find(chain)
        if record in self._queue:
            self._queue.remove(record)
        self._apply(record, CancelAsked(why))

    def summaries(self) -> list[ChainSummary]:
        """A line for every chain, the latest last."""
        now = time.monotonic_ns()
        return [record.summary(now) for record in self._records.values()]

    def counts(self) -> dict[ChainStateName, int]:
        """How many chains there are in each state."""
        return dict(Counter(record.state_name for record in self._records.values()))

    def live(self) -> list[ChainRecord]:
        """The chains that have not ended."""
        return [record for record in self._records.values() if record.state.stage not in ENDED]

    async def reset_caches(self) -> None:
        """Empty every prefix cache.

        Raises:
            UsageError: chains are under way.
        """
        if self.live():
            raise UsageError(f"{len(self.live())} chains are under way.", hint="Wait for them, or cancel them.")
        self._require_serving()
        await self._fleet.reset_prefix_caches()

    # ------------------------------------------------------------------------------------------------ for the fleet

    def hop_message(self, worker: Worker, message: WorkerMessage) -> None:
        """A worker reports on one of its hops."""
        hop = getattr(message, "hop", "")
        found = self._hops.get(hop)
        if found is None:
            _log.debug("hop_unknown", worker=worker.name, hop=hop, message=type(message).__name__)
            return
        record, index = found
        agent = record.agents[index]
        match message:
            case HopOpened(at_ns=at_ns):
                agent.opened_ns = at_ns
                literal, _ = prompt_bounds(record.chain, record.prepared[index])
                self._event(record, "opened", index, at_ns, worker=worker.name, prompt_tokens=literal)
                self._apply(record, Opened(index))
            case HopAppended(append=append):
                agent.appends.append(append)
                self._event(record, "reading", index, append.done_ns or append.at_ns, sent=append.sent)
            case HopFinalized(at_ns=at_ns):
                agent.finalized_ns = at_ns
                agent.prompt_tokens, agent.prompt_digest = message.prompt_tokens, message.prompt_digest
                self._event(record, "finalized", index, at_ns, prompt_tokens=message.prompt_tokens)
            case HopFirstToken(at_ns=at_ns, cached_tokens=cached):
                agent.first_token_ns, agent.cached_tokens = at_ns, cached
                ttft = record.ttft_ms(index)
                self._event(record, "writing", index, at_ns, cached_tokens=cached, ttft_ms=ttft)
                self._apply(record, FirstToken(index))
            case HopText(upto=upto, text=text):
                self._take_output(record, index, upto, text)
            case HopEnded():
                self._hop_ended(worker, record, index, message)
            case HopChecked(prompt_token_match=match):
                agent.prompt_token_match = match
                del self._hops[hop]
                self._apply(record, Checked(index))

    def worker_lost(self, worker: Worker, why: str) -> None:
        """A worker that served is gone; its hops have failed."""
        worker.hops.clear()
        for hop, (record, index) in list(self._hops.items()):
            if record.agents[index].worker != worker.name or self._hops.pop(hop, None) is None:
                continue  # another's; or its chain has ended in this very loop
            if record.state.phases[index] is Phase.WRITTEN:
                self._apply(record, Checked(index))  # written whole; only the check of its prompt is lost
            elif record.state.phases[index] in LIVE:
                self._apply(record, Ended(index, "failed", _blame(record, index, why)))

    def _hop_ended(self, worker: Worker, record: ChainRecord, index: int, message: HopEnded) -> None:
        if record.state.phases[index] not in LIVE:
            return  # it answers an AbortHop that crossed the hop's own end
        agent = record.agents[index]
        worker.hops.discard(message.hop)
        assert agent.stream is not None  # noqa: S101 - set when the hop was started
        count = TokenLogReader(self._slab, agent.stream).peek()[0]
        if count > len(agent.output_ids):
            self._take_output(record, index, count, "")
        agent.session = message.session
        if message.state == "finished":
            agent.last_token_ns = message.at_ns
            agent.finish_reason, agent.stop_token = message.finish_reason, message.stop_token
            self._remember_prefix(worker, record, index)
            self._event(
                record,
                "agent_finished",
                index,
                message.at_ns,
                finish_reason=message.finish_reason,
                output_tokens=len(agent.output_ids),
                total_ms=record.total_ms(index),
            )
            _log.info(
                "agent_finished",
                chain=record.id,
                agent=record.chain.agents[index].name,
                worker=worker.name,
                ttft_ms=record.ttft_ms(index),
                total_ms=record.total_ms(index),
                prompt_tokens=agent.prompt_tokens,
                cached_tokens=agent.cached_tokens,
                output_tokens=len(agent.output_ids),
                appends=len(agent.appends),
            )
        error = _blame(record, index, message.message) if message.message else ""
        self._apply(record, Ended(index, message.state, error))
        if message.state == "finished" and record.chain.agents[index].prompt_ids is not None:
            self._hops.pop(message.hop, None)  # gone already where the chain has ended with this hop
            self._apply(record, Checked(index))  # a prompt given as ids has no text to check

    def _take_output(self, record: ChainRecord, index: int, upto: int, text: str) -> None:
        """Take the ids up to `upto` from the agent's log, with the text that goes with them."""
        agent = record.agents[index]
        assert agent.stream is not None  # noqa: S101 - set when the hop was started
        start = len(agent.output_ids)
        ids = TokenLogReader(self._slab, agent.stream).read(start).ids[: max(0, upto - start)]
        agent.output_ids += ids
        if text:
            agent.text.append(text)
        if ids or text:
            total = len(agent.output_ids)
            self._event(record, "tokens", index, time.monotonic_ns(), ids=ids, text=text, output_tokens=total)

    def _remember_prefix(self, worker: Worker, record: ChainRecord, index: int) -> None:
        digest, length = record.shape.prefixes[index]
        agent = record.agents[index]
        if length and not record.options.isolate:
            worker.memory.computed(digest, length, agent.prompt_tokens + len(agent.output_ids))

    # ---------------------------------------------------------------------------------------------------- commands

    def _start(self, record: ChainRecord) -> None:
        try:
            record.plan = place(
                record.shape, record.options.mode, self._fleet.views(), record.number, record.options.group
            )
        except PingpongError as error:  # the groups have changed since it was accepted
            self._apply(record, Unplaceable(str(error)))
            return
        for agent, group in zip(record.agents, record.plan.groups, strict=True):
            agent.stream = self._slab.allocate()
            agent.worker = group
        _log.info("chain_started", chain=record.id, placement=record.plan.placement, why=record.plan.why)
        self._event(record, "started", None, time.monotonic_ns(), placement=record.plan.placement, why=record.plan.why)
        self._apply(record, Admitted(record.plan.placement))

    def _apply(self, record: ChainRecord, event: Event) -> None:
        """Apply an event and carry out what follows from it; a command that fails becomes the next event."""
        events: deque[Event] = deque([event])
        while events:
            try:
                record.state, commands = transition(record.state, events.popleft())
            except IllegalTransition as error:  # a fault of ours costs this chain, and no other
                _log.error("illegal_transition", chain=record.id, error=str(error))
                record.state, commands = transition(record.state, CancelAsked(f"a fault in the daemon: {error.event}"))
            for command in commands:
                if (failure := self._carry_out(record, command)) is not None:
                    events.append(failure)

    def _carry_out(self, record: ChainRecord, command: Command) -> Event | None:
        match command:
            case Dispatch(agent=index):
                return self._dispatch(record, index)
            case Abort(agent=index):
                self._abort(record, index)
            case Finish(stage=stage, error=error):
                self._finish(record, stage, error)
        return None

    def _dispatch(self, record: ChainRecord, index: int) -> Event | None:
        fleet = self._fleet
        agent = record.agents[index]
        worker = fleet.workers[agent.worker]
        agent.hop = f"{record.id}/{index}/0"
        try:
            fleet.send(worker, StartHop(spec=self._hop_spec(record, index)))
        except EngineError as error:
            return Ended(index, "failed", _blame(record, index, str(error)))
        self._hops[agent.hop] = (record, index)
        worker.hops.add(agent.hop)
        return None

    def _abort(self, record: ChainRecord, index: int) -> None:
        fleet = self._fleet
        agent = record.agents[index]
        try:
            fleet.send(fleet.workers[agent.worker], AbortHop(hop=agent.hop))
        except EngineError as error:  # its end is reported by worker_lost
            _log.warning("abort_not_sent", chain=record.id, hop=agent.hop, error=str(error))

    def _finish(self, record: ChainRecord, stage: Stage, error: str) -> None:
        for agent in record.agents:
            self._hops.pop(agent.hop, None)
            if agent.stream is not None:
                self._slab.free(agent.stream)
                agent.stream = None
        _log.info("chain_ended", chain=record.id, state=stage.value, e2e_ms=record.e2e_ms, error=error)
        self._event(record, "ended", None, time.monotonic_ns(), state=record.state_name, error=error)
        self._ended.append(record.id)
        if len(self._ended) > self._config.keep_finished:
            del self._records[self._ended.popleft()]
        if len(self._ended) == len(self._records):
            self.idle.set()
        self.start_waiting()

    def _hop_spec(self, record: ChainRecord, index: int) -> HopSpec:
        agent, prompt = record.chain.agents[index], record.prepared[index]
        segments: list[HopSegment] = []
        for segment in prompt.segments:
            if isinstance(segment, Literals):
                segments.append(segment)
            else:
                expected = record.chain.agents[segment.agent].max_tokens
                segments.append(StreamSegment(stream=self._stream(record, segment.agent), expected=expected))
        output = record.agents[index].stream
        assert output is not None  # noqa: S101 - allocated when the chain started
        text = self._joined_prompt(record, index)
        append_tokens = record.options.append_tokens
        return HopSpec(
            hop=record.agents[index].hop,
            output=output,
            segments=segments,
            sampling=Sampling(
                max_tokens=agent.max_tokens,
                temperature=agent.temperature,
                top_p=agent.top_p,
                seed=agent.seed,
                stop=agent.stop,
                stop_token_ids=agent.stop_token_ids,
                ignore_eos=agent.ignore_eos,
            ),
            joined=text if prompt.joined else None,
            cache_salt=record.agents[index].hop if record.options.isolate else None,
            session=record.options.session,
            chunks=self._config.chunks if append_tokens is None else ChunkSettings(append_tokens=append_tokens),
            match=text,
        )

    def _joined_prompt(self, record: ChainRecord, index: int) -> JoinedPrompt | None:
        """The agent's prompt as text; None for one given as ids."""
        agent = record.chain.agents[index]
        if agent.prompt_ids is not None:
            return None
        if agent.raw_prompt is not None:
            raw: list[Part] = raw_parts(record.chain, index, record.inputs)
            messages = [RenderedMessage("", raw)]  # type: ignore[arg-type]
        else:
            messages = rendered_messages(record.chain, index, record.inputs)
        outputs = {at: self._stream(record, at) for at in record.state.upstreams[index]}
        return JoinedPrompt(agent=agent, messages=messages, outputs=outputs)

    def _stream(self, record: ChainRecord, index: int) -> StreamRef:
        """The log of an agent, with the endpoint that rings for it."""
        agent = record.agents[index]
        assert agent.stream is not None  # noqa: S101 - allocated when the chain started
        bell = self._fleet.workers[agent.worker].bell
        return StreamRef(slot=agent.stream.slot, generation=agent.stream.generation, bell=bell)

    # ------------------------------------------------------------------------------------------------------ helpers

    @property
    def _fleet(self) -> Fleet:
        assert self.fleet is not None  # noqa: S101 - no chain is accepted before
        return self.fleet

    def _require_serving(self) -> None:
        """Raise Overloaded where no new work is taken: engines are still loading, or the daemon is draining."""
        if self.draining:
            raise Overloaded("the daemon is shutting down.", hint="Submit again once it is back.")
        if self.fleet is None or not self.fleet.ready:
            raise Overloaded("no engine serves yet.", hint="Watch `pingpong-client status` until one does.")

    def _new_id(self) -> str:
        while (number := secrets.token_hex(4)) in self._records:
            pass
        return number

    def _check_options(self, request: Submit, offered: tuple[str, ...]) -> None:
        wanted = request.options.session
        if request.options.group is not None and request.options.mode == "ping-pong":
            raise UsageError(
                "a chain on one named group cannot alternate.", field="mode", hint="Leave out the mode or the group."
            )
        if wanted is not None and wanted not in offered:
            raise UsageError(
                f'the engine offers no session of kind "{wanted}".',
                field="session",
                hint=f"It offers: {', '.join(offered)}.",
            )

    def _event(self, record: ChainRecord, kind: EventKind, index: int | None, at_ns: int, **data: Any) -> None:
        self._publish(
            ChainEvent(
                chain=record.id,
                kind=kind,
                at_ms=record.since_submission_ms(at_ns),
                agent=record.chain.agents[index].name if index is not None else "",
                data=data,
            )
        )


def _blame(record: ChainRecord, index: int, why: str) -> str:
    """A failure's sentence, with the agent it happened to."""
    return f'agent "{record.chain.agents[index].name}": {why}'
