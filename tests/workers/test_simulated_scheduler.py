"""The simulated scheduler as a pure machine: what a step holds, how long it takes, and that nothing starves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.messages import Sampling
from pingpong_worker.config import SimulatedSettings
from pingpong_worker.simulated_messages import Chunk, Computed, Sampled
from pingpong_worker.simulated_scheduler import SimulatedScheduler


def settings(**changes: object) -> SimulatedSettings:
    usual = {"block_size": 4, "kv_tokens": 400, "max_num_batched_tokens": 16, "step_ms": 2.0, "row_us": 100.0}
    return SimulatedSettings(**{**usual, **changes})  # type: ignore[arg-type]


def sampling(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


def shape(scheduler: SimulatedScheduler) -> dict[str, int]:
    """Carry out one step; tokens by request."""
    step = scheduler.plan()
    assert step is not None
    scheduler.commit(step)
    return {request.id: tokens for request, tokens in step.rows}


def test_decodes_come_first_and_prefills_share_the_rest() -> None:
    scheduler = SimulatedScheduler(settings())
    scheduler.add(Chunk("long", list(range(40)), None, sampling(2)))
    assert shape(scheduler) == {"long": 16}
    scheduler.add(Chunk("short", [100, 101, 102], None, sampling(3)))
    assert shape(scheduler) == {"long": 16}
    assert shape(scheduler) == {"long": 8, "short": 3}
    scheduler.add(Chunk("new", list(range(200, 230)), None, sampling(1)))
    assert shape(scheduler) == {"long": 1, "short": 1, "new": 14}
    assert shape(scheduler) == {"short": 1, "new": 15}


def test_duration_is_fixed_part_plus_rows_plus_context() -> None:
    scheduler = SimulatedScheduler(settings(context_ns=1000.0))
    scheduler.add(Chunk("a", list(range(20)), None, sampling(2)))
    step = scheduler.plan()
    assert step is not None
    assert step.duration_s == pytest.approx(2e-3 + 16 * 100e-6 + (16 * 17 / 2) * 1000e-9)
    scheduler.commit(step)
    step = scheduler.plan()
    assert step is not None
    assert step.duration_s == pytest.approx(2e-3 + 4 * 100e-6 + (4 * 16 + 4 * 5 / 2) * 1000e-9)


def test_a_request_waits_until_its_full_length_has_room() -> None:
    scheduler = SimulatedScheduler(settings(kv_tokens=40))
    scheduler.add(Chunk("a", [1] * 8, None, sampling(20)))
    scheduler.add(Chunk("b", [2] * 8, None, sampling(20)))
    assert shape(scheduler) == {"a": 8}
    assert shape(scheduler) == {"a": 1}
    scheduler.abort("a")
    assert shape(scheduler) == {"b": 8}


def test_paused_request_computes_only_what_is_new() -> None:
    scheduler = SimulatedScheduler(settings())
    scheduler.add(Chunk("s", [1] * 10, None, None))
    step = scheduler.plan()
    assert step is not None
    assert scheduler.commit(step) == [Computed("s")]
    assert scheduler.plan() is None
    scheduler.add(Chunk("s", [2] * 3, None, sampling(1)))
    step = scheduler.plan()
    assert step is not None
    assert [tokens for _, tokens in step.rows] == [3]
    (reply,) = scheduler.commit(step)
    assert isinstance(reply, Sampled)
    assert reply.finish_reason == "length"


def test_an_abort_while_a_step_is_computed_gives_no_reply() -> None:
    scheduler = SimulatedScheduler(settings())
    scheduler.add(Chunk("a", [1, 2], None, sampling(5)))
    step = scheduler.plan()
    assert step is not None
    scheduler.abort("a")
    scheduler.abort("a")
    assert scheduler.commit(step) == []
    assert scheduler.plan() is None


Requests = list[tuple[list[int], int, list[int], str | None]]


@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=60),
            st.integers(1, 12),
            st.lists(st.integers(1, 59), max_size=3),
            st.sampled_from([None, "salt"]),
        ),
        min_size=1,
        max_size=8,
    ),
    budget=st.integers(1, 40),
    seats=st.integers(1, 4),
)
def test_every_request_gets_the_answer_it_gets_alone(requests: Requests, budget: int, seats: int) -> None:
    """However requests are batched, cut into chunks and served from the cache, the ids are the same."""

    def run(chosen: Requests, **limits: int) -> dict[str, list[int]]:
        scheduler = SimulatedScheduler(settings(**limits))
        rest: dict[str, list[list[int]]] = {}
        for at, (ids, _, cuts, _) in enumerate(chosen):
            edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
            rest[f"{at}"] = [ids[start:end] for start, end in itertools.pairwise(edges)]
        answers: dict[str, list[int]] = {name: [] for name in rest}

        def feed(name: str) -> None:
            ids = rest[name].pop(0)
            _, tokens, _, salt = chosen[int(name)]
            scheduler.add(Chunk(name, ids, salt, None if rest[name] else sampling(tokens)))

        for name in rest:
            feed(name)
        for _ in range(5000):
            step = scheduler.plan()
            if step is None:
                break
            assert 1 <= sum(tokens for _, tokens in step.rows) <= limits.get("max_num_batched_tokens", 16)
            assert len(step.rows) <= limits.get("max_num_seqs", 64)
            for reply in scheduler.commit(step):
                if isinstance(reply, Computed):
                    feed(reply.request)
                elif isinstance(reply, Sampled) and reply.token is not None:
                    answers[reply.request].append(reply.token)
        assert scheduler.plan() is None
        return answers

    together = run(requests, max_num_batched_tokens=budget, max_num_seqs=seats, kv_tokens=800)
    for at, request in enumerate(requests):
        (alone,) = run([(request[0], request[1], [], None)], kv_tokens=800).values()
        assert together[f"{at}"] == alone
        assert len(alone) == request[1]
