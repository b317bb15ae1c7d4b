"""Chains that overlap on one group, and chains that are promised exact output: where their hops run, and who waits."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from chains_desk import LIMITS, FakeHop, FakeWorker, Service, advance, chain_reading
from pingpong_bus.chain import Chain
from pingpong_bus.errors import DataError, EngineLost, UsageError
from pingpong_bus.messages import DecodePace
from pingpongd.config import DaemonConfig, parse_config
from pingpongd.exactness import Exact
from pingpongd.stored import Job

ALONE = [set[int]()]
PAIR = [set[int](), {0}]
TRIO = [set[int](), {0}, {1}]


def config(**keys: Any) -> DaemonConfig:
    return parse_config({"engine": "simulated", "groups": [{"name": "a", "devices": ["cpu:0"]}]} | keys)


def write(service: Service, worker: FakeWorker, hop: FakeHop, *, tokens: int = 1) -> None:
    """Let a hop open, finalize and write, and be heard of."""
    for _ in range(2 + tokens):
        advance(worker, hop)
    while worker.reports:
        service.deliver(worker)


def only(worker: FakeWorker) -> FakeHop:
    (hop,) = worker.running.values()
    return hop


# ------------------------------------------------------------------------------------------------------------- overlap


def test_agents_overlap_on_one_group(service: Service) -> None:
    number = service.submit(chain_reading(TRIO), "overlap")
    (worker,) = [worker for worker in service.fleet.workers.values() if worker.running]
    write(service, worker, only(worker))
    assert [hop.split("/")[1] for hop in worker.running] == ["0", "1"]
    service.settle()
    result = service.result(number)
    assert (result.state, result.placement, {agent.worker for agent in result.agents}) == (
        "finished",
        "overlap",
        {worker.name},
    )


def test_agents_overlap_from_the_start_where_the_chain_says_so(service: Service) -> None:
    service.submit(chain_reading(TRIO, start="immediate"), "overlap", group="b")
    assert [hop.split("/")[1] for hop in service.fleet.workers["b"].running] == ["0", "1", "2"]


def test_a_chain_that_overlaps_moves_together(service: Service) -> None:
    number = service.submit(chain_reading(TRIO), "overlap")
    lost = service.fleet.workers[service.record(number).agents[0].worker]
    write(service, lost, only(lost), tokens=2)
    service.lose(lost)
    (left,) = service.fleet.ready
    assert [hop.split("/")[1] for hop in left.running] == ["0", "1"]
    service.bring_back(lost)
    service.settle()
    result = service.result(number)
    assert result.state == "finished"
    assert {agent.worker for agent in result.agents} == {left.name}


def test_a_chain_goes_on_in_series_where_nothing_holds_its_readers_back(service: Service) -> None:
    service.fleet.workers["b"].limits = msgspec.structs.replace(LIMITS, decode_first=False, overlap=False)
    number = service.submit(chain_reading(TRIO), "overlap")
    first, other = service.fleet.workers["a"], service.fleet.workers["b"]
    write(service, first, only(first), tokens=2)
    assert len(first.running) == 2
    service.lose(first)
    assert [hop.split("/")[1] for hop in other.running] == ["0"]
    service.settle()
    assert service.result(number).state == "finished"


def test_overlap_is_refused_without_the_scheduler_and_kept_where_it_was_accepted(service: Service) -> None:
    service.submit(chain_reading([set(), set(), set(), set()]), "serial")
    number = service.submit(chain_reading([set(), {0}, {1}, {2}]), "overlap")  # it waits for logs
    service.limits = msgspec.structs.replace(LIMITS, decode_first=False, overlap=False)
    service.kill()
    with pytest.raises(UsageError, match="holds appends to a budget"):
        service.submit(chain_reading(PAIR), "overlap")
    service.settle()
    result = service.result(number)
    assert result.state == "queued"
    assert "no engine holds appends to a budget" in result.why


# ----------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize(
    ("default", "of_chain", "asked", "given"),
    [
        ("fast", None, None, "fast"),
        ("grid", None, None, "grid"),
        ("grid", "fast", None, "fast"),
        ("fast", "grid", None, "grid"),
        ("grid", "grid", "fast", "fast"),
        ("fast", "fast", "grid", "grid"),
    ],
)
def test_the_submission_says_more_than_the_chain_and_the_chain_more_than_the_daemon(
    service: Service, default: str, of_chain: Any, asked: Any, given: str
) -> None:
    service.chains.configure(config(exactness=default))
    chain = msgspec.structs.replace(chain_reading(ALONE), exactness=of_chain)
    number = service.submit(chain, exactness=asked)
    cell = 64 if given == "grid" else None
    assert [(hop.spec.grid, hop.spec.replay) for hop in service.fleet.running()] == [(cell, given == "grid")]
    service.settle()
    result = service.result(number)
    assert (result.exactness, result.grid) == (given, cell)


@pytest.mark.parametrize("level", ["fast", "invariant"])
def test_a_replay_hangs_on_what_was_promised_and_not_on_the_engine(service: Service, level: str) -> None:
    """Two kinds of device may both be batch-invariant: what one has begun at level fast, the other goes on with."""
    for worker in service.fleet.workers.values():
        worker.limits = msgspec.structs.replace(LIMITS, batch_invariant=True)
    service.submit(chain_reading(ALONE), exactness=level)
    assert [hop.spec.replay for hop in service.fleet.running()] == [level == "invariant"]


def test_a_level_that_cannot_be_kept_is_refused(service: Service) -> None:
    with pytest.raises(UsageError, match="exactness: .* a hop has to have it to itself"):
        service.submit(chain_reading(PAIR), "overlap", exactness="grid")
    with pytest.raises(UsageError, match="exactness: .* batch-invariant"):
        service.submit(chain_reading(PAIR), exactness="invariant")
    assert not service.chains.live()


def test_a_hop_on_the_grid_waits_for_its_group_and_others_wait_for_it(service: Service) -> None:
    def why(number: str) -> str:
        summaries = {line.id: line.why for line in service.run(service.chains.summaries, 9)}
        assert service.result(number).why.endswith(summaries[number])
        return summaries[number]

    before = service.submit(chain_reading(ALONE), group="a")
    grid = service.submit(chain_reading(ALONE), group="a", exactness="grid")
    after = service.submit(chain_reading(ALONE), group="a")
    worker = service.fleet.workers["a"]
    assert only(worker).spec.hop.startswith(before)
    assert why(grid) == 'agent "a0" waits for the group "a" to itself: exactness grid'
    assert why(after) == 'agent "a0" waits for its turn on the group "a"'
    write(service, worker, only(worker), tokens=4)
    assert only(worker).spec.hop.startswith(grid)
    assert why(grid) == ""
    alone = f'the group "a", which agent "a0" of chain {grid} has to itself: exactness grid'
    assert why(after) == f'agent "a0" waits for {alone}'
    write(service, worker, only(worker), tokens=4)
    assert only(worker).spec.hop.startswith(after)
    service.settle()
    assert {service.result(number).state for number in (before, grid, after)} == {"finished"}


def test_agents_that_wait_for_a_group_count_as_its_load(service: Service) -> None:
    for _ in range(3):
        service.submit(chain_reading(ALONE), exactness="grid", group="a")
    for _ in range(3):
        service.submit(chain_reading(ALONE), exactness="grid")
    assert [record.agents[0].worker for record in service.chains.live()] == ["a"] * 3 + ["b"] * 3


def test_readers_on_the_grid_read_ahead_on_another_group(service: Service) -> None:
    number = service.submit(chain_reading(TRIO), "ping-pong", exactness="grid")
    first, second = (service.fleet.workers[agent.worker] for agent in service.record(number).agents[:2])
    write(service, first, only(first))
    assert only(second).spec.grid == 64
    service.settle()
    assert service.result(number).state == "finished"


def test_who_is_alone_for_its_bits_is_not_suspected_of_killing_engines(service: Service) -> None:
    service.give_up_after(3)  # a second loss would count
    number = service.submit(chain_reading(ALONE), exactness="grid")
    worker = next(worker for worker in service.fleet.workers.values() if worker.running)
    write(service, worker, only(worker))
    service.lose(worker)
    (resumed,) = service.fleet.running()
    assert resumed.spec.resume is not None
    assert resumed.spec.grid == 64
    service.settle()
    assert service.result(number).state == "finished"


def test_an_exact_chain_is_resumed_on_engines_of_its_kind_only(service: Service) -> None:
    exact, fast = (service.submit(chain_reading(ALONE), exactness=level) for level in ("grid", "fast"))
    first, other = (service.fleet.workers[service.record(chain).agents[0].worker] for chain in (exact, fast))
    assert first is not other
    write(service, first, only(first))
    write(service, other, only(other), tokens=4)
    other.limits = msgspec.structs.replace(LIMITS, dtype="float32")  # it was replaced
    service.run(service.chains.runs.worker_ready, other)
    service.lose(first)
    assert not service.fleet.running()
    assert service.result(exact).why.endswith('agent "a0" waits for a group that serves')
    first.limits = other.limits
    service.bring_back(first)
    result = service.result(exact)
    assert result.state == "failed"
    assert 'exactness "grid" on fake, m' in result.error
    assert "no such engine is left" in result.error


def test_a_chain_keeps_its_level_and_cell_across_a_restart(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), exactness="grid")
    service.limits = msgspec.structs.replace(LIMITS, grid_tokens=128)
    service.kill()
    service.settle()
    result = service.result(number)
    assert (result.state, result.exactness, result.grid) == ("finished", "grid", 64)


def test_a_chain_waits_after_a_restart_with_engines_that_cannot_keep_its_level(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), exactness="grid")
    service.limits = msgspec.structs.replace(LIMITS, grid_tokens=0, grid_refusal="it speculates.")
    service.kill()
    service.settle()
    result = service.result(number)
    assert (result.state, result.exactness) == ("queued", "grid")
    assert "it speculates" in result.why


def test_a_chain_waits_after_a_restart_with_arguments_by_which_engines_round_differently(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), exactness="grid")
    service.vllm = {"enforce_eager": True}
    service.kill()
    service.settle()
    assert "the daemon serves fake, m, dtype unknown, d, enforce_eager = True" in service.result(number).why
    service.vllm = {"gpu_memory_utilization": 0.5}
    service.kill()
    service.settle()
    assert service.result(number).state == "finished"


def test_a_chain_from_before_there_were_levels_is_fast(service: Service) -> None:
    number = service.submit(chain_reading(PAIR), exactness="grid")
    kept = msgspec.to_builtins(service.store.jobs[number])
    assert msgspec.convert(kept, Job).exact.grid == 64
    del kept["exact"]
    for where in (kept["options"], kept["chain"]):
        where.pop("exactness", None)
    assert msgspec.convert(kept, Job).exact == Exact()


def paces(service: Service, chain: Chain) -> list[DecodePace]:
    service.submit(msgspec.structs.replace(chain, start="immediate"), "overlap")
    return [hop.spec.pace for hop in service.fleet.running()]


def test_who_no_other_agent_reads_is_paced_more_strictly(service: Service) -> None:
    service.chains.configure(config(decode_first={"final": 1.2, "inner": 1.8}))
    inner, final = DecodePace(itl_ratio=1.8), DecodePace(itl_ratio=1.2)
    assert paces(service, chain_reading([set(), {0}, {1}, {0}])) == [inner, inner, final, final]


def test_a_target_in_milliseconds_stands_in_for_the_ratio(service: Service) -> None:
    service.chains.configure(config(decode_first={"final": 1.5, "inner": 3.0}))
    inner, final = paces(service, msgspec.structs.replace(chain_reading(PAIR), itl_target_ms=30.0))
    assert (inner.itl_target_ms, final.itl_target_ms) == (60.0, 30.0)
    assert min(inner.itl_ratio, final.itl_ratio) > 1000


# ------------------------------------------------------------------------------------------------------------- scoring


def test_a_score_on_the_grid_has_a_group_to_itself_and_gives_it_back(service: Service) -> None:
    first = service.submit(chain_reading(ALONE), group="a")

    async def score() -> asyncio.Task[list[float | None]]:
        task = asyncio.create_task(service.chains.score([1, 2], [3, 4], 64))
        while not service.fleet.scored:
            await asyncio.sleep(0)
        return task

    service.fleet.scoring.clear()
    task = service.run(score)
    assert service.fleet.scored == [("b", [1, 2], [3, 4], 64)]  # nothing runs on b
    waits = service.submit(chain_reading(ALONE), group="b")
    assert not service.fleet.workers["b"].running
    assert "exactness grid" in service.result(waits).why

    async def finish() -> list[float | None]:
        service.fleet.scoring.set()
        return await task

    assert service.run(finish) == [-1.0, -1.0]
    assert only(service.fleet.workers["b"]).spec.hop.startswith(waits)
    service.settle()
    assert {service.result(number).state for number in (first, waits)} == {"finished"}


def test_a_score_waits_for_room(service: Service) -> None:
    numbers = [service.submit(chain_reading(ALONE), group=group, exactness="grid") for group in "ab"]

    async def score() -> asyncio.Task[list[float | None]]:
        task = asyncio.create_task(service.chains.score([1], [2], None))
        await asyncio.sleep(0)
        return task

    task = service.run(score)
    assert not service.fleet.scored
    service.settle()

    async def finish() -> list[float | None]:
        return await task

    assert service.run(finish) == [-1.0]
    assert {service.result(number).state for number in numbers} == {"finished"}


def test_scores_do_not_keep_an_agent_from_a_group_to_itself(service: Service) -> None:
    async def score() -> asyncio.Task[list[float | None]]:
        task = asyncio.create_task(service.chains.score([1], [2], None))
        for _ in range(5):
            await asyncio.sleep(0)
        return task

    async def finish(task: asyncio.Task[list[float | None]]) -> list[float | None]:
        service.fleet.scoring.set()
        return await task

    service.fleet.workers["a"].state = "waiting"
    service.fleet.scoring.clear()
    first = service.run(score)
    held = service.submit(chain_reading(ALONE), group="b", exactness="grid")
    again = service.run(score)
    assert len(service.fleet.scored) == 1, "another one would keep the group taken, and so on for ever"
    assert service.run(finish, first) == [-1.0]
    assert only(service.fleet.workers["b"]).spec.hop.startswith(held)
    service.settle()
    assert service.run(finish, again) == [-1.0]

    service.fleet.scoring.clear()
    first = service.run(score)
    held = service.submit(chain_reading(ALONE), group="b", exactness="grid")
    again = service.run(score)
    service.run(service.chains.cancel, held)
    service.run(asyncio.sleep, 0)
    assert len(service.fleet.scored) == 4, "nobody waits for the group any more"
    assert [service.run(finish, task) for task in (first, again)] == [[-1.0]] * 2


def test_a_score_whose_engine_dies_leaves_nothing_behind(service: Service) -> None:
    async def score() -> None:
        service.fleet.scoring.clear()
        task = asyncio.create_task(service.chains.score([1], [2], 64))
        while not service.fleet.scored:
            await asyncio.sleep(0)
        service.fleet.workers["a"].reachable = False
        service.fleet.scoring.set()
        with pytest.raises(EngineLost):
            await task

    service.run(score)
    service.fleet.workers["a"].reachable = True
    service.submit(chain_reading(ALONE), group="a")
    assert only(service.fleet.workers["a"])


@pytest.mark.parametrize(
    ("ids", "tokens", "grid", "error", "message"),
    [
        ([1] * 1000, [1], None, DataError, "ids: 1000 ids and one more are asked for, and the engine takes 1000"),
        ([1000], [1], None, DataError, "ids: there is no token 1000"),
        ([1], [1, 2000], None, DataError, "tokens: there is no token 2000"),
        ([1], [1], 64, UsageError, "grid: the engine does not score on a grid: it speculates"),
    ],
)
def test_what_no_engine_can_score_is_refused(
    service: Service, ids: list[int], tokens: list[int], grid: int | None, error: type[Exception], message: str
) -> None:
    for worker in service.fleet.workers.values():
        worker.limits = msgspec.structs.replace(LIMITS, grid_tokens=0, grid_refusal="it speculates.")
    with pytest.raises(error, match=message):
        service.run(service.chains.score, ids, tokens, grid)
    assert not service.fleet.scored
