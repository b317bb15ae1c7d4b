"""Keeps running chains off groups whose tokens come late: agents that have not started, and hops that fall behind.

What is decided is in `replanning.py` and `moving.py`, which are pure; here is what they are told of the moment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import msgspec

from pingpong_bus.log_records import HopMoved
from pingpongd.agent_task import Stage
from pingpongd.chain_progress import running
from pingpongd.chain_record import ChainRecord
from pingpongd.chain_state import LIVE, Phase
from pingpongd.chain_state import Stage as ChainStage
from pingpongd.cost_model import CostModel, RunningChain, cached_prefix
from pingpongd.engine_costs import EngineCosts
from pingpongd.hop_room import HopRoom
from pingpongd.jitter_episodes import RECOVERING_S
from pingpongd.moving import MOST_MOVES, WORTH_MS, LateHop, Move, Seat, Spells, moves
from pingpongd.placement import LATE_MARGIN, lateness
from pingpongd.planner import Planner
from pingpongd.replanning import Replan, replan

Hops = Mapping[str, tuple[ChainRecord, int, str]]
"""Those that may still report: chain, agent, group."""
TURN_S = 0.03
"""Hops are looked at for so long at a time: each takes some milliseconds where many chains run."""
_READERS_WORTH = 0.02
"""Of what is left of a chain: what it has to gain where an agent begins to read anew elsewhere."""


class _Asked(msgspec.Struct, frozen=True):
    """A hop that its worker was asked to leave, and the next one, for which room is set aside."""

    move: Move
    next_hop: str = ""
    """Empty: its agent waits for its turn again, and has no room until then."""


class Mover:
    """Belongs to one event loop."""

    def __init__(self, room: HopRoom, planner: Planner) -> None:
        """Args:
        room: says which groups are well, and where hops fit.
        planner: predicts.
        """
        self.enabled = True
        """Whether hops are moved; agents that have not started go elsewhere all the same."""
        self._room = room
        self._planner = planner
        self._costs = EngineCosts()
        self._asked: dict[str, _Asked] = {}
        self._looked_ns: dict[str, int] = {}
        """When the hops on late groups were looked at, those that were."""
        self._spells: dict[str, Spells] = {}
        self._avoided: frozenset[str] = frozenset()

    def changed(self) -> bool:
        """Whether other groups are avoided than when it was asked last."""
        fleet = self._room.fleet
        if fleet is None:
            return False
        now_ns = time.monotonic_ns()
        for name, worker in fleet.workers.items():
            spells = self._spells.setdefault(name, Spells())
            if worker.health.state == "degraded":
                spells.began(now_ns)
            else:
                spells.ended(now_ns - int(RECOVERING_S * 1e9))  # so long it has had no late token by now
        avoided = frozenset(name for name in fleet.workers if self._room.is_avoided(name))
        for name in avoided - self._avoided:
            self._planner.degraded(name)
        before, self._avoided = self._avoided, avoided
        return avoided != before

    # ------------------------------------------------------------------------------- agents that have not started

    def replan(self, record: ChainRecord, index: int) -> Replan | None:
        """How a chain goes on one of whose agents is to be dispatched to a group that is avoided now; None: as it was
        planned, for there is no reason or no way to do otherwise."""
        if not self._room.is_avoided(record.agents[index].worker):
            return None
        model = self._planner.without(record)
        new = self._replan(record, index, model)
        if new is None or new.ms is None or not model.busy(set(new.groups)):
            return new
        # Others run where it would go: the group that is late can still be the sooner one.
        stay = model.rest(self._not_begun(record, index)).total_ms
        return None if stay < new.ms * (1.0 - LATE_MARGIN) else new

    def _replan(self, record: ChainRecord, index: int, model: CostModel) -> Replan | None:
        """The rest of a chain, an agent that has written nothing among it, on the groups that are well."""
        if record.options.group is not None:
            return None
        waiting = [at for at, phase in enumerate(record.state.phases) if phase is Phase.WAITING or at == index]
        chain = self._not_begun(record, index)
        return replan(chain, waiting, record.options.mode, self._room.able(record, index), model)

    def _not_begun(self, record: ChainRecord, index: int) -> RunningChain:
        """A chain as if an agent that has written nothing were yet to start."""
        chain = running(record)
        agents = list(chain.agents)
        agents[index] = msgspec.structs.replace(agents[index], stage=Stage.WAITING, read=0)
        return msgspec.structs.replace(chain, agents=tuple(agents))

    def lateness(self, group: str) -> str:
        """Why a group is avoided, in a clause."""
        fleet = self._room.fleet
        return lateness(fleet.workers[group].view(held=False)) if fleet is not None else ""

    # -------------------------------------------------------------------------------------------- hops that run

    def moves(self, hops: Hops, only: str | None = None) -> list[Move]:
        """The hops that are to leave their groups now: those that write, with room set aside where they go, and those
        that only read, and had better begin elsewhere.

        Args:
            hops: all that there are.
            only: the one to look at. None: those that wait longest for a look, as far as `TURN_S` goes.
        """
        due = [hop for hop in (hops if only is None else (only,)) if self._may_leave(hop, *hops[hop])]
        if only is None:
            self._looked_ns = {hop: self._looked_ns.get(hop, 0) for hop in due}
            due.sort(key=self._looked_ns.__getitem__)
        if not due:
            return []
        now_ns, late, found = time.monotonic_ns(), list[LateHop](), list[Move]()
        model = CostModel(
            [msgspec.structs.replace(view, degraded=False) for view in self._room.groups()], costs=self._costs
        )
        for hop in due:
            record, index, group = hops[hop]
            if record.state.phases[index] is Phase.READING:
                if (move := self._begins_elsewhere(hop, record, index)) is not None:
                    self._asked[hop] = _Asked(move)
                    found.append(move)
            elif (candidate := self._late_hop(hop, record, index, group, model, now_ns)) is not None:
                late.append(candidate)
            self._looked_ns[hop] = time.monotonic_ns()
            if self._looked_ns[hop] - now_ns > TURN_S * 1e9:
                break
        chosen = moves(late, self._seats(hops, model, now_ns)) if late else []
        return found + [move for move in chosen if self._set_aside(move, *hops[move.hop][:2])]

    def _begins_elsewhere(self, hop: str, record: ChainRecord, index: int) -> Move | None:
        """Where the agent of a hop that only reads had better begin anew."""
        model = self._planner.without(record)
        new = self._replan(record, index, model)
        if new is None or new.ms is None:  # nor can be predicted what it takes where it is
            return None
        stay = model.rest(running(record)).total_ms
        if stay - new.ms <= max(WORTH_MS, _READERS_WORTH * stay):
            return None
        return Move(hop, new.groups[index], stay, new.ms)

    def over(self, hop: str) -> Move | None:
        """A hop reports its end: the room that was kept for the next one is free; what was asked of it, if anything."""
        asked = self._asked.pop(hop, None)
        if asked is None:
            return None
        if asked.next_hop:
            self._room.give_back(asked.move.to, asked.next_hop)
        return asked.move

    def moved(self, record: ChainRecord, index: int, hop: str, group: str, move: Move) -> HopMoved:
        """A hop has left its group: note where the agent goes on, if it has written, and say so."""
        agent = record.agents[index]
        record.rerouted = True
        if agent.output_ids:  # else its chain is placed anew when its turn comes
            agent.worker = move.to
        fleet = self._room.fleet
        return HopMoved(
            chain=record.id,
            agent=record.chain.agents[index].name,
            hop=hop,
            worker=group,
            to=move.to,
            tokens=len(agent.output_ids),
            left_ms=round(move.stay_ms, 1),
            there_ms=round(move.there_ms, 1),
            cause=fleet.workers[group].health.cause if fleet is not None else None,
        )

    def _may_leave(self, hop: str, record: ChainRecord, index: int, group: str) -> bool:
        fleet = self._room.fleet
        return (
            self.enabled
            and fleet is not None
            and self._room.is_avoided(group)
            and fleet.workers[group].health.state == "degraded"
            and hop not in self._asked
            and record.state.phases[index] in (Phase.READING, Phase.WRITING)
            and record.state.stage is ChainStage.RUNNING
            and record.agents[index].moves < MOST_MOVES
            and record.options.group is None
            and record.options.mode != "ping-pong"
        )

    def _late_hop(
        self, hop: str, record: ChainRecord, index: int, group: str, model: CostModel, now_ns: int
    ) -> LateHop | None:
        """None where nothing can be predicted of it, or nobody could take it."""
        series_end = self._planner.series_end_ns(record, index)
        readers = [at for at, reads in enumerate(record.state.sources) if index in reads]
        # Where nothing holds a reader back it would slow the decoding.
        beside = {record.agents[at].worker for at in readers if record.state.phases[at] in LIVE}
        held = {
            view.name: cached_prefix(record.shape, index, view)
            for view in self._room.able(record, index)
            if view.name != group and model.cost(view.name) is not None and (view.overlap or view.name not in beside)
        }
        if series_end is None or not held or model.cost(group) is None:
            return None
        agent = record.agents[index]
        return LateHop(
            hop=hop,
            group=group,
            prompt=agent.prompt_tokens,
            written=len(agent.output_ids),
            left=max(0, record.shape.outputs[index] - len(agent.output_ids)),
            series_ms=(series_end - now_ns) / 1e6,
            held=held,
            replays=record.job.exact.level != "fast",
            moves=agent.moves,
            pace=record.shape.pace(index),
        )

    def _seats(self, hops: Hops, model: CostModel, now_ns: int) -> dict[str, Seat]:
        # Those that are on their way count where they go.
        writers = Counter(
            self._asked[hop].move.to if hop in self._asked else group
            for hop, (record, index, group) in hops.items()
            if record.state.phases[index] is Phase.WRITING
        )
        seats: dict[str, Seat] = {}
        for view in self._room.groups():
            if (cost := model.cost(view.name)) is not None:
                lasts = self._spells.setdefault(view.name, Spells()).left_ms(now_ns)
                slowdown = view.slowdown if view.degraded else 1.0
                seats[view.name] = Seat(cost, writers[view.name], slowdown, lasts if view.degraded else 0.0)
        return seats

    def _set_aside(self, move: Move, record: ChainRecord, index: int) -> bool:
        """Keep room for a hop where it goes to; False where others took it just now."""
        if not self._room.has_room(record, index, move.to):
            return False
        next_hop = f"{record.id}/{index}/{record.agents[index].hops}"
        self._room.set_aside(record, index, move.to, next_hop)
        self._asked[move.hop] = _Asked(move, next_hop)
        return True
