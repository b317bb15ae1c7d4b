"""The chains that the daemon knows: accepted, kept, queued, found and forgotten. `chain_runs.py` runs them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future

import msgspec
import structlog

from pingpong_bus.chain import Chain
from pingpong_bus.errors import ChainError, ChainNotFound, Overloaded, PingpongError, StoreError, UsageError
from pingpong_bus.messages import ChainEvent, ChainResult, ChainSummary, Explain, Explained, Submit
from pingpong_bus.messages import ChainState as ChainStateName
from pingpong_bus.slab import Slab
from pingpongd.admission import check_fits
from pingpongd.calls import check_calls
from pingpongd.chain_queue import ChainQueue
from pingpongd.chain_record import ChainRecord
from pingpongd.chain_runs import ChainRuns
from pingpongd.chain_state import CancelAsked, FailAsked, Stage
from pingpongd.chain_steps import StepTools
from pingpongd.config import DaemonConfig
from pingpongd.exactness import unkept
from pingpongd.explaining import Explainer
from pingpongd.fleet import Fleet
from pingpongd.intake import PATIENCE_S, Intake, check_group, reads_of
from pingpongd.model_names import agent_models, check_models
from pingpongd.monitoring import ChainObserver
from pingpongd.recalibration import Recalibration
from pingpongd.store import KeyTaken, Store
from pingpongd.stored import Job, LiveChain

_log = structlog.get_logger()
_SEED_BITS = 48
_TURN_S = 0.05
"""Chains that wait are started for so long at a time; then whatever else has come has its turn."""


class Chains:
    """Every chain that the daemon knows; those that have ended are in the store alone."""

    def __init__(
        self,
        config: DaemonConfig,
        slab: Slab,
        store: Store,
        publish: Callable[[ChainEvent], None],
        observer: ChainObserver | None = None,
        tools: StepTools | None = None,
    ) -> None:
        """Args:
        config: the daemon's.
        slab: where token logs are.
        store: where chains are kept.
        publish: called with every event of every chain.
        observer: hears of beginnings and ends.
        tools: that run steps; see `ChainRuns`.
        """
        self.config = config
        self._observer = observer
        self.runs = ChainRuns(config, slab, publish, self, tools)
        self.idle = asyncio.Event()
        """Set while no chain runs; others may be waiting."""
        self.idle.set()
        self._slab = slab
        self._store = store
        self._records: OrderedDict[str, ChainRecord] = OrderedDict()
        self._queue = ChainQueue()
        self._running: set[str] = set()
        self._keys: dict[str, asyncio.Lock] = {}
        """Of submissions under way, by their key."""
        self._ends: set[asyncio.Task[None]] = set()
        self._taking_up: asyncio.Task[None] | None = None
        """Reads in the store what tokens are guessed from."""
        self._ended: Counter[ChainStateName] = Counter()
        self._count = store.next_number
        self._starting = False
        self._intake = Intake(config, self.runs.room, slab, lambda: len(self._queue))
        self._explainer = Explainer(self._intake, self.runs.planner)
        self._recalibration = Recalibration(self.runs.planner)

    # ---------------------------------------------------------------------------------------------------- the fleet

    def restore(self) -> None:
        """Take up what an earlier life of the daemon has left; it runs once there are engines."""
        now_ns, wall = time.monotonic_ns(), time.time()  # of one moment: chains keep their order
        for live in self._store.live():
            self._restore(live, now_ns, wall)

    def serve(self, fleet: Fleet) -> None:
        """The engines serve, each for the first time: chains can run, and be accepted."""
        self.runs.room.fleet = fleet
        fleet.health_listeners.append(lambda _: self.runs.look_at_health())
        for record in self._records.values():
            record.waits_for = self._why_not(record)
            if record.waits_for:
                # Kept, not failed: it can run once the daemon is configured as it was, and its owner can cancel it.
                _log.warning("chain_waits", chain=record.id, reason=record.waits_for)
            else:
                self._enqueue(record)
        if self.config.speculation.enabled:
            self._taking_up = asyncio.create_task(self.runs.guessing.take_up(self._store), name="past runs")
        self.start_waiting()

    def drain(self) -> None:
        """Start no chain any more, and accept none."""
        if self._taking_up is not None:
            self._taking_up.cancel()
        self._intake.closed = True
        self._intake.look_again()

    def configure(self, config: DaemonConfig) -> None:
        """Take a configuration that was read again."""
        self.config = self._intake.config = config
        self.runs.configure(config)
        self._store.configure(config.store)

    def _restore(self, live: LiveChain, now_ns: int, wall: float) -> None:
        job = live.job
        age_s = max(0.0, wall - job.submitted_at)  # a clock may be set back
        record = ChainRecord.restored(live, reads_of(job.chain), now_ns - int(age_s * 1e9))
        self._records[record.id] = record
        for index, agent in enumerate(record.agents):
            if agent.finish_reason is not None:
                self.runs.guessing.finished(record, index)
        record.waits_for = "the engines are loading"
        _log.info("chain_restored", chain=record.id, agents=len(record.agents), finished=len(live.outcomes))

    def _why_not(self, record: ChainRecord) -> str:
        """Why a chain that was accepted cannot run as the daemon is configured now; empty where it can."""
        try:
            check_calls(record.chain, self.config.calls)
        except ChainError as error:
            return str(error)
        models, options = agent_models(record.chain), record.options
        try:
            check_models(record.chain, self.config, self.runs.room.models())
            check_group(record.chain, models, options, self.runs.room)
        except (ChainError, UsageError) as error:
            return str(error)
        try:
            limits = self._intake.limits_of(models)
        except Overloaded as error:
            return str(error)
        for index, found in enumerate(limits):
            if found and record.job.engine_model(index) != found[0].model:
                accepted = record.job.engine_model(index)
                return f"it was accepted for the model {accepted}, and the daemon serves {found[0].model}"
        try:
            check_fits(record.chain, record.prepared, limits, self._intake.room)
        except PingpongError as error:
            return f"it does not fit any more: {error}"
        if options.mode == "overlap" and not any(view.overlap for view in self.runs.room.standing()):
            return "it asks for overlap, and no engine holds appends to a budget any more"
        engines = self.runs.room.engines(options.group, {name for name in models if name is not None})
        return unkept(record.job.exact, mode=options.mode, session=options.session, engines=engines)

    # ---------------------------------------------------------------------------------------------------- for clients

    async def submit(self, request: Submit) -> str:
        """Check, tokenize and keep a chain; once this returns its id it is accepted for good.

        The same key names the same chain, however often it is submitted.

        Raises:
            PingpongError: it cannot run, or not now, or cannot be kept.
        """
        patience = asyncio.get_running_loop().time() + PATIENCE_S
        if not request.key:
            return await self._accept(request, patience)
        lock = self._keys.setdefault(request.key, asyncio.Lock())
        try:
            async with lock:
                known = self._store.find_key(request.key)
                if known is None:
                    return await self._accept(request, patience)
        except KeyTaken as taken:  # by one that came between two that waited
            known = taken.chain_id
        finally:
            if not lock.locked():
                self._keys.pop(request.key, None)
        await self._store.added(known)
        return known

    async def _accept(self, request: Submit, patience: float) -> str:
        submitted_ns, submitted_at = time.monotonic_ns(), time.time()
        checked = await self._intake.check(request, patience)
        number = self._count
        self._count += 1
        job = Job(
            chain=_with_seeds(checked.chain),
            inputs=checked.inputs,
            options=request.options,
            prepared=checked.prepared,
            model=checked.model,
            engine_models=checked.engine_models if len(set(checked.engine_models) - {""}) > 1 else [],
            number=number,
            submitted_at=submitted_at,
            key=request.key,
            exact=checked.exact,
        )
        chain_id = self._new_id()
        await self._store.add(chain_id, job)
        record = self._records[chain_id] = ChainRecord.accepted(chain_id, job, checked.reads, submitted_ns)
        _log.info(
            "chain_accepted",
            chain=chain_id,
            name=request.chain.name,
            agents=len(record.agents),
            exactness=checked.exact.level,
            grid=checked.exact.grid,
        )
        if self._observer is not None:
            self._observer.chain_accepted()
        self._enqueue(record)
        return chain_id

    async def explain(self, request: Explain) -> Explained:
        """What each placement of a chain should take now, and what would make it faster; it is neither kept nor run.

        Raises:
            PingpongError: it could not be accepted.
        """
        return await self._explainer.explain(request, self._count - 1)  # see `ChainRecord.number`

    def is_live(self, chain: str) -> bool:
        """Whether it has not ended."""
        return chain in self._records

    async def snapshot(self, chain: str) -> ChainResult:
        """Where a chain stands. Of a live one it is given without a turn of the event loop.

        Raises:
            ChainNotFound: there is none of that id.
        """
        return await self._result(chain, fetched=False)

    async def result(self, chain: str, *, prompt_ids: bool = False) -> ChainResult:
        """What a chain has given; of one that has ended, it counts as fetched from now on.

        Raises:
            ChainNotFound: there is none of that id.
        """
        if (record := self._records.get(chain)) is not None:
            return record.result(prompt_ids=prompt_ids)
        result = await self._result(chain, fetched=True)
        return result if prompt_ids else _without_prompts(result)

    async def _result(self, chain: str, *, fetched: bool) -> ChainResult:
        if (record := self._records.get(chain)) is not None:
            return record.result()
        result = await self._store.result(chain, fetched=fetched)
        if result is None:
            raise _not_found(chain)
        return result if fetched else _without_prompts(result)

    async def summaries(self, limit: int) -> list[ChainSummary]:
        """A line for every live chain, and for the latest of those that have ended, `limit` in all; the newest last."""
        now, wall = time.monotonic_ns(), time.time()
        ended = [
            ChainSummary(
                id=entry.id,
                name=entry.name,
                state=entry.state,
                placement=entry.placement,
                agents=entry.agents,
                finished_agents=entry.finished_agents,
                age_s=round(max(0.0, wall - entry.submitted_at), 1),
                e2e_ms=entry.e2e_ms,
                exactness=entry.exactness,
            )
            for entry in await self._store.list(limit)
        ]
        live = [record.summary(now) for record in self._records.values()][-limit:]
        ended = ended[max(0, len(ended) + len(live) - limit) :]  # a long one that runs is not lost among them
        return sorted([*ended, *live], key=lambda summary: -summary.age_s)

    def cancel(self, chain: str, why: str = "cancelled") -> None:
        """End a chain; nothing happens to one that has ended.

        Raises:
            ChainNotFound: there is none of that id.
        """
        record = self._records.get(chain)
        if record is None:
            if self._store.knows(chain):
                return
            raise _not_found(chain)
        self._queue.remove(chain)
        self.runs.apply(record, CancelAsked(why))

    async def forget(self, chain: str) -> None:
        """Erase an ended chain with its prompts and outputs.

        Raises:
            UsageError: it has not ended.
            ChainNotFound: there is none of that id.
        """
        if chain in self._records:
            raise UsageError(
                f"the chain {chain} has not ended.", hint=f"Cancel it first: `pingpong-client cancel {chain}`."
            )
        if not await self._store.forget(chain):
            raise _not_found(chain)
        self.runs.guessing.erase([chain])
        _log.info("chain_forgotten", chain=chain)

    def counts(self) -> dict[ChainStateName, int]:
        """How many chains wait and run now, and how many have ended since the daemon's start."""
        return dict(self._ended + Counter(record.state_name for record in self._records.values()))

    def live(self) -> list[ChainRecord]:
        """The chains that have not ended."""
        return list(self._records.values())

    async def reset_caches(self) -> None:
        """Empty every prefix cache.

        Raises:
            UsageError: chains are under way.
        """
        if self._running or len(self._queue):
            count = len(self._running) + len(self._queue)
            raise UsageError(f"{count} chains are under way.", hint="Wait for them, or cancel them.")
        await self._intake.require_service().reset_prefix_caches()

    async def score(
        self, ids: Sequence[int], tokens: Sequence[int], grid: int | None, model: str = ""
    ) -> list[float | None]:
        """How likely tokens are to follow others; see `Scoring`.

        Raises:
            PingpongError: they make no sense to the engines, or none can say now.
        """
        self._intake.require_service()
        return await self.runs.scoring.score(ids, tokens, grid, self._model_named(model))

    def _model_named(self, name: str) -> str:
        """A model's name as groups have it: it may also be called as its engines report it, which results do."""
        room = self.runs.room
        if name == self.config.model:
            return ""
        reported = [model for model in room.models() if any(limits.model == name for limits in room.limits(model))]
        return name if name in room.models() or not reported else reported[0]

    # ------------------------------------------------------------------------------------------------------ the queue

    def start_waiting(self) -> None:
        """Start the waiting chains for which there are token logs."""
        self._intake.look_again()
        # Each gets all its logs at once, so no two chains can wait for each other. Asked anew each time, and not from
        # within itself: a chain that cannot start ends, and lets others start.
        if self._starting or self._intake.closed or self.runs.room.fleet is None:
            return
        self._starting = True
        try:
            began = time.monotonic()
            while self.runs.room.groups():
                chain = self._queue.next(time.monotonic_ns(), self._slab.free_slots)
                if chain is None:
                    return
                self._running.add(chain)
                self.idle.clear()
                self.runs.start(self._records[chain])
                if time.monotonic() - began > _TURN_S:  # planning takes some milliseconds on busy groups
                    asyncio.get_running_loop().call_soon(self.start_waiting)
                    return
        finally:
            self._starting = False

    def tick(self) -> None:
        """Once a second: end the chains that are past their deadline, and start those that can."""
        now = time.monotonic_ns()
        self._queue.expired(now)
        self._reconsider()
        for record in list(self._records.values()):
            if record.deadline_ns is not None and record.deadline_ns <= now:
                self._queue.remove(record.id)
                why = f"its deadline of {record.options.deadline_s:g} s has passed"
                self.runs.apply(record, FailAsked(why))
        self.runs.look_at_health()
        self.start_waiting()
        if self.runs.room.fleet is not None and not self._intake.closed:
            self._recalibration.tick(self.runs.room.fleet)

    def _reconsider(self) -> None:
        """Let chains run that could not with the engines that there were before."""
        if self.runs.room.fleet is None:
            return
        for record in self._records.values():
            if record.waits_for and not self._why_not(record):
                record.waits_for = ""
                self._enqueue(record)

    async def expire(self) -> None:
        """Drop ended chains that are past their time in the store."""
        try:
            erased = await self._store.expire(time.time())
        except StoreError as error:
            _log.warning("expiry_failed", error=str(error))
            return
        if erased:
            self.runs.guessing.erase(erased)
            _log.info("chains_expired", count=len(erased))

    async def end_steps(self) -> None:
        """End the steps that run; their chains begin them anew at the next start."""
        await self.runs.steps.close()

    async def settled(self) -> None:
        """Wait until what has ended is in the store, and its followers are told."""
        while self._ends:
            await asyncio.wait(self._ends)

    # ------------------------------------------------------------------------------------------------- for chain_runs

    def chain_started(self, record: ChainRecord) -> None:
        """See `RunsListener`."""
        self._store.started(record.id)

    def agent_restarted(self, record: ChainRecord, index: int) -> None:
        """See `RunsListener`."""
        self._store.attempt(record.id, record.agents[index].attempt)

    def agent_finished(self, record: ChainRecord, index: int) -> Future[None] | None:
        """See `RunsListener`."""
        return self._store.agent_finished(record.id, index, record.outcome(index))

    def chain_ended(self, record: ChainRecord, stage: Stage, error: str) -> None:
        """See `RunsListener`."""
        _log.info("chain_ended", chain=record.id, state=stage.value, e2e_ms=record.e2e_ms, error=error)
        del self._records[record.id]
        self._ended[record.state_name] += 1
        self._running.discard(record.id)
        if not self._running:
            self.idle.set()
        # The store has it from here on, in this very step: nobody finds the chain in neither place.
        result = record.result(prompt_ids=True)
        kept = self._store.ended(record.id, result, time.time())
        if self._observer is not None:
            self._observer.chain_ended(record.job, record.state.upstreams, result)
        task = asyncio.create_task(self._tell_end(record, error, kept), name=f"end of {record.id}")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        self.start_waiting()

    async def _tell_end(self, record: ChainRecord, error: str, kept: Awaitable[None]) -> None:
        """Whoever is told of a chain's end can rely on its result, whatever becomes of the daemon."""
        ended_ns = time.monotonic_ns()
        try:
            await kept
        except StoreError as trouble:  # it is in memory, and tried again
            _log.error("result_not_kept", chain=record.id, error=str(trouble))
        self.runs.tell.event(record, "ended", None, ended_ns, state=record.state_name, error=error)

    # -------------------------------------------------------------------------------------------------------- helpers

    def _enqueue(self, record: ChainRecord) -> None:
        self._queue.add(
            record.id,
            priority=record.options.priority,
            deadline_ns=record.deadline_ns,
            since_ns=record.submitted_ns,
            slots=len(record.agents),
        )

    def _new_id(self) -> str:
        while (number := secrets.token_hex(4)) in self._records or self._store.knows(number):
            pass
        return number


def _with_seeds(chain: Chain) -> Chain:
    """The chain with a seed wherever an agent samples and has none: run again, it draws the same."""
    agents = [
        msgspec.structs.replace(agent, seed=secrets.randbits(_SEED_BITS))
        if agent.temperature > 0 and agent.seed is None
        else agent
        for agent in chain.agents
    ]
    return msgspec.structs.replace(chain, agents=agents)


def _without_prompts(result: ChainResult) -> ChainResult:
    agents = [msgspec.structs.replace(agent, prompt_ids=None) for agent in result.agents]
    return msgspec.structs.replace(result, agents=agents)


def _not_found(chain: str) -> ChainNotFound:
    return ChainNotFound(f'there is no chain "{chain}".', hint="See `pingpong-client list`.")
