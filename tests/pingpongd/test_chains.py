"""The chains against workers that report in any order and die: nothing hangs, leaks or ends twice."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chains_desk import LIMITS, OUTPUT, SLOTS, Service, advance, chain_reading
from engine_figures import H200
from pingpong_bus.chain import parse_chain
from pingpong_bus.errors import ChainNotFound, Overloaded, PingpongError, StoreError, UsageError
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    AppendRecord,
    ChainResult,
    GroupHealth,
    HopAppended,
    HopEnded,
    Literals,
    PreparedAgent,
    Submit,
)
from pingpongd.stored import Job
from pingpongd.worker_handle import EndOrder

STEADY = GroupHealth()
SLOW = GroupHealth(state="degraded", slowdown=100.0)
RECOVERS = GroupHealth(state="recovering")


class AnyOrder(RuleBasedStateMachine):
    """Two workers, each with reports of its own in order, between them in any order."""

    @initialize(ends=st.sampled_from([3, 1000]), measured=st.sampled_from([True, True, False]))
    def begin(self, ends: int, measured: bool) -> None:
        """With few ends, agents under which engines die come to run alone, and fail in the end. Hops are moved off
        groups that decode late where these were measured."""
        limits = msgspec.structs.replace(LIMITS, tokenizer="t")
        self.service = Service(H200 if measured else None, limits, {"calls": {"x": {"command": ["true"]}}})
        self.service.give_up_after(ends)

    @precondition(lambda self: self.service.fleet.ready)
    @rule(data=st.data(), mode=st.sampled_from(["auto", "serial", "ping-pong", "overlap"]), ids=st.booleans())
    def submit(self, data: st.DataObject, mode: str, ids: bool) -> None:
        count = data.draw(st.integers(1, 4))
        reads = [data.draw(st.sets(st.integers(0, at - 1), max_size=2)) if at else set() for at in range(count)]
        start = data.draw(st.sampled_from(["first_token", "immediate"]))
        try:
            exactness = "fast" if mode == "overlap" else data.draw(st.sampled_from(["fast", "grid"]))
            priority = data.draw(st.integers(0, 1))
            steps = frozenset(data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1)))
            ids = ids and not steps
            chain = chain_reading(reads, ids=ids, start=start, steps=steps)
            self.service.submit(chain, mode, priority=priority, exactness=exactness)
        except PingpongError:
            queued = self.service.chains.counts().get("queued", 0)
            assert queued >= 4, "refused without a reason"

    @precondition(lambda self: self.service.fleet.running())
    @rule(data=st.data(), fails=st.sampled_from([False] * 19 + [True]))
    def work(self, data: st.DataObject, fails: bool) -> None:
        choices = [(w, hop) for w in self.service.fleet.workers.values() for hop in w.running.values()]
        worker, hop = data.draw(st.sampled_from(choices))
        advance(worker, hop, fails=fails)

    @precondition(lambda self: self.service.steps.running)
    @rule(data=st.data(), fails=st.sampled_from([False] * 9 + [True]))
    def end_step(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(list(self.service.steps.running)))
        self.service.end_step(name, "it failed" if fails else "")

    @precondition(lambda self: any(worker.reports for worker in self.service.fleet.workers.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        choices = [worker for worker in self.service.fleet.workers.values() if worker.reports]
        self.service.deliver(data.draw(st.sampled_from(choices)))

    @precondition(lambda self: self.service.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.service.run(self.service.chains.cancel, data.draw(st.sampled_from(self.service.submitted)))

    @precondition(lambda self: self.service.fleet.ready)
    @rule(data=st.data())
    def cut_off(self, data: st.DataObject) -> None:
        """A worker has died, and so far only its socket shows it."""
        data.draw(st.sampled_from(self.service.fleet.ready)).reachable = False

    @precondition(lambda self: any(not w.reachable and w.state == "ready" for w in self.service.fleet.workers.values()))
    @rule()
    def reap(self) -> None:
        for worker in self.service.fleet.workers.values():
            if not worker.reachable and worker.state == "ready":
                self.service.lose(worker)

    @precondition(lambda self: self.service.fleet.running())
    @rule(data=st.data())
    def engine_dies(self, data: st.DataObject) -> None:
        """Its worker says that the hops are lost, and ends a while later."""
        worker = data.draw(st.sampled_from([w for w in self.service.fleet.workers.values() if w.running]))
        for hop in worker.running:
            worker.reports.append(HopEnded(hop=hop, state="lost", at_ns=1, code="EngineLost", message="it died"))
        worker.running.clear()
        worker.reachable = False

    @rule(data=st.data(), health=st.sampled_from([STEADY, STEADY, SLOW, RECOVERS]))
    def wobble(self, data: st.DataObject, health: GroupHealth) -> None:
        """A group's tokens begin to come late, or do so no more."""
        data.draw(st.sampled_from(list(self.service.fleet.workers.values()))).health = health
        self.service.run(self.service.chains.runs.look_at_health)

    @precondition(lambda self: any(hop.step > 2 for hop in self.service.fleet.running()))
    @rule(data=st.data())
    def slow_down_under_a_hop(self, data: st.DataObject) -> None:
        workers = self.service.fleet.workers.values()
        writing = [worker for worker in workers if any(hop.step > 2 for hop in worker.running.values())]
        chosen = data.draw(st.sampled_from(writing))
        while chosen.reports:
            self.service.deliver(chosen)
        for run in self.service.chains.runs.planner._runs.values():
            run.started_ns -= 3_600_000_000_000  # all are behind series
        for worker in workers:
            worker.health = SLOW if worker is chosen else STEADY
        self.service.run(self.service.chains.runs.look_at_health)

    @precondition(lambda self: len(self.service.fleet.ready) < 2)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        dead = [worker for worker in self.service.fleet.workers.values() if worker.state == "dead"]
        self.service.bring_back(data.draw(st.sampled_from(dead)))

    @rule()
    def restart(self) -> None:
        self.service.kill()

    @invariant()
    def every_log_is_accounted_for(self) -> None:
        if not hasattr(self, "service"):
            return
        chains = self.service.chains
        held = sum(agent.stream is not None for record in chains.live() for agent in record.agents)
        assert self.service.slab.free_slots + held == SLOTS
        ends = [event.chain for event in self.service.events if event.kind == "ended"]
        assert len(ends) == len(set(ends)), "a chain ended twice"

    @invariant()
    def a_hop_on_the_grid_is_alone(self) -> None:
        for worker in self.service.fleet.workers.values() if hasattr(self, "service") else ():
            grids = [hop.spec.grid for hop in worker.running.values()]
            assert len(grids) < 2 or not any(grids)

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        try:
            self.check_the_end()
        finally:
            self.service.close()

    def check_the_end(self) -> None:
        service = self.service
        for worker in service.fleet.workers.values():
            if not worker.reachable and worker.state == "ready":
                service.lose(worker)
        service.settle()
        for worker in service.fleet.workers.values():
            if worker.state == "dead":
                service.bring_back(worker)
        service.settle()
        assert not service.chains.live(), "a chain hangs"
        assert service.chains.idle.is_set()
        assert service.slab.free_slots == SLOTS
        assert {len(worker.hops) for worker in service.fleet.workers.values()} == {0}
        for number in service.submitted:
            result = service.store.results[number]
            for index, agent in enumerate(result.agents):
                if agent.kind != "agent":
                    if result.state == "finished":
                        assert (agent.text, agent.output_tokens, agent.output_ids) == (f"a{index}", 2, [])
                    assert all(hop.state != "running" for hop in agent.hops)
                    continue
                if result.state == "finished":
                    assert agent.output_ids == [index * 10 + at for at in range(OUTPUT)]
                    # The hops of the attempt that finished: each goes on where the one before has ended.
                    at = max(at for at, hop in enumerate(agent.hops) if hop.tokens_before == 0)
                    assert sum(hop.tokens for hop in agent.hops[at:]) == OUTPUT
                    assert agent.hops[-1].state == "finished"
                assert all(hop.state != "running" for hop in agent.hops)
                if not service.restarted:
                    assert service.told(number).get(agent.name, []) == agent.output_ids


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40)

MODELS = {
    "models": {"large": {"model": "x"}},
    "calls": {"x": {"command": ["true"]}},
    "groups": [
        {"name": "a", "devices": ["cpu:0"]},
        {"name": "b", "devices": ["cpu:0"], "model": "large"},
        {"name": "c", "devices": ["cpu:0"], "model": "large"},
        {"name": "d", "devices": ["cpu:0"]},
    ],
}


class AnyOrderOfModels(AnyOrder):
    """The same with two models on two workers each."""

    @initialize(ends=st.sampled_from([3, 1000]), alike=st.booleans())
    def begin(self, ends: int, alike: bool) -> None:
        """Tokenizers differ, or are alike. Nothing is measured: what is predicted hangs on the clock, and so would the
        group that a hop runs on."""
        limits = msgspec.structs.replace(LIMITS, tokenizer="t")
        large = msgspec.structs.replace(limits, model="large model", tokenizer="t" if alike else "u")
        more = MODELS | {"restart": {"give_up_after": ends}}
        self.service = Service(None, limits, more, {"large": large}, "abcd")

    @precondition(lambda self: len({worker.model for worker in self.service.fleet.ready}) == 2)
    @rule(data=st.data(), mode=st.sampled_from(["auto", "serial", "ping-pong", "overlap"]))
    def submit(self, data: st.DataObject, mode: str) -> None:
        count = data.draw(st.integers(1, 4))
        reads = [data.draw(st.sets(st.integers(0, at - 1), max_size=2)) if at else set() for at in range(count)]
        steps = frozenset(data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1)))
        exactness = "fast" if mode == "overlap" else data.draw(st.sampled_from(["fast", "grid"]))
        start = data.draw(st.sampled_from(["first_token", "immediate"]))
        chain = chain_reading(reads, start=start, steps=steps)
        agents = [
            agent if agent.is_step or data.draw(st.booleans()) else msgspec.structs.replace(agent, model="large")
            for agent in chain.agents
        ]
        try:
            self.service.submit(msgspec.structs.replace(chain, agents=agents), mode, exactness=exactness)
        except PingpongError:
            queued = self.service.chains.counts().get("queued", 0)
            assert queued >= 4, "refused without a reason"

    @invariant()
    def a_hop_runs_on_its_model(self) -> None:
        for worker in self.service.fleet.workers.values() if hasattr(self, "service") else ():
            for hop in worker.running.values():
                assert hop.spec.match is not None
                assert (hop.spec.match.agent.model or "") == worker.model


TestAnyOrderOfModels = AnyOrderOfModels.TestCase
TestAnyOrderOfModels.settings = settings(max_examples=60, stateful_step_count=40)


PAIR = [set[int](), {0}]
TRIO = [set[int](), {0}, {1}]


def test_an_abort_that_crosses_the_end_of_its_hop_changes_nothing(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), "ping-pong")
    first, second = (service.fleet.workers[agent.worker] for agent in service.record(number).agents)
    (hop,) = first.running.values()
    for _ in range(5):
        advance(first, hop)
    while first.reports:
        service.deliver(first)
    advance(second, next(iter(second.running.values())))
    service.deliver(second)
    advance(first, hop)  # it ends, and its report is on its way
    service.run(service.chains.cancel, number)
    service.settle()
    assert service.result(number).state == "cancelled"
    assert service.slab.free_slots == SLOTS


def test_waiting_chains_start_in_order_as_logs_get_free(service: Service) -> None:
    numbers = [service.submit(chain_reading(TRIO), "serial") for _ in range(4)]
    states = [service.record(number).state_name for number in numbers]
    assert states == ["running", "running", "queued", "queued"]
    service.settle()
    started = [event.chain for event in service.events if event.kind == "started"]
    assert started == numbers


def test_a_higher_priority_starts_first(service: Service) -> None:
    first, second, third = (service.submit(chain_reading(TRIO), "serial", priority=p) for p in (0, 0, 0))
    urgent = service.submit(chain_reading(TRIO), "serial", priority=5)
    service.settle()
    started = [event.chain for event in service.events if event.kind == "started"]
    assert started == [first, second, urgent, third]


def test_chains_go_on_in_series_when_one_of_two_groups_is_left(service: Service) -> None:
    numbers = [service.submit(chain_reading(TRIO), "ping-pong") for _ in range(4)]
    lost = service.fleet.workers["b"]
    service.lose(lost)
    lost.state = "failed"
    service.run(service.chains.runs.group_failed, lost, "it died five times")
    service.settle()
    results = [service.result(number) for number in numbers]
    assert {result.state for result in results} == {"finished"}
    assert "one group is left" in results[-1].why


def test_a_hop_goes_on_from_what_it_has_written(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial")
    worker = service.fleet.workers[service.record(number).agents[0].worker]
    (hop,) = worker.running.values()
    for _ in range(4):
        advance(worker, hop)
    while worker.reports:
        service.deliver(worker)
    service.lose(worker)
    (resumed,) = service.fleet.running()
    assert resumed.spec.resume is not None
    assert resumed.spec.resume.tokens == 2
    assert (resumed.spec.output.slot, resumed.spec.output.generation) == (0, 1)
    service.settle()
    result = service.result(number)
    assert result.resumed
    assert [(entry.tokens, entry.worker) for entry in result.agents[0].resumed] == [(2, worker.name)]
    assert [event.kind for event in service.events if event.kind.startswith("agent_")] == [
        "agent_resumed",
        "agent_finished",
    ]


def test_what_engines_die_of_fails_in_the_end(service: Service) -> None:
    service.give_up_after(3)
    number = service.submit(chain_reading([set()]), "serial")
    for _ in range(2):
        worker = next(worker for worker in service.fleet.workers.values() if worker.running)
        service.lose(worker)
        service.bring_back(worker)
    result = service.result(number)
    assert result.state == "failed"
    assert "engines died under it 2 times" in result.error


def test_who_shared_an_engine_with_what_it_died_of_outlives_that(service: Service) -> None:
    service.give_up_after(5)
    numbers = [service.submit(chain_reading([set()]), "auto", group="a") for _ in range(3)]
    worker = service.fleet.workers["a"]
    for _ in range(3):
        assert len(worker.running) == 3
        service.lose(worker)
        service.bring_back(worker)
    (alone,) = worker.running.values()  # from now on one at a time, to see which it is
    guilty = alone.spec.hop.split("/")[0]
    service.lose(worker)
    service.bring_back(worker)
    service.settle()
    states = {number: service.result(number).state for number in numbers}
    assert states == {number: "failed" if number == guilty else "finished" for number in numbers}
    assert "when it ran alone" in service.result(guilty).error


def test_who_runs_alone_is_not_blamed_for_a_worker_that_was_stopped(service: Service) -> None:
    service.give_up_after(3)
    number = service.submit(chain_reading([set()]), "auto", group="a")
    worker = service.fleet.workers["a"]
    service.lose(worker)
    service.bring_back(worker)
    worker.order = EndOrder("ask", "it is drained", expected=True)
    service.lose(worker)
    worker.order = None
    service.bring_back(worker)
    service.settle()
    assert service.result(number).state == "finished"


def test_chains_are_kept_when_the_last_group_is_given_up(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), "serial")
    for worker in service.fleet.workers.values():
        service.lose(worker)
    for worker in service.fleet.workers.values():
        worker.state = "failed"
        service.run(service.chains.runs.group_failed, worker, "it died five times")
    service.kill()  # the daemon ends, and is started anew
    service.settle()
    assert service.result(number).state == "finished"


def test_who_is_held_within_a_turn_gets_its_own(service: Service) -> None:
    """A chain that no engine can hold any more ends in its turn, and lets one start that waits for logs."""
    too_long = service.submit(chain_reading([set()]), "auto", group="a")
    worker = service.fleet.workers["a"]
    others = [service.submit(chain_reading(TRIO), "auto", group="b") for _ in range(2)]
    service.lose(service.fleet.workers["b"])
    service.lose(worker)
    waiting = service.submit_later(chain_reading([set()]), group="a")
    record = service.record(too_long)
    record.job = msgspec.structs.replace(
        record.job, prepared=[PreparedAgent(segments=[Literals(ids=list(range(500)))])]
    )
    worker.limits = msgspec.structs.replace(LIMITS, kv_tokens=256)
    service.bring_back(worker)
    number = service.run(lambda: waiting)
    service.run(service.chains.start_waiting)
    service.settle()
    assert service.result(too_long).state == "failed"
    assert service.result(number).state == "finished"
    assert all(service.record(other).state_name == "running" for other in others)


def test_a_whole_answer_whose_worker_died_fails_nothing(service: Service) -> None:
    service.give_up_after(3)
    number = service.submit(chain_reading([set()]), "auto", group="a")
    worker = service.fleet.workers["a"]
    service.lose(worker)
    service.bring_back(worker)
    (hop,) = worker.running.values()
    hop.writer.close("length", ids=[0, 1, 2])
    service.lose(worker)
    service.bring_back(worker)
    (again,) = service.fleet.running()
    assert again.spec.resume is not None
    assert again.spec.resume.tokens == 3
    service.run(service.chains.cancel, number)


def test_what_no_engine_can_hold_any_more_fails_with_the_numbers(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "auto", group="a")
    worker = service.fleet.workers["a"]
    service.lose(worker)
    worker.limits = msgspec.structs.replace(LIMITS, kv_tokens=0)
    service.bring_back(worker)
    result = service.result(number)
    assert result.state == "failed"
    assert "needs up to 7 tokens" in result.error


def test_who_is_held_goes_by_priority(service: Service) -> None:
    worker = service.fleet.workers["a"]
    worker.limits = msgspec.structs.replace(LIMITS, max_num_seqs=1)
    service.run(service.chains.runs.worker_ready, worker)
    first, second, urgent = (
        service.submit(chain_reading([set()]), "auto", group="a", priority=priority) for priority in (0, 0, 9)
    )
    service.settle()
    ends = [event.chain for event in service.events if event.kind == "ended"]
    assert ends == [first, urgent, second]


def test_a_chain_on_a_named_group_waits_for_it_and_fails_with_it(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), "auto", group="a")
    worker = service.fleet.workers["a"]
    service.lose(worker)
    assert not service.fleet.running()
    service.bring_back(worker)
    assert worker.running
    service.lose(worker)
    worker.state = "failed"
    service.run(service.chains.runs.group_failed, worker, "no memory")
    result = service.result(number)
    assert result.state == "failed"
    assert "no memory" in result.error


def test_a_restart_goes_on_from_the_last_finished_agent(service: Service) -> None:
    number = service.submit(chain_reading(TRIO), "serial")
    for name in ("a0", "a1"):
        (hop,) = service.fleet.running()
        worker = next(worker for worker in service.fleet.workers.values() if worker.running)
        steps = 6 if name == "a0" else 4
        for _ in range(steps):
            advance(worker, hop)
        while worker.reports:
            service.deliver(worker)
    service.kill()
    (hop,) = service.fleet.running()
    assert hop.spec.hop.split("/")[1] == "1"
    assert hop.spec.resume is None
    service.settle()
    result = service.result(number)
    assert [agent.attempt for agent in result.agents] == [1, 2, 2]
    assert result.resumed
    assert [agent.output_ids for agent in result.agents] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


@pytest.mark.parametrize("mode", ["auto", "serial", "ping-pong", "overlap"])
def test_a_chain_of_which_only_the_end_was_not_kept_ends_after_a_restart(mode: str) -> None:
    service = Service(H200)  # so that what is left of it is predicted: nothing
    try:
        number = service.submit(chain_reading([set()]) if mode != "ping-pong" else chain_reading(PAIR), mode)
        agents = len(service.record(number).agents)
        while len(service.store.outcomes.get(number, {})) < agents:
            for worker in service.fleet.workers.values():
                for hop in list(worker.running.values()):
                    advance(worker, hop)
                while worker.reports and len(service.store.outcomes.get(number, {})) < agents:
                    service.deliver(worker)
        service.kill()
        service.settle()
        assert service.result(number).state == "finished"
    finally:
        service.close()


def test_an_agent_whose_upstream_is_lost_counts_for_nothing(service: Service) -> None:
    number = service.submit(chain_reading(TRIO), "ping-pong")
    service.settle()
    service.store.results.clear()
    del service.store.outcomes[number][0]
    service.kill()
    (hop,) = service.fleet.running()
    assert hop.spec.hop.split("/")[1] == "0"


def test_a_chain_for_another_model_is_kept_and_waits(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), "serial")
    job = service.store.jobs[number]
    service.store.jobs[number] = Job(
        **{name: getattr(job, name) for name in job.__struct_fields__} | {"model": "other"}
    )
    service.kill()
    result = service.result(number)
    assert result.state == "queued"
    assert "accepted for the model other" in result.why
    service.run(service.chains.cancel, number)
    assert service.result(number).state == "cancelled"


def test_the_same_key_names_the_same_chain(service: Service) -> None:
    request = Submit(request=1, version=PROTOCOL_VERSION, chain=chain_reading(PAIR), key="k")

    async def both() -> list[str]:
        return await asyncio.gather(service.chains.submit(request), service.chains.submit(request))

    first, second = service.run(both)
    assert first == second == service.run(service.chains.submit, request)
    assert len(service.store.jobs) == 1


def test_what_cannot_be_kept_is_not_accepted(service: Service) -> None:
    service.store.full = True
    with pytest.raises(StoreError, match="disk is full"):
        service.submit(chain_reading(PAIR))
    assert not service.chains.live()
    assert service.slab.free_slots == SLOTS


def test_who_samples_gets_a_seed(service: Service) -> None:
    chain = parse_chain(b'{"name": "c", "agents": [{"name": "a", "prompt": "x", "temperature": 1, "max_tokens": 4}]}')
    number = service.submit(chain, "serial")
    assert service.record(number).result().agents[0].seed is not None
    (hop,) = service.fleet.running()
    assert hop.spec.sampling.seed == service.store.jobs[number].chain.agents[0].seed


def test_a_chain_past_its_deadline_fails(service: Service) -> None:
    numbers = [service.submit(chain_reading(TRIO), "serial", deadline_s=1e-9) for _ in range(3)]
    service.run(service.chains.tick)
    service.settle()
    for number in numbers:
        assert "deadline" in service.result(number).error
    assert service.slab.free_slots == SLOTS


def test_who_asks_in_the_moment_of_the_end_is_answered(service: Service) -> None:
    numbers = [service.submit(chain_reading(TRIO), "serial") for _ in range(4)]
    assert service.result(numbers[-1]).state == "queued"

    async def cancel_and_ask() -> ChainResult:
        service.chains.cancel(numbers[-1])  # which ends it at once
        found: ChainResult = await service.chains.result(numbers[-1])
        return found

    assert service.run(cancel_and_ask).state == "cancelled"
    for number in numbers:
        service.run(service.chains.cancel, number)
    service.settle()


def test_a_live_chain_is_not_forgotten(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), "serial")
    with pytest.raises(UsageError, match="has not ended"):
        service.run(service.chains.forget, number)
    service.settle()
    service.run(service.chains.forget, number)
    with pytest.raises(ChainNotFound):
        service.result(number)


def test_a_submission_waits_for_a_worker_that_is_being_replaced(service: Service) -> None:
    for worker in service.fleet.workers.values():
        service.lose(worker)
    request = Submit(request=1, version=PROTOCOL_VERSION, chain=chain_reading(PAIR))

    async def submit() -> str:
        submitting = asyncio.create_task(service.chains.submit(request))
        while not service.chains._intake._served._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        worker = service.fleet.workers["b"]
        worker.state, worker.reachable = "ready", True
        service.chains.runs.worker_ready(worker)  # type: ignore[arg-type]
        return await submitting

    number = service.run(submit)
    service.run(service.chains.start_waiting)
    service.settle()
    assert service.result(number).state == "finished"


def test_a_submission_that_waits_is_refused_when_the_daemon_drains(service: Service) -> None:
    for worker in service.fleet.workers.values():
        service.lose(worker)
    request = Submit(request=1, version=PROTOCOL_VERSION, chain=chain_reading(PAIR))

    async def submit() -> None:
        submitting = asyncio.create_task(service.chains.submit(request))
        while not service.chains._intake._served._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        service.chains.drain()
        with pytest.raises(Overloaded, match="shutting down"):
            await submitting

    service.run(submit)


def test_nothing_is_accepted_while_draining(service: Service) -> None:
    service.chains.drain()
    with pytest.raises(Overloaded, match="shutting down"):
        service.submit(chain_reading(PAIR))


def test_a_report_of_an_append_reaches_the_result(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial")
    record = service.record(number)
    worker = service.fleet.workers[record.agents[0].worker]
    advance(worker, next(iter(worker.running.values())))
    service.deliver(worker)
    append = AppendRecord(at_ns=record.submitted_ns + 5_000_000, done_ns=0, tokens=7, sent=9)
    service.run(service.chains.runs.hop_message, worker, HopAppended(hop=record.agents[0].hop, append=append))
    (entry,) = record.result().agents[0].appends
    assert (entry.at_ms, entry.tokens, entry.sent, entry.done_ms) == (5.0, 7, 9, None)
