"""Which blocks are kept: those worth most, beginnings before ends, and never more than the budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pingpong_worker.prefix_retention import FORGOTTEN, HALF_LIFE_S, PrefixRetention, prefill_seconds


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}/{at}".encode() for at in range(blocks)]


def kept_of(retention: PrefixRetention, keys: list[bytes]) -> int:
    """Blocks kept from the beginning; asserts that there is no hole."""
    held = [key in retention for key in keys]
    count = held.index(False) if False in held else len(held)
    assert not any(held[count:]), "an end is never kept without its beginning"
    return count


def test_what_comes_back_more_often_stays() -> None:
    retention = PrefixRetention(10)
    retention.note(chain("rare", 6), 1.0, 1.0, 0.0)
    assert retention.note(chain("often", 8), 10.0, 1.0, 1.0) == chain("rare", 6)[:1:-1]
    assert (kept_of(retention, chain("often", 8)), kept_of(retention, chain("rare", 6))) == (8, 2)


def test_what_is_dear_to_compute_stays() -> None:
    retention = PrefixRetention(10)
    retention.note(chain("cheap", 8), 1.0, 1.0, 0.0)
    retention.note(chain("dear", 8), 1.0, 5.0, 1.0)
    assert (kept_of(retention, chain("dear", 8)), kept_of(retention, chain("cheap", 8))) == (8, 2)


def test_what_several_begin_with_is_worth_what_they_are_together() -> None:
    retention = PrefixRetention(12)
    document = chain("document", 4)
    for name in "abc":
        retention.note(document + chain(name, 2), 1.0, 1.0, 0.0)
    retention.note(chain("other", 6), 2.0, 1.0, 1.0)
    assert kept_of(retention, document) == 4, "three times a sixth for each block, against two"
    assert kept_of(retention, chain("other", 6)) == 6
    assert sum(kept_of(retention, document + chain(name, 2)) - 4 for name in "abc") == 2


def test_what_does_not_come_fades() -> None:
    retention = PrefixRetention(6)
    retention.note(chain("old", 6), 3.0, 1.0, 0.0)
    retention.note(chain("new", 6), 1.0, 1.0, HALF_LIFE_S)
    assert kept_of(retention, chain("old", 6)) == 6, "three times, halved once"
    retention.note(chain("new", 6), 1.0, 1.0, 2 * HALF_LIFE_S)
    assert kept_of(retention, chain("new", 6)) == 6
    retention.note(chain("third", 1), FORGOTTEN * 4, 1.0, 30 * HALF_LIFE_S)
    assert len(retention) == 1, "the others are forgotten, and leave room for what nobody marks"


def test_what_is_not_expected_any_more_is_let_go() -> None:
    retention = PrefixRetention(6)
    retention.note(chain("a", 3), 1.0, 1.0, 0.0)
    assert retention.note(chain("a", 3), 0.0, 1.0, 1.0) == chain("a", 3)[::-1]
    assert len(retention) == 0


def test_the_same_words_are_not_heard_twice_at_once() -> None:
    retention = PrefixRetention(6)
    retention.note(chain("a", 3), 1.0, 1.0, 0.0)
    last = chain("a", 3)[-1]
    assert retention.is_fresh(last, 1.0, 5.0)
    assert not retention.is_fresh(last, 2.0, 5.0)
    assert not retention.is_fresh(last, 1.0, 15.0)
    assert not retention.is_fresh(b"other", 1.0, 5.0)


def test_runs_at_once_that_expect_other_numbers_do_not_correct_each_other_in_every_step() -> None:
    retention = PrefixRetention(6)
    keys = chain("a", 3)
    told = 0
    for step in range(100):
        for reuse in (1.0, 2.0, 3.0):
            if not retention.is_fresh(keys[-1], reuse, step * 0.01):
                retention.note(keys, reuse, 1.0, step * 0.01)
                told += 1
    assert told == 3
    assert not retention.is_fresh(keys[-1], 0.0, 1.0), "that it is expected no more is heard at once"


def test_what_is_not_worth_keeping_is_not_weighed_anew_in_every_step() -> None:
    retention = PrefixRetention(4)
    retention.note(chain("dear", 4), 1.0, 5.0, 0.0)
    cheap = chain("cheap", 4)
    assert set(retention.note(cheap, 1.0, 1.0, 1.0)) == set(cheap)
    assert retention.is_fresh(cheap[-1], 1.0, 2.0)
    retention.note(chain("dear", 4), 0.0, 5.0, 20.0)
    assert not retention.is_fresh(cheap[-1], 1.0, 20.0)
    retention.note(cheap, 1.0, 1.0, 20.0)
    assert kept_of(retention, cheap) == 4
    retention.give_up(cheap)
    assert retention.is_fresh(cheap[-1], 1.0, 21.0), "until then it is not taken back from who needed it"


def test_under_pressure_ends_go_first_and_least_worth_first() -> None:
    retention = PrefixRetention(10)
    a, b = chain("a", 4), chain("b", 4)
    retention.note(a, 1.0, 1.0, 0.0)
    retention.note(b, 2.0, 1.0, 0.0)
    assert retention.least([*b, *a, b"stale"], 3) == [b"stale", a[3], a[2]]
    retention.give_up([b"stale", a[3], a[2]])
    assert (kept_of(retention, a), kept_of(retention, b)) == (2, 4)
    retention.give_up(a)
    assert len(retention) == 4
    retention.note(a, 1.0, 1.0, 20.0)
    assert kept_of(retention, a) == 4, "it came again"


def test_years_do_not_overflow() -> None:
    retention = PrefixRetention(4)
    for year in range(20):
        retention.note(chain("a", 3), 1.0, 1.0, year * 365 * 86400.0)
        retention.note(chain("b", 3), 2.0, 1.0, year * 365 * 86400.0 + 1)
        assert (kept_of(retention, chain("b", 3)), kept_of(retention, chain("a", 3))) == (3, 1)


def test_prefill_costs_more_for_each_token_of_context() -> None:
    seconds = prefill_seconds(250, 100, lambda rows, work: rows + work / 1000)
    assert abs(seconds - (250 + 250 * 251 / 2 / 1000)) < 1e-9, "whatever the chunks"


_TREE = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(
    budget=st.integers(1, 12),
    told=st.lists(st.tuples(_TREE, st.floats(0, 20), st.floats(0.1, 5), st.floats(0, 20_000)), max_size=30),
    pressed=st.lists(st.integers(0, 4), min_size=30, max_size=30),
)
def test_the_kept_are_whole_beginnings_within_the_budget(
    budget: int, told: list[tuple[list[int], float, float, float]], pressed: list[int]
) -> None:
    retention, now = PrefixRetention(budget), 0.0
    prompts: list[list[bytes]] = []
    for (path, reuse, cost, after), press in zip(told, pressed, strict=False):
        now += after
        keys = [bytes(path[: end + 1]) for end in range(len(path))]
        prompts.append(keys)
        before = {key for one in prompts for key in one if key in retention}
        dropped = retention.note(keys, reuse, cost, now)
        assert before - {key for one in prompts for key in one if key in retention} == set(dropped) & before
        if press:
            given = retention.least([key for one in prompts for key in one if key in retention], press)
            retention.give_up(given)
            assert not any(key in retention for key in given), "what is given up is an end"
        assert len(retention) <= budget
        assert len(retention) == len({key for one in prompts for key in one if key in retention})
        for one in prompts:
            kept_of(retention, one)
