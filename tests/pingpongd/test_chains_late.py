"""What becomes of chains when a group's tokens come late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from chains_desk import FakeWorker, Service, advance
from engine_figures import H200
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import AppendRecord, ChainResult, GroupHealth, HopAppended
from pingpongd import mover, replanning
from pingpongd.config import parse_config
from pingpongd.hop_room import HopRoom

HEALTHY = GroupHealth(episodes=1)
LATE = GroupHealth(state="degraded", cause="cpu_starvation", slowdown=30.0, episodes=1)
RECOVERS = GroupHealth(state="recovering", cause="cpu_starvation", episodes=1)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service(H200)
    yield service
    service.close()


def chain(count: int = 2, tokens: int = 16) -> Chain:
    agents = [
        Agent(name=f"a{at}", prompt=f"read {{{{a{at - 1}}}}}" if at else "begin", max_tokens=tokens)
        for at in range(count)
    ]
    return Chain(name="c", agents=agents)


def set_health(service: Service, name: str, health: GroupHealth) -> None:
    service.fleet.workers[name].health = health
    service.run(service.chains.runs.look_at_health)


def deliver_all(service: Service) -> None:
    for worker in service.fleet.workers.values():
        while worker.reports:
            service.deliver(worker)


def write(service: Service, worker: FakeWorker, steps: int) -> None:
    """Let the worker's only hop do so many steps, and have them reported."""
    (hop,) = worker.running.values()
    for _ in range(steps):
        advance(worker, hop)
    while worker.reports:
        service.deliver(worker)


def running(service: Service, name: str) -> list[str]:
    return [hop.split("/", 1)[1] for hop in service.fleet.workers[name].running]


def finish(service: Service, number: str) -> ChainResult:
    service.settle()
    result = service.result(number)
    assert result.state == "finished", result.error
    return result


def test_new_chains_go_elsewhere_until_the_group_has_recovered(service: Service) -> None:
    set_health(service, "a", LATE)
    first = service.submit(chain(1), "serial")
    assert running(service, "b") == ["0/0"]
    set_health(service, "a", RECOVERS)
    second = service.submit(chain(1), "serial")
    assert len(running(service, "b")) == 2
    set_health(service, "a", HEALTHY)
    third = service.submit(chain(1), "serial")
    assert running(service, "a") == ["0/0"]
    assert "without a: its tokens take 30.0 times as long now (cpu starvation)" in finish(service, first).why
    assert "without a: it recovers (cpu starvation)" in finish(service, second).why
    assert finish(service, third).why == "asked for"


def test_an_agent_of_a_plan_goes_elsewhere_when_its_turn_comes(service: Service) -> None:
    number = service.submit(chain(3), "auto")
    record = service.record(number)
    assert record.plan is not None
    record.plan = type(record.plan)("ping-pong", ("a", "b", "a"), "as a test has it")
    for agent, group in zip(record.agents, record.plan.groups, strict=True):
        agent.worker = group
    first, other = ("a", "b") if running(service, "a") else ("b", "a")
    record.agents[1].worker = other
    set_health(service, other, LATE)
    write(service, service.fleet.workers[first], 3)
    if record.state.placement != "serial":
        deliver_all(service)
    assert running(service, other) == []
    result = finish(service, number)
    assert {agent.worker for agent in result.agents} == {first}
    assert [hop.state for agent in result.agents for hop in agent.hops] == ["finished"] * 3
    assert not result.resumed


def behind(service: Service, number: str) -> None:
    """Its chain has begun so long ago that series would be through."""
    run = service.chains.runs.planner._runs[number]
    run.started_ns -= 3_600_000_000_000


@pytest.mark.parametrize("mode", ["auto", "serial"])
def test_a_hop_that_is_behind_series_is_moved(service: Service, mode: str) -> None:
    number = service.submit(chain(1), mode)
    (group,) = [name for name in "ab" if running(service, name)]
    other = "b" if group == "a" else "a"
    write(service, service.fleet.workers[group], 4)
    behind(service, number)
    set_health(service, group, LATE)
    assert service.fleet.released == [f"{number}/0/0"]
    ledgers = service.chains.runs.room._ledgers
    assert ledgers[other].held == {f"{number}/0/1": ledgers[group].held[f"{number}/0/0"]}
    deliver_all(service)
    assert ledgers[group].held == {}
    assert running(service, other) == ["0/1"]
    (hop,) = service.fleet.workers[other].running.values()
    assert hop.spec.resume is not None
    assert hop.spec.resume.tokens == 2
    result = finish(service, number)
    assert ledgers[other].held == {}
    (agent,) = result.agents
    assert agent.output_ids == [0, 1, 2]
    assert service.told(number)["a0"] == [0, 1, 2]
    assert [(hop.worker, hop.state, hop.tokens) for hop in agent.hops] == [
        (group, "moved", 2),
        (other, "finished", 1),
    ]
    assert result.resumed
    (entry,) = agent.resumed
    assert (entry.worker, entry.tokens) == (group, 2)
    assert entry.why == f"moved to {other}: of {group}, its tokens take 30.0 times as long now (cpu starvation)"
    assert service.chains.runs.planner.drifted == set()


def test_a_hop_that_is_not_behind_series_stays(service: Service) -> None:
    service.submit(chain(1, tokens=3), "serial")
    (group,) = [name for name in "ab" if running(service, name)]
    write(service, service.fleet.workers[group], 3)
    set_health(service, group, GroupHealth(state="degraded", slowdown=1.01))
    assert service.fleet.released == []


def test_a_hop_is_moved_as_soon_as_it_writes_on_a_group_that_is_late(service: Service) -> None:
    number = service.submit(chain(1), "serial")
    (group,) = [name for name in "ab" if running(service, name)]
    behind(service, number)
    set_health(service, group, LATE)
    assert service.fleet.released == []
    write(service, service.fleet.workers[group], 3)
    assert service.fleet.released == [f"{number}/0/0"]


def test_an_agent_that_only_reads_begins_anew_elsewhere(service: Service) -> None:
    number = service.submit(chain(2), "auto")
    record = service.record(number)
    (first,) = [name for name in "ab" if running(service, name)]
    other = "b" if first == "a" else "a"
    record.agents[1].worker = other
    record.state = msgspec.structs.replace(record.state, placement="ping-pong")
    write(service, service.fleet.workers[first], 3)
    write(service, service.fleet.workers[other], 1)
    set_health(service, other, LATE)
    assert service.fleet.released == [f"{number}/1/0"]
    deliver_all(service)
    assert running(service, other) == []
    result = finish(service, number)
    assert [agent.output_ids for agent in result.agents] == [[0, 1, 2], [10, 11, 12]]
    reader = result.agents[1]
    assert [(hop.worker, hop.state, hop.tokens) for hop in reader.hops] == [
        (other, "moved", 0),
        (first, "finished", 3),
    ]
    assert not result.resumed, "there was nothing to go on from"


def test_a_reader_of_a_chain_too_large_to_predict_stays(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    number = service.submit(chain(1), "serial")
    (group,) = [name for name in "ab" if running(service, name)]
    write(service, service.fleet.workers[group], 1)
    monkeypatch.setattr(replanning, "LARGEST", 0)
    record = service.record(number)
    assert record.plan is not None
    record.plan = msgspec.structs.replace(record.plan, predicted=None, predictions=())  # as of any that is too large
    record.shape = msgspec.structs.replace(record.shape, shared=())
    set_health(service, group, LATE)
    assert service.fleet.released == []
    assert finish(service, number).agents[0].worker == group


def test_a_group_that_is_late_takes_what_others_have_no_room_for(service: Service) -> None:
    held = service.chains.runs.room.take_between("all", 10_000, grid=False)
    assert held is not None
    other = "b" if held.name == "a" else "a"
    set_health(service, other, LATE)
    number = service.submit(chain(1), "auto")
    assert running(service, other) == ["0/0"]
    service.chains.runs.room.give_back(held.name, "all")
    assert f"{other}: its tokens take" in finish(service, number).why


def test_a_hop_that_ends_before_it_is_left_has_ended(service: Service) -> None:
    number = service.submit(chain(1), "serial")
    (group,) = [name for name in "ab" if running(service, name)]
    worker, other = service.fleet.workers[group], "b" if group == "a" else "a"
    write(service, worker, 4)
    (hop,) = list(worker.running.values())
    advance(worker, hop)
    advance(worker, hop)  # it has ended, and says so before it is asked
    behind(service, number)
    set_health(service, group, LATE)
    assert service.fleet.released == [f"{number}/0/0"]
    result = finish(service, number)
    assert not result.resumed
    assert service.chains.runs.room._ledgers[other].held == {}
    assert [hop.state for hop in result.agents[0].hops] == ["finished"]


def test_room_is_given_back_where_the_chain_is_cancelled_meanwhile(service: Service) -> None:
    number = service.submit(chain(1), "serial")
    (group,) = [name for name in "ab" if running(service, name)]
    write(service, service.fleet.workers[group], 4)
    behind(service, number)
    set_health(service, group, LATE)
    service.run(service.chains.cancel, number)
    deliver_all(service)
    result = service.result(number)
    assert result.state == "cancelled"
    assert [hop.state for hop in result.agents[0].hops] == ["aborted"], "it went nowhere"
    assert all(not ledger.held for ledger in service.chains.runs.room._ledgers.values())
    assert service.slab.free_slots == service.slab.slots


def test_room_is_given_back_where_the_worker_dies_meanwhile(service: Service) -> None:
    number = service.submit(chain(1), "serial")
    (group,) = [name for name in "ab" if running(service, name)]
    worker = service.fleet.workers[group]
    write(service, worker, 4)
    behind(service, number)
    set_health(service, group, LATE)
    assert worker.kv_held_tokens > 0
    service.lose(worker)
    assert worker.kv_held_tokens == 0
    assert finish(service, number).agents[0].output_ids == [0, 1, 2]
    assert all(not ledger.held for ledger in service.chains.runs.room._ledgers.values())


def test_hops_are_looked_at_for_a_while_and_the_rest_next_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [service.submit(chain(1), "serial", group="a") for _ in range(3)]
    worker = service.fleet.workers["a"]
    for number, hop in zip(numbers, list(worker.running.values()), strict=True):
        service.record(number).job = msgspec.structs.replace(
            service.record(number).job, options=msgspec.structs.replace(service.record(number).options, group=None)
        )
        for _ in range(3):
            advance(worker, hop)
        behind(service, number)
    deliver_all(service)
    monkeypatch.setattr(mover, "TURN_S", 0.0)
    for looks in range(1, 4):
        set_health(service, "a", LATE)
        assert len(set(service.fleet.released)) == len(service.fleet.released) == looks
    assert service.chains.runs.mover.moves(service.chains.runs._hops) == [], "all were asked"


def test_no_hop_goes_where_it_would_be_slowed_by_its_own_reader(service: Service) -> None:
    number = service.submit(chain(2), "auto")
    record = service.record(number)
    (first,) = [name for name in "ab" if running(service, name)]
    other = "b" if first == "a" else "a"
    limits = service.fleet.workers[other].limits
    service.fleet.workers[other].limits = msgspec.structs.replace(limits, overlap=False)
    record.agents[1].worker = other
    record.state = msgspec.structs.replace(record.state, placement="ping-pong")
    write(service, service.fleet.workers[first], 3)
    assert running(service, other) == ["1/0"]
    behind(service, number)
    set_health(service, first, LATE)
    assert service.fleet.released == []
    service.fleet.workers[other].limits = limits
    set_health(service, first, LATE)
    assert service.fleet.released == [f"{number}/0/0"]


def test_what_was_read_on_another_group_is_not_counted(service: Service) -> None:
    number = service.submit(chain(2), "auto")
    record = service.record(number)
    (first,) = [name for name in "ab" if running(service, name)]
    worker = service.fleet.workers[first]
    begun = record.agents[0].entries[-1].started_ns
    (hop,) = worker.running
    worker.reports.append(HopAppended(hop=hop, append=AppendRecord(at_ns=begun + 1, done_ns=0, tokens=64, sent=64)))
    deliver_all(service)
    assert record.agents[0].read == 64
    service.lose(worker)
    assert record.agents[0].read == 0


@pytest.mark.parametrize("options", [{"mode": "serial", "group": "a"}, {"mode": "ping-pong"}])
def test_what_was_asked_for_by_name_is_honoured(service: Service, options: dict[str, str]) -> None:
    number = service.submit(chain(2), **options)
    (group,) = [name for name in "ab" if running(service, name)]
    write(service, service.fleet.workers[group], 4)
    behind(service, number)
    set_health(service, "a", LATE)
    assert service.fleet.released == []
    result = finish(service, number)
    assert {agent.worker for agent in result.agents} == ({"a"} if "group" in options else {"a", "b"})


@pytest.mark.parametrize("jitter", [{"move": False}, {"route": False}, {"enabled": False}])
def test_what_is_switched_off_is_not_done(service: Service, jitter: dict[str, bool]) -> None:
    groups = [{"name": name, "devices": ["cpu:0"]} for name in "ab"]
    service.chains.runs.configure(parse_config({"engine": "simulated", "groups": groups, "jitter": jitter}))
    number = service.submit(chain(1), "serial")
    (group,) = [name for name in "ab" if running(service, name)]
    write(service, service.fleet.workers[group], 4)
    behind(service, number)
    set_health(service, group, LATE)
    assert service.fleet.released == []
    room: HopRoom = service.chains.runs.room
    assert room.is_avoided(group) is ("move" in jitter)
    assert any(view.degraded for view in room.groups()) is ("move" in jitter)


def test_an_engine_that_is_slow_now_is_not_measured(service: Service) -> None:
    service.chains.runs.planner.drifted.add("a")
    service.fleet.workers["a"].health = LATE
    service.run(service.chains.tick)
    assert service.fleet.calibrated == []
    service.fleet.workers["a"].health = HEALTHY

    async def tick_and_wait() -> None:
        service.chains.tick()
        await asyncio.sleep(0)

    service.run(tick_and_wait)
    assert service.fleet.calibrated == ["a"]
