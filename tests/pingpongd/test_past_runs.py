"""What is remembered of earlier runs: the latest, within bounds, and nothing that was forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pingpongd.past_runs import MIB, PastRuns

MANY = 100_000


def test_the_latest_runs_of_an_agent_come_first() -> None:
    runs = PastRuns(2, 1)
    for job, ids in (("1", [1, 2]), ("2", [3]), ("3", [4, 5, 6])):
        runs.note("c", "a", "m", job, ids)
    assert runs.of("c", "a", "m", MANY) == [[4, 5, 6], [3]]
    assert runs.of("c", "a", "other model", MANY) == []
    assert runs.of("c", "b", "m", MANY) == []
    assert runs.of("d", "a", "m", MANY) == []


def test_what_was_said_again_is_kept_once_and_is_the_latest() -> None:
    runs = PastRuns(2, 1)
    for job, ids in (("1", [1]), ("2", [2]), ("3", [1])):
        runs.note("c", "a", "m", job, ids)
    assert runs.of("c", "a", "m", MANY) == [[1], [2]]
    runs.erase({"1"})  # the third has written it, too
    assert runs.of("c", "a", "m", MANY) == [[1], [2]]
    runs.erase({"3"})
    assert runs.of("c", "a", "m", MANY) == [[2]]


def test_ids_that_a_model_does_not_know_are_left_out() -> None:
    runs = PastRuns(4, 1)
    runs.note("c", "a", "m", "1", [7, 500])
    runs.note("c", "a", "m", "2", [7, 499])
    assert runs.of("c", "a", "m", 500) == [[7, 499]]


def test_chains_that_were_not_run_for_longest_go_first_as_a_whole() -> None:
    runs = PastRuns(4, 1)
    third = list(range(MIB // 12))
    for name in ("x", "y"):
        runs.note(name, "a", "m", name, third)
        runs.note(name, "b", "m", name, [1])
    assert runs.of("x", "b", "m", MANY) == [[1]]  # being asked for counts
    runs.note("z", "a", "m", "z", third)
    assert runs.of("y", "a", "m", MANY) == runs.of("y", "b", "m", MANY) == []
    assert runs.of("x", "a", "m", MANY) == [third]
    assert runs.size <= MIB


def test_what_is_larger_than_all_room_is_not_kept_and_pushes_nothing_out() -> None:
    runs = PastRuns(4, 1)
    runs.note("c", "a", "m", "1", [1])
    runs.note("c", "a", "m", "2", list(range(MIB // 4)))
    assert runs.of("c", "a", "m", MIB) == [[1]]


def test_older_runs_come_behind_and_push_nothing_out() -> None:
    runs = PastRuns(2, 1)
    runs.note("c", "a", "m", "5", [5])
    assert runs.wants("c")
    assert runs.note_older("c", "a", "m", "4", [4])
    assert not runs.wants("c")
    assert runs.note_older("c", "a", "m", "3", [3])
    assert runs.of("c", "a", "m", MANY) == [[5], [4]]
    assert runs.note_older("d", "a", "m", "2", list(range(MIB // 5)))
    assert not runs.note_older("e", "a", "m", "1", list(range(MIB // 5))), "there is no room for it"
    runs.note("f", "a", "m", "6", list(range(MIB // 5)))
    assert runs.of("d", "a", "m", MANY) == [], "it is older than what was run since"
    assert runs.of("c", "a", "m", MANY) == [[5], [4]]


def test_without_runs_nothing_is_kept() -> None:
    runs = PastRuns(0, 1)
    runs.note("c", "a", "m", "1", [1])
    assert (runs.of("c", "a", "m", MANY), runs.size, runs.wants("c")) == ([], 0, False)


def test_tighter_bounds_hold_at_once() -> None:
    runs = PastRuns(4, 8)
    for job in "123":
        runs.note("c", "a", "m", job, [int(job)])
    runs.note("d", "a", "m", "4", list(range(MIB // 2)))
    runs.configure(1, 1)
    assert runs.size == 0, "the larger one is used latest, and all that is older went before it"
    runs.note("c", "a", "m", "5", [5])
    runs.note("c", "a", "m", "6", [6])
    assert runs.of("c", "a", "m", MANY) == [[6]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["note", "older", "erase", "of"]),
            st.sampled_from("xyz"),
            st.sampled_from("ab"),
            st.integers(0, 5),
            st.lists(st.integers(0, 9), max_size=6),
        ),
        max_size=60,
    ),
    st.integers(0, 3),
)
def test_its_size_is_that_of_what_it_holds(steps: list[tuple[str, str, str, int, list[int]]], most: int) -> None:
    runs = PastRuns(most, 1)
    erased: set[str] = set()
    for how, chain, agent, job, ids in steps:
        if how == "note":
            runs.note(chain, agent, "m", str(job), ids)
            erased.discard(str(job))
        elif how == "older":
            runs.note_older(chain, agent, "m", str(job), ids)
            erased.discard(str(job))
        elif how == "erase":
            runs.erase({str(job)})
            erased.add(str(job))
        else:
            found = runs.of(chain, agent, "m", 10)
            assert len(found) <= most
            assert all(found)
            assert len({tuple(run) for run in found}) == len(found)
    held = [run for agents in runs._chains.values() for kept in agents.values() for run in kept]
    assert runs.size == sum(run.size for run in held)
    assert not erased & {run.job for run in held}
    runs.erase({str(job) for job in range(6)})
    assert runs.size == 0
