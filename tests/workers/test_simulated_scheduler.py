"""The simulated scheduler as a pure machine: what a step holds, how long it takes, and that nothing starves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.messages import DecodePace, KeptPrefix, Sampling
from pingpong_worker.config import SimulatedSettings
from pingpong_worker.decode_first import PATIENCE
from pingpong_worker.simulated_messages import Chunk, Computed, Sampled
from pingpong_worker.simulated_scheduler import SimulatedScheduler, Step


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


def test_what_a_step_computes_for_an_aborted_request_stays_cached() -> None:
    scheduler = SimulatedScheduler(settings())
    ids = list(range(200))
    scheduler.add(Chunk("a", ids, None, None))
    step = scheduler.plan()
    assert step is not None
    scheduler.abort("a")
    scheduler.commit(step)
    scheduler.add(Chunk("b", ids, None, sampling(1)))
    (_, tokens), *_ = scheduler.plan().rows  # type: ignore[union-attr]
    assert tokens < len(ids) - sum(count for _, count in step.rows) + settings().block_size + 1


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


def decoding(scheduler: SimulatedScheduler, name: str = "d", pace: DecodePace | None = None) -> None:
    """Add a request, and compute its prompt."""
    scheduler.add(Chunk(name, [1, 2, 3], None, sampling(300), pace=pace or DecodePace()))
    shape(scheduler)


def step_of(scheduler: SimulatedScheduler) -> Step:
    step = scheduler.plan()
    assert step is not None
    scheduler.commit(step)
    return step


def test_appends_get_beside_a_decode_what_its_pace_allows() -> None:
    scheduler = SimulatedScheduler(settings(kv_tokens=8000, max_num_batched_tokens=2000))
    decoding(scheduler, pace=DecodePace(itl_ratio=1.3))
    alone = step_of(scheduler).duration_s
    scheduler.add(Chunk("a", list(range(500)), None, sampling(1), append=True))
    for _ in range(40):
        step = step_of(scheduler)
        assert step.duration_s <= 1.3 * alone
        assert step.state is not None
        assert step.state.target_ms == pytest.approx(1.3 * alone * 1e3)
        assert step.state.budget_tokens == sum(tokens for request, tokens in step.rows if request.id == "a")
    assert step.state.append_tokens == 39 * 6, "one step of the forty is to measure what decodes cost alone"
    assert step.state.reason == "target"


def test_the_tightest_pace_counts_and_full_speed_comes_with_the_last_decode() -> None:
    scheduler = SimulatedScheduler(settings(kv_tokens=8000, max_num_batched_tokens=2000))
    decoding(scheduler, "slow", DecodePace(itl_ratio=10))
    decoding(scheduler, "fast", DecodePace(itl_ratio=10, itl_target_ms=3.0))
    scheduler.add(Chunk("a", list(range(500)), None, sampling(1), append=True))
    assert shape(scheduler) == {"slow": 1, "fast": 1, "a": 8}
    scheduler.abort("fast")
    assert shape(scheduler)["a"] > 100
    scheduler.abort("slow")
    assert shape(scheduler)["a"] > 300


def test_a_prompt_that_is_waited_for_passes_appends() -> None:
    scheduler = SimulatedScheduler(settings(max_num_batched_tokens=64))
    scheduler.add(Chunk("a", list(range(100)), None, sampling(1), append=True))
    assert shape(scheduler) == {"a": 64}
    scheduler.add(Chunk("p", list(range(500, 550)), None, sampling(2)))
    assert shape(scheduler) == {"p": 50}
    assert "a" in shape(scheduler)


def test_without_decode_first_appends_are_requests_like_others() -> None:
    scheduler = SimulatedScheduler(settings(kv_tokens=8000, max_num_batched_tokens=64), decode_first=False)
    decoding(scheduler)
    scheduler.add(Chunk("a", list(range(100)), None, sampling(1), append=True))
    step = step_of(scheduler)
    assert {request.id: tokens for request, tokens in step.rows} == {"d": 1, "a": 63}
    assert step.state is None


def test_an_append_gets_on_where_the_pace_allows_nothing() -> None:
    scheduler = SimulatedScheduler(settings(kv_tokens=8000, max_num_batched_tokens=2000))
    decoding(scheduler, pace=DecodePace(itl_ratio=1))
    scheduler.add(Chunk("a", list(range(500)), None, sampling(1), append=True))
    shapes = [shape(scheduler) for _ in range(PATIENCE + 1)]
    assert shapes == [{"d": 1}] * PATIENCE + [{"d": 1, "a": 16}]


def test_a_prompt_with_a_grid_is_computed_cell_by_cell() -> None:
    scheduler = SimulatedScheduler(settings(max_num_batched_tokens=64))
    scheduler.add(Chunk("g", list(range(50)), None, sampling(2), grid=16))
    assert [shape(scheduler) for _ in range(5)] == [{"g": 16}] * 3 + [{"g": 2}, {"g": 1}]
    scheduler.add(Chunk("again", list(range(50)), None, sampling(1), grid=16))
    assert shape(scheduler) == {"again": 2}
    scheduler.add(Chunk("shorter", list(range(40)), None, sampling(1), grid=16))
    assert [shape(scheduler)] == [{"shorter": 8}], "found up to the end of a cell only"


def test_what_a_short_last_chunk_computed_is_not_found_later() -> None:
    scheduler = SimulatedScheduler(settings(max_num_batched_tokens=64))
    scheduler.add(Chunk("g", list(range(28)), None, sampling(1), append=True, grid=16))
    assert [shape(scheduler) for _ in range(2)] == [{"g": 16}, {"g": 12}]
    scheduler.add(Chunk("plain", list(range(28)), None, sampling(1)))
    assert shape(scheduler) == {"plain": 12}


def ask(scheduler: SimulatedScheduler, name: str, ids: list[int], keep: KeptPrefix | None = None) -> int:
    """Let a request end that writes one token; gives how much of its prompt was found."""
    scheduler.add(Chunk(name, ids, None, sampling(1), keep=keep))
    while (step := scheduler.plan()) is not None:
        for reply in scheduler.commit(step):
            if isinstance(reply, Sampled):
                return reply.cached_tokens
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("share", "reuse", "found"), [(0.5, 1.0, 32), (0.5, None, 0), (0.0, 1.0, 0), (0.1, 1.0, 16), (1.0, 1.0, 32)]
)
def test_a_beginning_that_is_expected_back_is_kept(share: float, reuse: float | None, found: int) -> None:
    scheduler, known = SimulatedScheduler(settings(kv_tokens=160), keep=share), list(range(40))
    keep = KeptPrefix(tokens=34, reuse=reuse) if reuse else None
    ask(scheduler, "known", [*known, 1], keep)
    for other in range(20):
        ask(scheduler, f"other {other}", [50 + other] * 60)
    assert ask(scheduler, "again", [*known, 2], keep) == found
    scheduler.reset_prefix_cache()
    assert ask(scheduler, "again after a reset", [*known, 2], keep) == 0


def test_kept_ones_go_where_there_are_no_others() -> None:
    scheduler = SimulatedScheduler(settings(kv_tokens=160), keep=1.0)
    for name in range(4):
        ask(scheduler, f"{name}", [name] * 60, KeptPrefix(tokens=60, reuse=1.0 + name))
    assert ask(scheduler, "a", [3] * 60 + [9]) == 60
    assert ask(scheduler, "b", [0] * 60 + [9]) == 0
