"""Chains whose hops are moved as often as can be, while whatever else happens does so at any moment: none is lost, none
hangs, no token is lost or comes twice, and all room is given back.

What moves gain is not looked at here: every hop on a late group is sent elsewhere. Where it is predicted, so few are
moved that no moment of theirs would meet anything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from chains_desk import OUTPUT, SLOTS, FakeWorker, Service, advance, chain_reading
from engine_figures import H200
from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import GroupHealth, HopEnded
from pingpongd import mover
from pingpongd.chain_record import ChainRecord
from pingpongd.moving import LateHop, Move, Seat

SEEDS = range(150)
LATE = GroupHealth(state="degraded", slowdown=100.0)
HAPPENS = {
    "submit": 60,
    "work": 400,
    "deliver": 280,
    "wobble": 120,
    "cancel": 14,
    "cut_off": 14,
    "reap": 40,
    "engine_dies": 14,
    "replace": 60,
    "restart": 3,
}
"""What may happen, and how often."""


class World:
    """A daemon, its workers, and what a seed has happen to them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.service = Service(H200)
        self.service.give_up_after(self.draw.choice([3, 1000]))

    @property
    def workers(self) -> list[FakeWorker]:
        return list(self.service.fleet.workers.values())

    def live(self) -> None:
        for _ in range(self.draw.randint(20, 150)):
            (what,) = self.draw.choices(list(HAPPENS), list(HAPPENS.values()))
            getattr(self, what)()
            for worker in self.workers:
                grids = [hop.spec.grid for hop in worker.running.values()]
                assert len(grids) < 2 or not any(grids), "a hop on the grid is alone"

    def submit(self) -> None:
        if not self.service.fleet.ready:
            return
        reads = [set(self.draw.sample(range(at), self.draw.randint(0, min(2, at)))) for at in range(4)]
        mode = self.draw.choice(["auto", "auto", "serial", "overlap", "ping-pong"])
        chain = chain_reading(
            reads[: self.draw.randint(1, 4)],
            ids=self.draw.random() < 0.5,
            start=self.draw.choice(["first_token", "immediate"]),
        )
        exactness = "fast" if mode == "overlap" else self.draw.choice(["fast", "fast", "grid"])
        try:
            self.service.submit(chain, mode, exactness=exactness, priority=self.draw.randint(0, 1))
        except PingpongError:
            assert self.service.chains.counts().get("queued", 0) >= 4, "refused without a reason"

    def work(self) -> None:
        if choices := [(worker, hop) for worker in self.workers for hop in worker.running.values()]:
            worker, hop = self.draw.choice(choices)
            advance(worker, hop, fails=self.draw.random() < 0.01)

    def deliver(self) -> None:
        if choices := [worker for worker in self.workers if worker.reports]:
            self.service.deliver(self.draw.choice(choices))

    def wobble(self) -> None:
        late = self.draw.choice([*self.workers, None])
        for worker in self.workers:
            others = GroupHealth(state="recovering" if self.draw.random() < 0.3 else "healthy")
            worker.health = LATE if worker is late else others
        self.service.run(self.service.chains.runs.look_at_health)

    def cancel(self) -> None:
        if self.service.submitted:
            self.service.run(self.service.chains.cancel, self.draw.choice(self.service.submitted))

    def cut_off(self) -> None:
        """A worker has died, and so far only its socket shows it."""
        if self.service.fleet.ready:
            self.draw.choice(self.service.fleet.ready).reachable = False

    def reap(self) -> None:
        for worker in self.workers:
            if not worker.reachable and worker.state == "ready":
                self.service.lose(worker)

    def engine_dies(self) -> None:
        """Its worker says that the hops are lost, and ends a while later."""
        if choices := [worker for worker in self.workers if worker.running]:
            worker = self.draw.choice(choices)
            for hop in worker.running:
                worker.reports.append(HopEnded(hop=hop, state="lost", at_ns=1, code="EngineLost", message="it died"))
            worker.running.clear()
            worker.reachable = False

    def replace(self) -> None:
        for worker in self.workers:
            if worker.state == "dead":
                self.service.bring_back(worker)

    def restart(self) -> None:
        self.service.kill()

    def end(self) -> Counter[str]:
        """Let everything come to its end, and look at it; returns how many hops ended how."""
        service = self.service
        self.reap()
        service.settle()
        self.replace()
        service.settle()
        runs = service.chains.runs
        assert not service.chains.live(), "a chain hangs"
        assert service.slab.free_slots == SLOTS
        assert not any(ledger.held for ledger in runs.room._ledgers.values())
        assert not runs.room._alone
        assert not runs.mover._asked
        ends = Counter[str]()
        for number in service.submitted:
            result = service.store.results[number]
            assert "a fault in the daemon" not in result.error
            for index, agent in enumerate(result.agents):
                ends.update(hop.state for hop in agent.hops)
                if result.state == "finished":
                    assert agent.output_ids == [index * 10 + at for at in range(OUTPUT)]
                if not service.restarted:
                    assert service.told(number).get(agent.name, []) == agent.output_ids
        return ends


def all_of_them(late: Sequence[LateHop], seats: Mapping[str, Seat]) -> list[Move]:
    return [Move(hop.hop, min(hop.held), 2.0, 1.0) for hop in late if min(hop.held) in seats]


def elsewhere(own: mover.Mover, hop: str, record: ChainRecord, index: int) -> Move | None:
    able = own._room.able(record, index)
    return Move(hop, able[0].name, 2.0, 1.0) if able else None


def test_chains_outlive_all_that_happens_while_hops_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "moves", all_of_them)
    monkeypatch.setattr(mover.Mover, "_begins_elsewhere", elsewhere)
    monkeypatch.setattr(mover, "MOST_MOVES", 5)
    ends = Counter[str]()
    for seed in SEEDS:
        world = World(seed)
        try:
            world.live()
            ends += world.end()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            world.service.close()
    assert min(ends[state] for state in ("finished", "moved", "lost", "aborted", "failed")) >= 10, ends
