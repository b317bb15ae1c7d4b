"""Where the next hop of an agent can run, and who has to wait for a group or for room in its engine."""

from __future__ import annotations

from collections.abc import Iterator

from pingpongd.chain_record import ChainRecord
from pingpongd.chain_state import LIVE, Phase
from pingpongd.fleet import Fleet, Worker
from pingpongd.ledger import GroupLedger, hop_tokens
from pingpongd.placement import GroupView, replacement


class HopRoom:
    """The groups that serve, what their open hops hold, and the agents that are held for want of them."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None
        self._ledgers: dict[str, GroupLedger] = {}
        self._shunned: set[str] = set()
        """Groups whose engine has died, as its hops say, and whose worker has not ended yet."""
        self._held: dict[tuple[int, int], tuple[ChainRecord, int]] = {}
        """Agents whose turn has come, by chain number and index."""

    @property
    def waited_for(self) -> bool:
        """Whether any agent is held."""
        return bool(self._held)

    def groups(self) -> list[GroupView]:
        """The groups that take hops now, in the configuration's order."""
        if self.fleet is None:
            return []
        return [view for view in self.fleet.views() if view.name not in self._shunned]

    def standing(self) -> list[GroupView]:
        """The groups that take hops now or may do so again."""
        workers = self.fleet.workers.values() if self.fleet is not None else ()
        return [GroupView(worker.name, len(worker.hops)) for worker in workers if worker.state != "failed"]

    def serves(self, worker: Worker) -> None:
        """A worker serves, with a fresh engine."""
        assert worker.limits is not None  # noqa: S101 - it came with Ready
        self._ledgers[worker.name] = GroupLedger(worker.limits)
        self._shunned.discard(worker.name)

    def shun(self, group: str) -> None:
        """Its engine is gone: nothing is sent there until another one serves."""
        self._shunned.add(group)

    def lost(self, group: str) -> None:
        """Its worker is gone with all that its hops held."""
        self._ledgers.pop(group, None)

    def gone(self, record: ChainRecord) -> str | None:
        """Why the group that the chain's submission names will not serve any more; None where it may."""
        name = record.options.group
        if name is None or any(view.name == name for view in self.standing()):
            return None
        return f'the group "{name}" is gone.'

    def take(self, record: ChainRecord, index: int, hop: str) -> Worker | None:
        """Set a hop's full length aside on the group where it can run; None where there is no group or no room."""
        worker = self._target(record, index)
        if worker is None or not self._ledgers[worker.name].take(hop, _full_length(record, index)):
            return None
        return worker

    def give_back(self, group: str, hop: str) -> None:
        """A hop is over; harmless where its group's engine is gone."""
        if group in self._ledgers:
            self._ledgers[group].give_back(hop)

    def hold(self, record: ChainRecord, index: int) -> None:
        """Let an agent wait."""
        self._held[record.number, index] = record, index

    def release(self, record: ChainRecord, index: int) -> None:
        """It waits no more; harmless where it does not."""
        self._held.pop((record.number, index), None)

    def held_on(self, group: str) -> list[ChainRecord]:
        """The chains of held agents that name this group."""
        return [record for record, _ in self._held.values() if record.options.group == group]

    def turns(self) -> Iterator[tuple[ChainRecord, int]]:
        """Release held agents for whom there is a group and room, one by one: first who was interrupted, then by age.

        None overtakes another on the same group, so none starves.
        """
        full: set[str] = set()
        for key, (record, index) in sorted(self._held.items(), key=_turn):
            worker = self._target(record, index) if key in self._held else None
            if worker is None or worker.name in full:
                continue
            if not self._ledgers[worker.name].fits(_full_length(record, index)):
                full.add(worker.name)
                continue
            del self._held[key]
            yield record, index

    def _target(self, record: ChainRecord, index: int) -> Worker | None:
        """The agent's own group, or another where that one does not serve and the submission does not name it."""
        views, name = self.groups(), record.agents[index].worker
        if not any(view.name == name for view in views):
            if record.options.group is not None:
                return None
            reads = record.state.upstreams
            near = [at for at in range(len(reads)) if at in reads[index] or index in reads[at]]
            avoid = frozenset(record.agents[at].worker for at in near if record.state.phases[at] in LIVE)
            other = replacement(views, avoid)
            if other is None:
                return None
            name = other
        assert self.fleet is not None  # noqa: S101 - its views were asked for
        return self.fleet.workers[name]


def _full_length(record: ChainRecord, index: int) -> int:
    """The most tokens that the agent's hop can come to."""
    over = (Phase.WRITTEN, Phase.DONE)
    reads = record.state.upstreams[index]
    written = {at: len(record.agents[at].output_ids) for at in reads if record.state.phases[at] in over}
    return hop_tokens(record.chain, record.prepared, index, written)


def _turn(item: tuple[tuple[int, int], tuple[ChainRecord, int]]) -> tuple[bool, int, int]:
    """Sorts held agents."""
    (number, index), (record, _) = item
    return record.state.phases[index] is not Phase.INTERRUPTED, number, index
