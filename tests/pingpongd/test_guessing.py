"""Guessed tokens on their way through the daemon: what hops are told, what results and predictions have of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from chains_desk import LIMITS, FakeStore, Service, advance, chain_reading
from engine_figures import H200
from pingpong_bus.errors import ChainError, UsageError
from pingpong_bus.messages import AgentResult, ChainResult, DraftCounts, HopSpec
from pingpongd.config import StoreConfig, parse_config
from pingpongd.guessing import Guessing
from pingpongd.store import Store
from pingpongd.stored import EndedChain
from store_samples import job

LINE = chain_reading([set(), {0}])
ABLE = msgspec.structs.replace(LIMITS, speculation="chain")
ENABLED = {"speculation": {"enabled": True, "runs": 2, "memory_mib": 1}}
WROTE = [[0, 1, 2], [10, 11, 12]]
"""What the agents of the fake workers write."""


class ListingStore(FakeStore):
    """Says which chains have ended."""

    async def list(self, limit: int) -> list[EndedChain]:
        return [
            EndedChain(
                id=chain,
                name=result.name,
                state=result.state,
                placement=result.placement,
                agents=len(result.agents),
                finished_agents=len(result.agents),
                submitted_at=0.0,
                ended_at=1.0,
                e2e_ms=result.e2e_ms,
            )
            for chain, result in self.results.items()
        ][-limit:]


@pytest.fixture
def service() -> Iterator[Service]:
    """Chains on two groups whose engines guess."""
    found = Service(H200, ABLE, ENABLED)
    yield found
    found.close()


def specs(service: Service) -> dict[int, HopSpec]:
    """Let all run to their ends; what hops were told, by agent."""
    told: dict[int, HopSpec] = {}
    while hops := [(worker, hop) for worker in service.fleet.workers.values() for hop in [*worker.running.values()]]:
        for worker, hop in hops:
            told[int(hop.spec.hop.split("/")[1])] = hop.spec
            advance(worker, hop)
            while worker.reports:
                service.deliver(worker)
    return told


def test_a_known_chain_is_told_what_it_wrote_before(service: Service) -> None:
    service.submit(LINE)
    first = specs(service)
    assert [(spec.speculate, spec.drafts) for spec in first.values()] == [(True, []), (True, [])]
    service.submit(LINE)
    again = specs(service)
    assert [spec.drafts for _, spec in sorted(again.items())] == [[WROTE[0]], [WROTE[1]]]
    service.submit(msgspec.structs.replace(LINE, name="another"))
    assert all(spec.speculate and not spec.drafts for spec in specs(service).values())


def test_results_say_how_it_went_and_the_store_keeps_it(service: Service) -> None:
    number = service.submit(LINE)
    service.settle()
    counts = DraftCounts(steps=1, drafted=4, accepted=2)
    assert [agent.drafts for agent in service.result(number).agents] == [counts, counts]
    assert service.store.results[number].agents[0].drafts == counts


def test_an_agent_that_went_on_elsewhere_has_the_counts_of_all_its_hops(service: Service) -> None:
    number = service.submit(chain_reading([set()]), "serial", group="a")
    (hop,) = service.fleet.running()
    for _ in range(3):
        advance(service.fleet.workers["a"], hop)
    record = service.record(number)
    record.agents[0].add_counts(DraftCounts(steps=2, drafted=1, accepted=1), None)
    service.settle()
    assert service.result(number).agents[0].drafts == DraftCounts(steps=3, drafted=5, accepted=3)


def test_predictions_of_a_known_chain_count_with_what_a_step_gave(service: Service) -> None:
    before = service.result(service.submit(LINE, "serial")).predictions[0]
    service.settle()
    after = service.result(service.submit(LINE, "serial")).predictions[0]
    assert after.decode_ms < 0.7 * before.decode_ms


def test_a_chain_is_compared_with_what_its_guesses_would_have_had_it_predicted(service: Service) -> None:
    found = []
    for speculate in (False, True):
        with structlog.testing.capture_logs() as logs:
            service.submit(LINE, "serial", group="a", speculate=speculate, isolate=True)
            service.settle()
        found += [entry["predicted_ms"] for entry in logs if entry["event"] == "prediction"]
    usual, guessed = found
    assert guessed < 0.7 * usual, "nobody knew before that a step would give three tokens"


def test_no_guesses_where_nobody_wants_them_or_the_engine_cannot(service: Service) -> None:
    service.submit(LINE, speculate=False)
    assert not any(spec.speculate for spec in specs(service).values())
    service.submit(LINE, "serial", exactness="grid")
    assert not any(spec.speculate or spec.drafts for spec in specs(service).values())
    for worker in service.fleet.workers.values():
        worker.limits = LIMITS
    service.submit(LINE)
    assert not any(spec.speculate for spec in specs(service).values())
    with pytest.raises(UsageError, match="does not guess"):
        service.submit(LINE, speculate=True)


def test_on_a_grid_it_is_refused_where_it_is_asked_for(service: Service) -> None:
    with pytest.raises(UsageError, match='exactness "grid" cannot be kept'):
        service.submit(LINE, "serial", exactness="grid", speculate=True)
    with pytest.raises(ChainError, match='exactness "grid" cannot be kept'):
        service.submit(msgspec.structs.replace(LINE, speculate=True), "serial", exactness="grid")


def test_without_speculation_nothing_is_remembered() -> None:
    service = Service(H200, ABLE)
    service.submit(LINE)
    service.settle()
    assert service.chains.runs.guessing.size == 0
    service.submit(LINE, speculate=True)  # the engines of another daemon's start may guess all the same
    assert all(spec.speculate and not spec.drafts for spec in specs(service).values())
    service.close()


def test_what_is_forgotten_is_guessed_from_no_more(service: Service) -> None:
    number = service.submit(LINE)
    service.settle()
    assert service.chains.runs.guessing.size > 0
    service.run(service.chains.forget, number)
    assert service.chains.runs.guessing.size == 0
    service.submit(LINE)
    assert not any(spec.drafts for spec in specs(service).values())


def test_a_restart_takes_up_what_the_store_keeps(service: Service) -> None:
    service.store = ListingStore()
    service.kill()
    done = service.submit(LINE)
    service.settle()
    service.submit(LINE)  # its first agent is through when the daemon dies
    worker = next(worker for worker in service.fleet.workers.values() if worker.running)
    while len(service.store.outcomes.get(service.submitted[-1], {})) < 1:
        for hop in [*worker.running.values()]:
            advance(worker, hop)
        while worker.reports:
            service.deliver(worker)
    service.kill()
    service.run(service.chains.live)  # a turn of the loop, in which the store is read
    assert service.chains.runs.guessing.drafts(service.record(service.submitted[-1]), 1, ABLE) == [WROTE[1]]
    service.settle()
    for chain in (done, service.submitted[-1]):
        service.run(service.chains.forget, chain)
    assert service.chains.runs.guessing.size == 0


def ended(chain: str, ids: list[int], *, state: str = "finished", kind: str = "agent") -> ChainResult:
    agent = AgentResult(name="a", state="finished", output_ids=ids, model="m" if kind == "agent" else "", kind=kind)  # type: ignore[arg-type]
    return ChainResult(id=chain, name="c", state=state, agents=[agent])  # type: ignore[arg-type]


async def test_of_a_real_store_the_latest_runs_that_finished_are_taken_up(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "state", StoreConfig())
    results = [ended(f"0000000{at}", [at, at + 1]) for at in range(5)]
    results[3] = ended("00000003", [30], state="failed")
    results[4] = ended("00000004", [40], kind="extract")
    for number, result in enumerate(results, 1):
        await store.add(result.id, job(number))
        await store.ended(result.id, result, float(number))
    await store.forget("00000002")
    config = parse_config({"engine": "simulated", "groups": [{"name": "a", "devices": ["cpu:0"]}]} | ENABLED)
    guessing = Guessing(config)
    await guessing.take_up(store)
    await store.close()
    assert guessing._runs.of("c", "a", "m", 100) == [[1, 2], [0, 1]]
    assert guessing._runs.of("c", "a", "", 100) == [], "a step has no model, and is not guessed for"
