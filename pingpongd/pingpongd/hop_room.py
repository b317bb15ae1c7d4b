"""Where the next hop of an agent can run, and who has to wait for a group or for room in its engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import msgspec

from pingpong_bus.messages import EngineLimits
from pingpongd.chain_queue import Turn, turn_of
from pingpongd.chain_record import ChainRecord
from pingpongd.chain_state import LIVE, Phase, awaited_steps
from pingpongd.config import DaemonConfig
from pingpongd.exactness import EngineKind, GroupEngine, engine_kind
from pingpongd.fleet import Fleet, Worker
from pingpongd.ledger import GroupLedger, hop_tokens
from pingpongd.model_names import engine_arguments
from pingpongd.placement import ChainShape, GroupView, replacement

_GRID = "exactness grid"


class HopRoom:
    """The groups that serve, what their open hops hold, and the agents that are held for want of them."""

    def __init__(self, config: DaemonConfig) -> None:
        """Args:
        config: the daemon's; what all groups' engines are given counts.
        """
        self.fleet: Fleet | None = None
        self.configure(config)
        self.suspect_after = 1
        """Agents under which so many engines have died run alone from then on: it may be their prompt that kills."""
        self._ledgers: dict[str, GroupLedger] = {}
        self._kinds: dict[str, EngineKind] = {}
        """Of the engines that serve, or did so last."""
        self._shunned: set[str] = set()
        """Groups whose engine has died, as its hops say, and whose worker has not ended yet."""
        self._held: dict[tuple[int, int], tuple[ChainRecord, int]] = {}
        """Agents whose turn has come, by chain number and index."""
        self._alone: dict[str, tuple[str, str, str]] = {}
        """The hop that has its group to itself, why, and whose it is, for people; by group."""
        self._watchers: list[asyncio.Future[None]] = []

    def configure(self, config: DaemonConfig) -> None:
        """Take a configuration, the first or one that was read again."""
        self._config = config
        self._routes = config.jitter.enabled and config.jitter.route

    @property
    def waited_for(self) -> bool:
        """Whether any agent is held."""
        return bool(self._held)

    def groups(self) -> list[GroupView]:
        """The groups that take hops now, in the configuration's order; agents that wait for one count as its hops."""
        if self.fleet is None:
            return []
        waiting = Counter(record.agents[index].worker for record, index in self._held.values())
        return [
            msgspec.structs.replace(view, hops=view.hops + waiting[view.name]) if view.name in waiting else view
            for view in map(self._seen, self.fleet.views())
            if view.name not in self._shunned
        ]

    def standing(self) -> list[GroupView]:
        """The groups that take hops now or may do so again."""
        return [self._seen(worker.view(held=False)) for worker in self._standing()]

    def is_avoided(self, group: str) -> bool:
        """Whether the group's tokens come late, so that it gets no hops while another can take them."""
        worker = self.fleet.workers.get(group) if self.fleet is not None else None
        return self._routes and worker is not None and worker.health.state != "healthy"

    def able(self, record: ChainRecord, index: int) -> list[GroupView]:
        """The groups whose tokens come in time, and that can take the agent's hop now."""
        tokens = _full_length(record, index)
        return [
            view
            for view in self.groups()
            if not view.degraded
            and self._may_run(record, index, view.name, tokens)
            and self._fits(view.name, record, index)
        ]

    def with_room(self, views: Sequence[GroupView], shape: ChainShape) -> list[GroupView]:
        """The groups, those marked that have no room for a chain; it matters where others decode late."""
        if not shape.outputs or not any(view.degraded for view in views):
            return list(views)
        longest: dict[str, int] = {}
        for at, tokens in enumerate(shape.outputs):
            if not shape.is_step(at):
                length = shape.prompt_tokens(at) + tokens
                longest[shape.model(at)] = max(length, longest.get(shape.model(at), 0))
        return [
            msgspec.structs.replace(view, full=True)
            if view.name in self._ledgers and not self._ledgers[view.name].fits(longest.get(view.model, 0))
            else view
            for view in views
        ]

    def has_room(self, record: ChainRecord, index: int, group: str) -> bool:
        """Whether the agent's next hop could open on the group at once."""
        return self._fits(group, record, index)

    def set_aside(self, record: ChainRecord, index: int, group: str, hop: str) -> None:
        """Keep room for a hop that is to come to the group, where there is room; `give_back` ends that."""
        self._ledgers[group].take(hop, _full_length(record, index))
        self._note_held(group)
        if why := self._wants_to_be_alone(record, index):
            self._alone[group] = hop, why, _whose(record, index)

    def _seen(self, view: GroupView) -> GroupView:
        """A group as placement is to see it: all alike where nothing is routed around."""
        if view.degraded and not self._routes:
            return msgspec.structs.replace(view, degraded=False, slowdown=1.0, cause=None)
        return view

    def engines(self, group: str | None = None, models: Collection[str] | None = None) -> list[GroupEngine]:
        """The standing groups' engines, those that serve or did so last.

        Args:
            group: of this one alone.
            models: of groups that serve one of these, by name; None: of all.
        """
        return [
            GroupEngine(worker.name, worker.limits, self._kinds[worker.name], worker.model)
            for worker in self._standing(models)
            if worker.limits is not None and group in (None, worker.name)
        ]

    def limits(self, model: str | None = None) -> list[EngineLimits]:
        """Of the standing groups' engines, those that serve or did so last; of one model's, where it is named."""
        standing = self._standing(None if model is None else (model,))
        return [worker.limits for worker in standing if worker.limits is not None]

    def models(self) -> list[str]:
        """The models of the standing groups, by name."""
        return list(dict.fromkeys(worker.model for worker in self._standing()))

    def tokenizers(self, models: Sequence[str | None]) -> list[str | None]:
        """Per agent, by its model, what tells the model's tokenizer from others; None where it has none, and of steps.

        Args:
            models: per agent, the name of the model that runs it; None of a step.
        """
        found: dict[str | None, str | None] = {None: None}
        for model in models:
            if model is not None and model not in found:
                limits = next(iter(self.limits(model)), None)
                # Engines that do not say are taken to differ.
                known = None if limits is None else limits.tokenizer or f"of {limits.model}"
                found[model] = known if limits is None or limits.has_tokenizer else None
        return [found[model] for model in models]

    def serves(self, worker: Worker) -> None:
        """A worker serves, with a fresh engine."""
        assert worker.limits is not None  # noqa: S101 - it came with Ready
        config, own = self._config, worker.group
        self._ledgers[worker.name] = GroupLedger(worker.limits)
        self._kinds[worker.name] = engine_kind(
            worker.limits, engine_arguments(config, own), config.environment | own.environment
        )
        self._shunned.discard(worker.name)
        self._has_changed()

    def shun(self, group: str) -> None:
        """Its engine is gone: nothing is sent there until another one serves."""
        self._shunned.add(group)

    def lost(self, group: str) -> None:
        """Its worker is gone with all that its hops held."""
        self._ledgers.pop(group, None)
        self._alone.pop(group, None)
        self._note_held(group)

    def gone(self, record: ChainRecord, index: int) -> str | None:
        """Why no group will ever run the agent: the one that its chain names is gone, or the engines that are left are
        too small; None where one may."""
        if self._own(record, index) is not None:
            return None
        name, model = record.options.group, record.shape.model(index)
        standing = [worker for worker in self._standing((model,)) if name in (None, worker.name)]
        if not standing:  # where none is left at all the daemon ends, and its next start may have some
            if name is not None:
                return f'the group "{name}" is gone.'
            return f"every group is gone that serves {_called(model)}." if self._standing() else None
        tokens = _full_length(record, index)
        if (unlike := self._unlike(record, model)) is not None:
            return unlike
        limits = [worker.limits for worker in standing]
        if any(limit is None or GroupLedger(limit).ever_fits(tokens) for limit in limits):
            return None
        most = max((limit.kv_tokens for limit in limits if limit is not None), default=0)
        agent = record.chain.agents[index].name
        return f'agent "{agent}" needs up to {tokens} tokens, and the KV caches that are left hold at most {most}.'

    def take(self, record: ChainRecord, index: int, hop: str) -> Worker | None:
        """Set a hop's full length aside on the group where it can run; None where there is no group or no room."""
        worker = self._target(record, index)
        if worker is None or not self._fits(worker.name, record, index):
            return None
        self._ledgers[worker.name].take(hop, _full_length(record, index))
        self._note_held(worker.name)
        if why := self._wants_to_be_alone(record, index):
            self._alone[worker.name] = hop, why, _whose(record, index)
        return worker

    def is_alone(self, group: str, hop: str) -> bool:
        """Whether the hop has its group to itself: what happens to the engine, happens by it."""
        return group in self._alone and self._alone[group][0] == hop

    def is_suspect(self, record: ChainRecord, index: int) -> bool:
        """Whether so many engines have died under the agent that it may be its prompt that kills."""
        return record.agents[index].losses >= self.suspect_after

    def give_back(self, group: str, hop: str) -> None:
        """A hop is over; harmless where its group's engine is gone."""
        if group in self._ledgers:
            self._ledgers[group].give_back(hop)
            self._note_held(group)
        if self.is_alone(group, hop):
            del self._alone[group]
        self._has_changed()

    def recount(self, group: str, hop: str, tokens: int) -> None:
        """A hop's full length is known, which was estimated where its prompt is joined as text: what is set aside for
        others is counted from it from now on."""
        if group in self._ledgers:
            self._ledgers[group].recount(hop, tokens)
            self._note_held(group)
            self._has_changed()

    def take_between(self, request: str, tokens: int, *, grid: bool, model: str = "") -> Worker | None:
        """Set room aside for a request that is no hop, on the least busy group; None where there is none now.

        It gives way to held agents: one that waits for a group to itself would wait for ever behind such requests.

        Args:
            request: a name of its own, for `give_back`.
            tokens: its full length.
            grid: it has to have its group to itself, and an engine that can be held to a grid.
            model: that it is for, by name; empty: the default one.
        """
        targets = [self._target(record, index) for record, index in self._held.values()]
        wanted = {worker.name for worker in targets if worker is not None}
        for view in sorted(self.groups(), key=lambda view: view.hops):
            if view.model != model:
                continue
            assert self.fleet is not None  # noqa: S101 - its views were asked for
            worker, ledger = self.fleet.workers[view.name], self._ledgers[view.name]
            able = not grid or (worker.limits is not None and worker.limits.grid_tokens > 0 and not ledger.held)
            if able and view.name not in wanted and view.name not in self._alone and ledger.take(request, tokens):
                self._note_held(view.name)
                if grid:
                    self._alone[view.name] = request, _GRID, "another request"
                return worker
        return None

    def _note_held(self, group: str) -> None:
        """Have the group's status say what is set aside."""
        if self.fleet is not None:
            ledger = self._ledgers.get(group)
            self.fleet.workers[group].kv_held_tokens = ledger.held_tokens if ledger is not None else 0

    async def changed(self) -> None:
        """Wait until room is given back, a group begins to serve or an agent waits no more, and the held hops have had
        their turn."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    def _has_changed(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def hold(self, record: ChainRecord, index: int) -> None:
        """Let an agent wait."""
        self._held[record.number, index] = record, index
        worker = self._target(record, index)
        self._say_why(record, index, worker.name if worker is not None else None)

    def release(self, record: ChainRecord, index: int) -> None:
        """It waits no more; harmless where it does not."""
        record.agents[index].waits_for = ""
        if self._held.pop((record.number, index), None) is not None:
            self._has_changed()  # nothing else may come back, where its chain has ended

    def held_on(self, group: str) -> list[ChainRecord]:
        """The chains of held agents that name this group."""
        return [record for record, _ in self._held.values() if record.options.group == group]

    def wanted(self) -> set[str]:
        """The groups that held agents wait for, but for those that wait for a step as well: they would gain nothing."""
        held = [(record, index) for record, index in self._held.values() if not awaited_steps(record.state, index)]
        return {worker.name for worker in (self._target(record, index) for record, index in held) if worker is not None}

    def turns(self) -> Iterator[tuple[ChainRecord, int]]:
        """Release held agents for whom there is a group and room, one by one: first who was interrupted, then as chains
        wait in the queue, by priority and age. Also those that no group will ever run, to be told so.

        None overtakes another on the same group, so none starves.
        """
        full: set[str] = set()
        for key, (record, index) in sorted(self._held.items(), key=_turn):
            if key not in self._held:
                continue  # its chain has ended meanwhile
            worker = self._target(record, index)
            if worker is not None:
                if worker.name in full or not self._fits(worker.name, record, index):
                    full.add(worker.name)
                    self._say_why(record, index, worker.name)
                    continue
            elif self.gone(record, index) is None:
                self._say_why(record, index, None)
                continue
            self.release(record, index)
            yield record, index

    def _standing(self, models: Collection[str] | None = None) -> list[Worker]:
        workers = self.fleet.workers.values() if self.fleet is not None else ()
        return [worker for worker in workers if worker.state != "failed" and (models is None or worker.model in models)]

    def _unlike(self, record: ChainRecord, model: str) -> str | None:
        """Why none of a model's engines may run an exact chain: all are of another kind now; None where one may be."""
        engines, exact = self.engines(record.options.group, (model,)), record.job.exact
        if not engines or any(exact.allows(engine.kind) for engine in engines):
            return None
        return f'it runs at exactness "{exact.level}" on {exact.kinds}, and no such engine is left.'

    def _wants_to_be_alone(self, record: ChainRecord, index: int) -> str:
        """Why the agent's hop has to have its group to itself; empty: it need not."""
        if record.job.exact.level == "grid":
            return _GRID  # beside another request the kernels see other shapes
        return "engines have died under it" if self.is_suspect(record, index) else ""

    def _fits(self, group: str, record: ChainRecord, index: int) -> bool:
        return not self._obstacle(group, record, index)

    def _obstacle(self, group: str, record: ChainRecord, index: int) -> str:
        """What the agent's hop has to wait for on a group that serves; empty: nothing."""
        ledger = self._ledgers[group]
        if group in self._alone:
            _, why, whose = self._alone[group]
            return f'the group "{group}", which {whose} has to itself: {why}'
        if ledger.held and (why := self._wants_to_be_alone(record, index)):
            return f'the group "{group}" to itself: {why}'
        return "" if ledger.fits(_full_length(record, index)) else f'room in the group "{group}"'

    def _say_why(self, record: ChainRecord, index: int, group: str | None) -> None:
        """Note what a held agent waits for, for people."""
        if group is None:
            name = record.options.group
            model = record.shape.model(index)
            which = f"a group that serves {_called(model)}" if model else "a group that serves"
            waits_for = which if name is None else f'the group "{name}", which does not serve now'
        else:
            waits_for = self._obstacle(group, record, index) or f'its turn on the group "{group}"'
        record.agents[index].waits_for = waits_for

    def _target(self, record: ChainRecord, index: int) -> Worker | None:
        """The agent's own group, or another where that one does not serve, or has grown too small, or is to be avoided,
        and the submission does not name it."""
        own = self._own(record, index)
        if record.options.group is not None:
            return own
        # One that is to be avoided is left when the agent is dispatched, where that gains; see `mover.py`.
        if own is not None and (not self.is_avoided(own.name) or self._fits(own.name, record, index)):
            return own
        views = self.able(record, index)
        # Ping-pong that was asked for takes two, and has them where another model runs its other agents.
        alternates = record.options.mode == "ping-pong" and len(record.shape.wanted) < 2
        if own is not None and len(views) < (2 if alternates else 1):
            return own
        if not views:
            tokens = _full_length(record, index)
            views = [view for view in self.groups() if self._may_run(record, index, view.name, tokens)]
        reads = record.state.sources  # what it reads through steps is near, too
        near = [at for at in range(len(reads)) if at in reads[index] or index in reads[at]]
        beside = frozenset(record.agents[at].worker for at in near if record.state.phases[at] in LIVE)
        other = replacement(views, beside, join=record.state.placement == "overlap")
        return self.fleet.workers[other] if self.fleet is not None and other is not None else None

    def _own(self, record: ChainRecord, index: int) -> Worker | None:
        """The agent's own group, where it serves and may run the agent. It is asked for with every hop, so it does not
        look at the other groups."""
        worker = self.fleet.workers.get(record.agents[index].worker) if self.fleet is not None else None
        if worker is None or worker.state != "ready" or worker.name in self._shunned:
            return None
        return worker if self._may_run(record, index, worker.name, _full_length(record, index)) else None

    def _may_run(self, record: ChainRecord, index: int, group: str, tokens: int) -> bool:
        """Whether the engine of a group that serves is of the agent's model and the chain's kind, and large enough."""
        assert self.fleet is not None  # noqa: S101 - the group was found there
        return (
            self.fleet.workers[group].model == record.shape.model(index)
            and record.job.exact.allows(self._kinds[group])
            and self._ledgers[group].ever_fits(tokens)
        )


def _called(model: str) -> str:
    """A model's name, for people."""
    return f'the model "{model}"' if model else "the default model"


def _whose(record: ChainRecord, index: int) -> str:
    """Whose a hop is, for people."""
    return f'agent "{record.chain.agents[index].name}" of chain {record.id}'


def _full_length(record: ChainRecord, index: int) -> int:
    """The most tokens that the agent's hop can come to."""
    over = (Phase.WRITTEN, Phase.DONE)
    reads = record.state.upstreams[index]
    written = {at: len(record.agents[at].output_ids) for at in reads if record.state.phases[at] in over}
    return hop_tokens(record.chain, record.prepared, index, written)


def _turn(item: tuple[tuple[int, int], tuple[ChainRecord, int]]) -> tuple[bool, Turn, int]:
    """Sorts held agents."""
    _, (record, index) = item
    turn = turn_of(record.options.priority, record.deadline_ns, record.submitted_ns, record.number)
    return record.state.phases[index] is not Phase.INTERRUPTED, turn, index
