"""The chains against workers that report in any order and die: nothing hangs, leaks or ends twice."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import ChainNotFound, EngineError, Overloaded, PingpongError
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    AbortHop,
    AppendRecord,
    ChainEvent,
    EngineLimits,
    HopAppended,
    HopChecked,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopSpec,
    Literals,
    OutputOf,
    PreparedAgent,
    StartHop,
    Submit,
    SubmitOptions,
    SupervisorMessage,
    WorkerMessage,
)
from pingpong_bus.slab import Slab
from pingpong_bus.token_log import TokenLogWriter
from pingpongd.chains import Chains
from pingpongd.config import parse_config
from pingpongd.placement import GroupView, PrefixMemory

LIMITS = EngineLimits(
    engine="fake",
    model="m",
    max_model_len=1000,
    vocabulary_size=1000,
    block_size=16,
    kv_tokens=10_000,
    max_num_seqs=8,
)
SLOTS = 7


class FakeHop:
    """A hop on a fake worker, and how far it has come."""

    def __init__(self, spec: HopSpec, slab: Slab) -> None:
        self.spec = spec
        self.writer = TokenLogWriter(slab, spec.output)
        self.step = 0


class FakeWorker:
    """Keeps what the supervisor sends; its reports go out in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bell = f"ipc://{name}"
        self.state = "ready"
        self.limits = LIMITS
        self.hops: set[str] = set()
        self.memory = PrefixMemory(10_000)
        self.reachable = True
        self.running: dict[str, FakeHop] = {}
        self.reports: deque[WorkerMessage] = deque()


class FakeFleet:
    """The part of `Fleet` that chains use."""

    def __init__(self, names: str, slab: Slab) -> None:
        self.workers = {name: FakeWorker(name) for name in names}
        self._slab = slab

    @property
    def ready(self) -> list[FakeWorker]:
        return [worker for worker in self.workers.values() if worker.state == "ready"]

    def views(self) -> list[GroupView]:
        return [GroupView(worker.name, len(worker.hops), worker.memory.held) for worker in self.ready]

    async def prepare(self, chain: Chain, inputs: dict[str, str]) -> list[PreparedAgent]:
        positions = {agent.name: at for at, agent in enumerate(chain.agents)}
        prepared = []
        for agent in chain.agents:
            text = agent.prompt or ""
            reads = [OutputOf(agent=at) for name, at in positions.items() if f"{{{{{name}}}}}" in text]
            prepared.append(PreparedAgent(segments=[Literals(ids=[1, 2, 3]), *reads]))
        return prepared

    def send(self, worker: FakeWorker, message: SupervisorMessage) -> None:
        if not worker.reachable:
            raise EngineError(f'worker "{worker.name}" is gone.')
        if isinstance(message, StartHop):
            assert message.spec.hop not in worker.running
            worker.running[message.spec.hop] = FakeHop(message.spec, self._slab)
        elif isinstance(message, AbortHop):
            # A worker answers always, also for a hop that has just ended by itself.
            if (hop := worker.running.pop(message.hop, None)) is not None:
                hop.writer.abort()
            worker.reports.append(HopEnded(hop=message.hop, state="aborted", at_ns=1))


def advance(worker: FakeWorker, hop: FakeHop, *, fails: bool) -> None:
    """Let a hop do its next step and report it."""
    number = hop.spec.hop
    report = worker.reports.append
    if fails:
        del worker.running[number]
        hop.writer.abort()
        report(HopEnded(hop=number, state="failed", at_ns=1, code="EngineError", message="it broke"))
    elif hop.step == 0:
        report(HopOpened(hop=number, at_ns=1))
    elif hop.step == 1:
        report(HopFinalized(hop=number, at_ns=2, prompt_tokens=3, prompt_digest="d", final_tokens=3))
    elif hop.step == 2:
        hop.writer.append([5, 6])
        report(HopFirstToken(hop=number, at_ns=3, cached_tokens=0))
    else:
        del worker.running[number]
        hop.writer.close("length")
        report(HopEnded(hop=number, state="finished", at_ns=4, output_tokens=2, finish_reason="length"))
        if hop.spec.match is not None:
            report(HopChecked(hop=number, prompt_token_match=True))
    hop.step += 1


def chain_reading(reads: list[set[int]], *, ids: bool = False) -> Chain:
    agents: list[dict[str, Any]] = []
    for index, upstreams in enumerate(reads):
        agent: dict[str, Any] = {"name": f"a{index}", "max_tokens": 4}
        if ids and not upstreams:
            agent["prompt_ids"] = [1, 2, 3]
        else:
            agent["prompt"] = "read " + " ".join(f"{{{{a{at}}}}}" for at in sorted(upstreams))
        agents.append(agent)
    return parse_chain(json.dumps({"name": "c", "agents": agents}).encode())


class Service:
    """Chains over a fake fleet."""

    def __init__(self, keep: int = 1000) -> None:
        self.slab = Slab.create(SLOTS, 16)
        self.events: list[ChainEvent] = []
        groups = [{"name": name, "devices": ["cpu:0"]} for name in "ab"]
        config = parse_config({"engine": "simulated", "groups": groups, "max_queued": 4, "keep_finished": keep})
        self.chains = Chains(config, self.slab, self.events.append)
        self.fleet = FakeFleet("ab", self.slab)
        self.chains.fleet = self.fleet  # type: ignore[assignment]

    def submit(self, chain: Chain, mode: str = "auto") -> str:
        request = Submit(request=1, version=PROTOCOL_VERSION, chain=chain, options=SubmitOptions(mode=mode))  # type: ignore[arg-type]
        record = asyncio.run(self.chains.submit(request))
        self.chains.start_waiting()
        return record.id

    def deliver(self, worker: FakeWorker) -> None:
        self.chains.hop_message(worker, worker.reports.popleft())  # type: ignore[arg-type]

    def lose(self, worker: FakeWorker) -> None:
        worker.state, worker.reachable = "dead", False
        worker.running.clear()
        worker.reports.clear()
        self.chains.worker_lost(worker, f'worker "{worker.name}" is gone')  # type: ignore[arg-type]

    def settle(self) -> None:
        """Let all workers do all they have to do."""
        busy = True
        while busy:
            busy = False
            for worker in self.fleet.workers.values():
                for hop in list(worker.running.values()):
                    advance(worker, hop, fails=False)
                    busy = True
                while worker.reports:
                    self.deliver(worker)
                    busy = True

    def close(self) -> None:
        self.slab.close()


class AnyOrder(RuleBasedStateMachine):
    """Two workers, each with reports of its own in order, between them in any order."""

    @initialize()
    def begin(self) -> None:
        self.service = Service()
        self.submitted: list[str] = []

    @rule(data=st.data(), mode=st.sampled_from(["auto", "serial", "ping-pong"]), ids=st.booleans())
    def submit(self, data: st.DataObject, mode: str, ids: bool) -> None:
        count = data.draw(st.integers(1, 4))
        reads = [data.draw(st.sets(st.integers(0, at - 1), max_size=2)) if at else set() for at in range(count)]
        try:
            self.submitted.append(self.service.submit(chain_reading(reads, ids=ids), mode))
        except PingpongError:
            live = [worker for worker in self.service.fleet.workers.values() if worker.state == "ready"]
            queued = self.service.chains.counts().get("queued", 0)
            assert len(live) < 2 or queued >= 4, "refused without a reason"

    @precondition(lambda self: any(worker.running for worker in self.service.fleet.workers.values()))
    @rule(data=st.data(), fails=st.sampled_from([False] * 9 + [True]))
    def work(self, data: st.DataObject, fails: bool) -> None:
        choices = [(w, hop) for w in self.service.fleet.workers.values() for hop in w.running.values()]
        worker, hop = data.draw(st.sampled_from(choices))
        advance(worker, hop, fails=fails)

    @precondition(lambda self: any(worker.reports for worker in self.service.fleet.workers.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        choices = [worker for worker in self.service.fleet.workers.values() if worker.reports]
        self.service.deliver(data.draw(st.sampled_from(choices)))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.service.chains.cancel(data.draw(st.sampled_from(self.submitted)))

    @precondition(lambda self: len(self.service.fleet.ready) == 2)
    @rule(name=st.sampled_from("ab"))
    def cut_off(self, name: str) -> None:
        """A worker has died, and so far only its socket shows it."""
        self.service.fleet.workers[name].reachable = False

    @precondition(lambda self: any(not w.reachable and w.state == "ready" for w in self.service.fleet.workers.values()))
    @rule()
    def reap(self) -> None:
        for worker in self.service.fleet.workers.values():
            if not worker.reachable and worker.state == "ready":
                self.service.lose(worker)

    @invariant()
    def every_log_is_accounted_for(self) -> None:
        if not hasattr(self, "service"):
            return
        chains = self.service.chains
        held = sum(agent.stream is not None for record in chains.live() for agent in record.agents)
        assert self.service.slab.free_slots + held == SLOTS
        ends = [event.chain for event in self.service.events if event.kind == "ended"]
        assert len(ends) == len(set(ends)), "a chain ended twice"

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        try:
            self.check_the_end()
        finally:
            self.service.close()

    def check_the_end(self) -> None:
        for worker in self.service.fleet.workers.values():
            if not worker.reachable and worker.state == "ready":
                self.service.lose(worker)
        self.service.settle()
        chains = self.service.chains
        assert not chains.live(), "a chain hangs"
        assert chains.idle.is_set()
        assert self.service.slab.free_slots == SLOTS
        assert {len(worker.hops) for worker in self.service.fleet.ready} <= {0}
        ended = {event.chain for event in self.service.events if event.kind == "ended"}
        assert ended == set(self.submitted)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.fixture
def service() -> Any:
    found = Service()
    yield found
    found.close()


PAIR = [set[int](), {0}]


def test_an_abort_that_crosses_the_end_of_its_hop_changes_nothing(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), "ping-pong")
    first, second = (service.fleet.workers[agent.worker] for agent in service.chains.find(number).agents)
    (hop,) = first.running.values()
    for _ in range(3):
        advance(first, hop, fails=False)
    while first.reports:
        service.deliver(first)
    advance(second, next(iter(second.running.values())), fails=False)
    service.deliver(second)
    advance(first, hop, fails=False)  # it ends, and its report is on its way
    service.chains.cancel(number)
    service.settle()
    assert service.chains.find(number).state_name == "cancelled"
    assert service.slab.free_slots == SLOTS


def test_waiting_chains_start_in_order_as_logs_get_free(service: Service) -> None:
    numbers = [service.submit(chain_reading([set(), {0}, {1}]), "serial") for _ in range(4)]
    states = [service.chains.find(number).state_name for number in numbers]
    assert states == ["running", "running", "queued", "queued"]
    service.settle()
    started = [event.chain for event in service.events if event.kind == "started"]
    assert started == numbers


def test_waiting_chains_survive_a_worker_that_they_needed(service: Service) -> None:
    numbers = [service.submit(chain_reading([set(), {0}, {1}]), "ping-pong") for _ in range(4)]
    service.lose(service.fleet.workers["b"])
    service.settle()
    results = [service.chains.find(number).result() for number in numbers]
    assert {result.state for result in results} == {"failed"}
    assert "two device groups" in results[-1].error


def test_the_latest_to_end_are_kept() -> None:
    service = Service(keep=2)
    long = service.submit(chain_reading(PAIR), "serial")
    worker = service.fleet.workers[service.chains.find(long).agents[0].worker]
    waiting = dict(worker.running)
    worker.running.clear()
    short = []
    for _ in range(3):
        short.append(service.submit(chain_reading([set()]), "serial"))
        service.settle()
    worker.running.update(waiting)
    service.settle()
    assert [summary.id for summary in service.chains.summaries()] == [long, short[2]]
    with pytest.raises(ChainNotFound):
        service.chains.find(short[0])
    service.close()


def test_nothing_is_accepted_while_draining(service: Service) -> None:
    service.chains.draining = True
    with pytest.raises(Overloaded, match="shutting down"):
        service.submit(chain_reading(PAIR))


def test_a_report_of_an_append_reaches_the_result(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial")
    record = service.chains.find(number)
    worker = service.fleet.workers[record.agents[0].worker]
    advance(worker, next(iter(worker.running.values())), fails=False)
    service.deliver(worker)
    append = AppendRecord(at_ns=record.submitted_ns + 5_000_000, done_ns=0, tokens=7, sent=9)
    service.chains.hop_message(worker, HopAppended(hop=record.agents[0].hop, append=append))  # type: ignore[arg-type]
    (entry,) = record.result().agents[0].appends
    assert (entry.at_ms, entry.tokens, entry.sent, entry.done_ms) == (5.0, 7, 9, None)
