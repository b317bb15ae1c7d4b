"""Steps of chains over workers and a store that a test plays: what they are given, keep and tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from chains_desk import LIMITS, Service, advance, chain_reading
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import StoreError
from pingpong_bus.messages import HopText, StreamRef
from pingpong_bus.slab import LogState
from pingpong_bus.token_log import TokenLogReader
from pingpongd.chain_steps import StepTools
from pingpongd.stored import AgentOutcome

TRIO = [set[int](), {0}, {1}]
"""An agent, a call that reads it, and an agent that reads that."""


@pytest.fixture
def service() -> Iterator[Service]:
    limits = msgspec.structs.replace(LIMITS, tokenizer="t")
    service = Service(None, limits, {"calls": {"x": {"command": ["true"]}}})
    yield service
    service.close()


def trio() -> Chain:
    return chain_reading(TRIO, steps=frozenset({1}))


def write(service: Service, index: int, text: str = "") -> None:
    """Let an agent write to its end, and say what its tokens mean."""
    for worker in service.fleet.workers.values():
        for number, hop in list(worker.running.items()):
            while number.split("/")[1] == str(index) and number in worker.running:
                if hop.step == 3 and text:
                    worker.reports.append(HopText(hop=number, upto=1, text=text))
                advance(worker, hop)
        while worker.reports:
            service.deliver(worker)


def test_a_step_gets_the_text_of_what_it_reads(service: Service) -> None:
    agents: list[dict[str, Any]] = [
        {"name": "a", "prompt": "p", "max_tokens": 4, "strip": "think"},
        {"name": "s", "input": "{{input.q}}: {{a}}{{a}}", "call": "x", "max_chars": 16},
    ]
    chain = parse_chain(json.dumps({"name": "c", "inputs": {"q": "{{x}}"}, "agents": agents}).encode())
    number = service.submit(chain, "serial")
    write(service, 0, "<think>no</think> yes")
    assert service.steps.inputs == {f"{number}/s": "{{x}}: yesyes"}
    assert service.record(number).agents[1].waits_for == ""
    service.settle()
    assert service.result(number).agents[1].text == "/s"


def test_what_a_step_waits_for_is_told_as_it_changes(service: Service) -> None:
    number = service.submit(trio(), "serial")
    write(service, 0)
    for why in ("its turn", "a call that is gone"):
        service.steps.waits[f"{number}/a1"](why)
        assert service.record(number).summary(0).why.endswith(f"waits for {why}")
    service.end_step(f"{number}/a1")
    assert "gone" not in service.record(number).summary(0).why


def test_its_log_is_whole_when_it_is_seen_at_all(service: Service) -> None:
    number = service.submit(trio(), "ping-pong")
    write(service, 0)
    stream = service.record(number).agents[1].stream
    assert stream is not None
    assert TokenLogReader(service.slab, stream).peek() == (0, LogState.OPEN)
    service.end_step(f"{number}/a1")
    view = TokenLogReader(service.slab, stream).read()
    assert (view.ids, view.state, view.finish_reason) == (list(map(ord, "a1")), LogState.CLOSED, "stop")


def test_a_call_is_on_disk_before_anyone_reads_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Future[None]] = []

    def keep(chain: str, index: int, outcome: AgentOutcome) -> Future[None]:
        kept.append(Future())
        return kept[-1]

    number = service.submit(trio(), "ping-pong")
    write(service, 0)
    stream = service.record(number).agents[1].stream
    assert stream is not None
    monkeypatch.setattr(service.store, "agent_finished", keep)
    service.end_step(f"{number}/a1")
    assert TokenLogReader(service.slab, stream).peek() == (0, LogState.OPEN)
    service.run(kept[0].set_result, None)
    assert TokenLogReader(service.slab, stream).peek() == (2, LogState.CLOSED)


def test_what_a_call_takes_is_on_disk_before_it_begins(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Future[None]] = []

    def keep(chain: str, index: int, outcome: AgentOutcome) -> Future[None]:
        kept.append(Future())
        return kept[-1]

    monkeypatch.setattr(service.store, "agent_finished", keep)
    number = service.submit(trio(), "serial")
    write(service, 0)
    assert not service.steps.running
    service.run(kept[0].set_result, None)
    assert list(service.steps.running) == [f"{number}/a1"]


def test_a_disk_that_takes_nothing_holds_no_chain_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(chain: str, index: int, outcome: AgentOutcome) -> Future[None]:
        found: Future[None] = Future()
        found.set_exception(StoreError("the disk is full."))
        return found

    monkeypatch.setattr(service.store, "agent_finished", keep)
    number = service.submit(trio(), "ping-pong")
    service.settle()
    assert service.result(number).state == "finished"


def test_a_finished_step_is_not_done_again_after_a_restart(service: Service) -> None:
    number = service.submit(trio(), "serial")
    write(service, 0)
    service.end_step(f"{number}/a1")
    assert service.store.outcomes[number][1].output_ids == []  # they are its text, once more
    service.kill()
    assert service.record(number).agents[1].output_ids == list(map(ord, "a1"))
    assert not service.steps.running
    service.settle()
    result = service.result(number)
    assert (result.state, result.agents[1].text, result.agents[1].output_tokens) == ("finished", "a1", 2)
    assert not service.steps.inputs


def test_a_call_under_way_at_the_daemons_end_is_made_again_and_this_is_said(service: Service) -> None:
    number = service.submit(trio(), "serial")
    write(service, 0)
    assert service.steps.running
    service.kill()
    assert list(service.steps.running) == [f"{number}/a1"]
    (entry,) = service.result(number).agents[1].resumed
    assert "may have been running" in entry.why
    service.settle()
    assert service.result(number).state == "finished"


def test_an_extract_step_under_way_is_done_again_without_a_word(service: Service) -> None:
    number = service.submit(chain_reading([set(), set(), {0, 1}], steps=frozenset({2})), "serial")
    write(service, 0)
    write(service, 1)
    service.kill()
    service.settle()
    assert service.result(number).agents[2].resumed == []


def test_a_failure_names_the_step(service: Service) -> None:
    number = service.submit(trio(), "ping-pong")
    write(service, 0)
    service.end_step(f"{number}/a1", "it broke")
    service.settle()
    result = service.result(number)
    assert (result.state, result.error) == ("failed", 'step "a1": it broke')
    assert [agent.state for agent in result.agents] == ["finished", "failed", "cancelled"]
    assert [hop.state for hop in result.agents[1].hops] == ["failed"]


def test_a_fault_of_ours_costs_this_chain_alone(service: Service) -> None:
    number = service.submit(trio(), "serial")
    write(service, 0)
    service.run(service.steps.running[f"{number}/a1"].set_exception, KeyError("oops"))
    assert "a fault in the daemon" in service.result(number).error
    other = service.submit(trio(), "serial")
    service.settle()
    assert service.result(other).state == "finished"


def test_an_output_that_is_too_long_for_a_log_fails_the_chain(service: Service) -> None:
    number = service.submit(trio(), "serial")
    write(service, 0)
    service.run(service.steps.running[f"{number}/a1"].set_result, "x" * 17)
    assert "cannot be passed on" in service.result(number).error


def test_half_a_surrogate_pair_is_replaced(service: Service) -> None:
    number = service.submit(trio(), "serial")
    write(service, 0)
    service.run(service.steps.running[f"{number}/a1"].set_result, "\ud83d\ude00\ud800")
    assert service.record(number).agents[1].text == ["😀�"]


def test_a_call_that_is_not_allowed_any_more_keeps_its_chain_waiting(service: Service) -> None:
    number = service.submit(trio(), "serial")
    service.more = {}
    service.kill()
    assert 'no call "x"' in service.result(number).why
    assert service.result(number).state == "queued"


def test_no_step_begins_while_the_daemon_ends(service: Service) -> None:
    service.submit(trio(), "serial")
    service.run(service.chains.end_steps)
    write(service, 0)
    assert not service.steps.running
    service.kill()
    service.settle()
    assert not service.chains.live()


def test_half_a_surrogate_pair_in_a_chain_is_replaced(service: Service) -> None:
    agents: list[dict[str, Any]] = [
        {"name": "a", "prompt": "p", "max_tokens": 4},
        {"name": "s", "input": "x", "call": "x", "max_chars": 16},
    ]
    chain = parse_chain(json.dumps({"name": "c", "agents": agents}).encode())
    half = msgspec.structs.replace(chain.agents[1], input="\ud800")
    number = service.submit(msgspec.structs.replace(chain, agents=[chain.agents[0], half]), "ping-pong")
    assert service.steps.inputs == {f"{number}/s": "\ufffd"}
    service.settle()


class Bell:
    """Keeps what a log looked like when it was rung for."""

    endpoint = "ipc://steps"

    def __init__(self, service: Service) -> None:
        self.service = service
        self.heard: list[tuple[list[int], LogState, LogState]] = []

    def ring(self, stream: StreamRef, first_index: int, ids: list[int], state: LogState) -> None:
        assert first_index == 0
        view = TokenLogReader(self.service.slab, stream).read()
        assert view.ids == ids
        self.heard.append((ids, state, view.state))


def test_readers_know_the_bell_and_it_rings_after_the_commit(service: Service) -> None:
    bell = Bell(service)
    service.chains.runs.steps._tools = StepTools(service.steps, bell)  # type: ignore[arg-type]
    number = service.submit(trio(), "ping-pong")
    write(service, 0)
    (reader,) = service.fleet.running()
    assert reader.spec.hop.startswith(f"{number}/2/")
    assert reader.spec.joined is not None
    assert {stream.bell for stream in reader.spec.joined.outputs.values()} == {Bell.endpoint}
    assert reader.spec.joined.sources[1].characters
    assert bell.heard == []
    service.end_step(f"{number}/a1")
    assert bell.heard == [(list(map(ord, "a1")), LogState.CLOSED, LogState.CLOSED)]


# ---------------------------------------------------------------------------------------------------- holding up others


def hold(service: Service, exactness: str | None) -> tuple[str, str]:
    """A chain whose reader has begun on group b and waits for a call; its number, and the call's name."""
    number = service.submit(trio(), "ping-pong", exactness=exactness)
    write(service, 0)
    (hop,) = service.fleet.running()
    assert hop.spec.hop == f"{number}/2/0"
    return number, f"{number}/a1"


@pytest.mark.parametrize(("first", "second"), [("grid", "fast"), ("fast", "grid")])
def test_who_waits_for_a_call_gives_its_group_to_others(service: Service, first: str, second: str) -> None:
    held, call = hold(service, first)
    group = service.record(held).agents[2].worker
    quick = service.submit(chain_reading([set()]), group=group, exactness=second)
    while (worker := service.fleet.workers[group]).reports:
        service.deliver(worker)
    assert [hop.spec.hop for hop in worker.running.values()] == [f"{quick}/0/0"]
    why = next(line.why for line in service.run(service.chains.summaries, 9) if line.id == held)
    assert why == f'agent "a2" waits for the step "a1": it gave way to others on the group "{group}"'
    write(service, 0)
    assert service.result(quick).state == "finished"
    assert not worker.running, "it waits for its step now"
    service.end_step(call)
    assert [hop.spec.hop for hop in worker.running.values()] == [f"{held}/2/1"]
    service.settle()
    found = service.result(held)
    assert (found.state, len(found.agents[2].hops)) == ("finished", 2)
    assert found.agents[2].hops[0].why == "it gave way to others: a step that it reads was still running"


def test_nobody_gives_way_where_all_have_room_or_the_call_has_ended(service: Service) -> None:
    held, call = hold(service, "fast")
    group = service.record(held).agents[2].worker
    service.submit(chain_reading([set()]), group=group)
    assert len(service.fleet.workers[group].running) == 2
    service.end_step(call)
    grid = service.submit(chain_reading([set()]), group=group, exactness="grid")
    assert service.record(grid).agents[0].waits_for == f'the group "{group}" to itself: exactness grid'
    service.settle()
    assert [len(agent.hops) for agent in service.result(held).agents] == [1, 1, 1]


def test_two_that_wait_for_calls_do_not_give_way_to_each_other(service: Service) -> None:
    agents: list[dict[str, Any]] = [
        {"name": "a1", "input": "x", "call": "x", "max_chars": 16},
        {"name": "a2", "prompt": "{{a1}}", "max_tokens": 4},
    ]
    chain = parse_chain(json.dumps({"name": "c", "agents": agents}).encode())
    numbers = [service.submit(chain, "ping-pong", exactness="grid") for _ in range(3)]
    assert {hop.spec.hop for hop in service.fleet.running()} == {f"{number}/1/0" for number in numbers[:2]}
    for number in numbers[2:]:
        first = numbers[numbers.index(number) - 2]
        worker = service.record(number).agents[1].worker
        alone = f'the group "{worker}", which agent "a2" of chain {first} has to itself: exactness grid'
        assert service.record(number).agents[1].waits_for == alone
    service.end_step(f"{numbers[2]}/a1")
    group = service.record(numbers[2]).agents[1].worker
    while (worker := service.fleet.workers[group]).reports:
        service.deliver(worker)
    assert list(worker.running) == [f"{numbers[2]}/1/0"], "its call has ended, so it comes first"
    service.settle()
    assert {service.result(number).state for number in numbers} == {"finished"}
