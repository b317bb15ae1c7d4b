"""What a chain's record keeps of each hop: it is what timelines are drawn from."""

from __future__ import annotations

import msgspec
import pytest

from chains_desk import FakeWorker, Service, advance, chain_reading
from pingpong_bus.messages import ChainResult, DeviceState, HopEnded, HopEntry, OutputRead
from pingpongd.hop_record import HopRecord, restored
from pingpongd.stored import AgentOutcome
from store_samples import outcome


def run_until(service: Service, tokens: int) -> FakeWorker:
    """Let the one hop that runs write some tokens; returns its worker."""
    worker = next(worker for worker in service.fleet.workers.values() if worker.running)
    (hop,) = worker.running.values()
    for _ in range(2 + tokens):
        advance(worker, hop)
    while worker.reports:
        service.deliver(worker)
    return worker


def hops(result: ChainResult, agent: int = 0) -> list[HopEntry]:
    return result.agents[agent].hops


def test_an_undisturbed_agent_has_one_hop_with_all_its_moments(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial")
    service.settle()
    result = service.result(number)
    (hop,) = hops(result)
    agent = result.agents[0]
    assert (hop.worker, hop.state, hop.why) == (agent.worker, "finished", "")
    assert (hop.tokens_before, hop.tokens) == (0, 3)
    assert (hop.prompt_tokens, hop.final_tokens, hop.cached_tokens) == (3, 3, 0)
    moments = (hop.opened_ms, hop.finalized_ms, hop.first_token_ms, hop.ended_ms)
    assert moments == (agent.opened_ms, agent.finalized_ms, agent.first_token_ms, agent.last_token_ms)
    assert result.started_ms is not None
    assert result.started_ms <= hop.started_ms
    assert result.submitted_at.endswith("+00:00")


def test_a_hop_that_runs_counts_what_it_has_written(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial")
    worker = run_until(service, 2)
    service.lose(worker)  # ids come with a loss; then the next hop runs
    _, running = hops(service.result(number))
    assert (running.state, running.tokens_before, running.tokens, running.ended_ms) == ("running", 2, 0, None)


def test_a_loss_ends_a_hop_and_the_next_one_begins_behind_it(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial")
    worker = run_until(service, 2)
    service.lose(worker)
    service.settle()
    first, second = hops(service.result(number))
    assert (first.worker, first.state, first.tokens_before, first.tokens) == (worker.name, "lost", 0, 2)
    assert first.why == f'worker "{worker.name}" is gone'
    assert (second.state, second.tokens_before, second.tokens) == ("finished", 2, 1)
    assert first.ended_ms is not None
    assert second.started_ms >= first.ended_ms > first.started_ms


def test_a_hop_that_its_worker_leaves_unasked_is_lost(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial")
    worker = run_until(service, 1)
    (hop,) = list(worker.running)
    del worker.running[hop]
    worker.reports.append(HopEnded(hop=hop, state="released", at_ns=9, message="it left"))
    service.settle()
    first, second = hops(service.result(number))
    assert (first.state, first.tokens, first.why) == ("lost", 1, "it left")
    assert (second.state, second.tokens_before, second.tokens) == ("finished", 1, 2)


def test_a_failure_says_why(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial")
    worker = run_until(service, 1)
    (hop,) = worker.running.values()
    advance(worker, hop, fails=True)
    service.settle()
    (entry,) = hops(service.result(number))
    assert (entry.state, entry.why, entry.tokens) == ("failed", "it broke", 1)


def test_a_cancelled_hop_is_aborted(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial")
    run_until(service, 1)
    service.run(service.chains.cancel, number)
    service.settle()
    (entry,) = hops(service.result(number))
    assert (entry.state, entry.tokens) == ("aborted", 1)


def test_devices_are_named_by_uuid_where_there_are_gpus(service: Service) -> None:
    service.fleet.workers["b"].gpus = [DeviceState(uuid="GPU-1")]
    number = service.submit(chain_reading([set(), {0}]), "ping-pong")
    service.settle()
    assert service.result(number).devices == {"a": ["cpu:0"], "b": ["GPU-1"]}


def test_a_result_says_where_outputs_stand_in_a_prompt(service: Service) -> None:
    number = service.submit(chain_reading([set(), {0}, {0, 1}]), "serial")
    service.settle()
    agents = service.result(number).agents
    assert [agent.reads for agent in agents] == [
        [],
        [OutputRead(agent="a0", at=3, tokens=3)],
        [OutputRead(agent="a0", at=3, tokens=3), OutputRead(agent="a1", at=6, tokens=3)],
    ]


def test_hops_and_devices_outlive_the_daemon(service: Service) -> None:
    number = service.submit(chain_reading([set(), {0}]), "serial")
    worker = run_until(service, 1)
    service.lose(worker)
    run_until(service, 3)
    service.kill()
    service.settle()
    result = service.result(number)
    assert [(hop.state, hop.tokens) for hop in hops(result)] == [("lost", 1), ("finished", 2)]
    assert set(result.devices) >= {hop.worker for agent in result.agents for hop in agent.hops}
    assert result.started_ms is not None


def test_a_second_end_does_not_count() -> None:
    hop = HopRecord("a", started_ns=1_000_000)
    hop.end("finished", 2_000_000, 5)
    hop.end("lost", 3_000_000, 7, "it died")
    assert hop.entry(0, 9) == HopEntry(worker="a", started_ms=1.0, ended_ms=2.0, state="finished", tokens=5)


def test_an_agent_that_an_older_version_has_kept_has_no_hops() -> None:
    fields = msgspec.to_builtins(outcome())
    del fields["hops"], fields["devices"]
    kept = msgspec.convert(fields, AgentOutcome)
    assert (kept.hops, kept.devices) == ([], {})


@pytest.mark.parametrize("zero", [0, 7_000_000])
def test_an_entry_comes_back_from_the_store(zero: int) -> None:
    entry = HopEntry(
        worker="a",
        started_ms=1.5,
        opened_ms=2.25,
        finalized_ms=None,
        ended_ms=3.125,
        state="lost",
        tokens_before=2,
        tokens=4,
        why="it died",
        prompt_tokens=9,
        final_tokens=1,
        cached_tokens=8,
    )
    (record,) = restored([entry], zero)
    assert record.entry(zero, 100) == entry
