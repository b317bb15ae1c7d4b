"""What people who look on are told: where chains are, what hops hold, and how far a start has come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from chains_desk import LIMITS, OUTPUT, Service, advance, chain_reading
from pingpong_bus.messages import ChainSummary, HopText, Loading, Progress, Ready
from pingpongd.config import GroupConfig
from pingpongd.stored import EndedChain
from pingpongd.worker_handle import Worker
from pingpongd.worker_talk import WorkerTalk

READS = [set(), {0}]


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


def summary(service: Service, number: str) -> ChainSummary:
    found = [line for line in service.run(service.chains.summaries, 100) if line.id == number]
    assert len(found) == 1
    return found[0]  # type: ignore[no-any-return]


def where(line: ChainSummary) -> tuple[str, str, int, int]:
    return line.agent, line.worker, line.output_tokens, line.max_output_tokens


def test_a_chain_says_at_which_agent_it_is_and_how_much_it_has_written(service: Service) -> None:
    number = service.submit(chain_reading(READS), "serial", group="a")
    worker = service.fleet.workers["a"]
    most = [agent.max_tokens for agent in service.record(number).chain.agents]
    assert where(summary(service, number)) == ("", "", 0, sum(most))
    assert worker.kv_held_tokens == LIMITS.block_size, "its full length, in whole blocks"  # type: ignore[attr-defined]
    [hop] = worker.running.values()
    for _ in range(4):
        advance(worker, hop)
        while worker.reports:
            service.deliver(worker)
    service.run(
        service.chains.runs.hop_message,
        worker,
        HopText(hop=hop.spec.hop, upto=hop.writer.count, text="ab"),  # type: ignore[union-attr]
    )
    assert where(summary(service, number)) == ("a0", "a", 2, sum(most))
    service.settle()
    assert service.result(number).state == "finished"
    assert worker.kv_held_tokens == 0  # type: ignore[attr-defined]


def test_an_agent_that_has_finished_counts_with_what_it_wrote(service: Service) -> None:
    number = service.submit(chain_reading(READS), "serial", group="a")
    worker = service.fleet.workers["a"]
    [hop] = worker.running.values()
    while hop.spec.hop in worker.running:
        advance(worker, hop)
    while worker.reports:
        service.deliver(worker)
    line = summary(service, number)
    assert line.finished_agents == 1
    assert line.output_tokens == OUTPUT
    assert line.max_output_tokens == OUTPUT + service.record(number).chain.agents[1].max_tokens


def test_a_chain_that_runs_is_not_lost_among_those_that_have_ended(service: Service) -> None:
    number = service.submit(chain_reading(READS), "serial", group="a")
    later = time.time() + 1

    async def ended(limit: int) -> list[EndedChain]:
        chain = EndedChain(
            id="e", name="n", state="finished", placement="serial", agents=1, finished_agents=1, submitted_at=later,
            ended_at=later, e2e_ms=1.0,
        )  # fmt: skip
        return [chain] * limit

    service.store.list = ended  # type: ignore[method-assign]
    lines = service.run(service.chains.summaries, 3)
    assert sorted(line.id for line in lines) == sorted([number, "e", "e"])


class Heard:
    """Takes what a worker's talk leads to."""

    def __init__(self) -> None:
        self.served: list[Worker] = []

    def serves(self, worker: Worker) -> None:
        self.served.append(worker)


async def test_how_far_a_worker_has_come_is_kept_and_each_stage_is_logged_once() -> None:
    heard: Any = Heard()
    worker = Worker(GroupConfig(name="a", devices=["cpu:0"]), "bell")
    worker.state = "loading"
    link: Any = SimpleNamespace()
    talk = WorkerTalk(link, link, heard)
    with structlog.testing.capture_logs() as logs:
        for done in range(3):
            progress = Progress(stage="loading the weights", done=done, total=3, unit="shards")
            talk.handle(worker, Loading(stage="loading the model", progress=progress))
            assert worker.status().progress == progress
        talk.handle(worker, Loading(stage="measuring the engine"))
        assert worker.status().progress is None
        talk.handle(worker, Loading(stage="measuring the engine", progress=progress))
        talk.handle(worker, Ready(limits=LIMITS))
    assert worker.status().progress is None
    assert heard.served == [worker]
    stages = [line["stage"] for line in logs if line["event"] == "worker_loading"]
    assert stages == ["loading the model", "measuring the engine"]
