"""What is usual: learnt from the past, guessed from figures and peers, and how far each is believed."""

from __future__ import annotations

import pytest

from engine_figures import H200 as FIGURES
from jitter_world import Group
from pingpong_bus.messages import StepCounts
from pingpong_bus.step_times import bucket_of
from pingpongd.jitter_baseline import MOST_CELLS, Baseline, quantile_ms

ONE = ("decode", 1, 0)


def learnt(ms: float, seconds: int = 20, **how: float) -> Baseline:
    group, baseline = Group(1, step_ms=ms), Baseline()
    for _ in range(seconds):
        baseline.learn([group.counts(context=0)])
    return baseline


def counts(ms: float, tokens: int = 50, decodes: int = 1, context: int = 0) -> StepCounts:
    return StepCounts(
        kind="decode",
        decodes=decodes,
        context=context,
        buckets={bucket_of(ms): tokens},
        worst_ms=ms,
        total_ms=ms * tokens,
    )


def test_a_median_is_interpolated_within_its_bucket() -> None:
    assert quantile_ms({}, 0.5) == 0.0
    for ms in (8.6, 16.0, 43.0):
        tight = quantile_ms({bucket_of(ms): 100}, 0.5)
        assert tight == pytest.approx(ms, rel=0.05)
    low, high = quantile_ms({50: 90, 51: 10}, 0.5), quantile_ms({50: 10, 51: 90}, 0.5)
    assert 1.03 < high / low < 1.1


def test_a_cell_is_known_after_some_seconds_and_a_hundred_tokens() -> None:
    baseline = Baseline()
    for second in range(5):
        assert baseline.known_ms(ONE) is None, second
        baseline.learn([counts(16.0)])
    assert baseline.known_ms(ONE) == pytest.approx(16.0, rel=0.05)
    usual = baseline.usual(ONE)
    assert usual is not None
    assert (usual.known, usual.room) == (True, 1.0)


def test_the_past_decays() -> None:
    baseline = learnt(16.0, 200)
    for _ in range(3000):
        baseline.learn([counts(12.0, 80)])
    assert baseline.known_ms(ONE) == pytest.approx(12.0, rel=0.05)


def test_only_decodes_make_the_usual() -> None:
    baseline = learnt(16.0)
    appends = StepCounts(kind="appends", decodes=1, context=0, buckets={90: 5000}, worst_ms=200.0, total_ms=1e6)
    prompts = StepCounts(kind="prompts", decodes=1, context=0, buckets={90: 5000}, worst_ms=900.0, total_ms=1e6)
    baseline.learn([appends, prompts])
    assert baseline.known_ms(ONE) == pytest.approx(16.0, rel=0.05)
    assert "prompts" not in baseline.worst
    assert baseline.worst["appends"] == pytest.approx(200.0 / 16.0, rel=0.05)


def test_memory_is_bounded() -> None:
    baseline = Baseline()
    for cell in range(3 * MOST_CELLS):
        for _ in range(6):
            baseline.learn([counts(16.0, context=1024 * cell)])
    known = [cell for cell in range(3 * MOST_CELLS) if baseline.known_ms(("decode", 1, 1024 * cell)) is not None]
    assert known == list(range(2 * MOST_CELLS, 3 * MOST_CELLS))


def test_a_new_cell_is_guessed_from_figures_and_that_guess_has_room() -> None:
    baseline = Baseline(FIGURES)
    guess = baseline.usual(ONE)
    assert guess is not None
    assert not guess.known
    assert guess.room > 1.5
    assert guess.ms == pytest.approx(FIGURES.decode[0][1], rel=0.2)
    assert baseline.usual(("decode", 1, 1 << 22)) is None  # far beyond what was measured
    assert baseline.usual(("decode", 129, 0)) is None


def test_what_known_cells_take_corrects_the_guess_for_others() -> None:
    baseline = Baseline(FIGURES)
    before = baseline.usual(("decode", 1, 1024))
    assert before is not None
    for _ in range(10):
        baseline.learn([counts(2.0 * FIGURES.decode[0][1])])
    after = baseline.usual(("decode", 1, 1024))
    assert after is not None
    assert after.ms == pytest.approx(2.0 * before.ms, rel=0.2)
    assert after.room < before.room


def test_without_figures_or_peers_nothing_is_known_of_a_new_cell() -> None:
    assert Baseline().usual(ONE) is None


def test_a_context_near_by_is_a_guess_and_one_far_away_is_none() -> None:
    baseline = learnt(16.0)
    guess = baseline.usual(("decode", 1, 1024))
    assert guess is not None
    assert (guess.known, guess.room) == (False, 1.6)
    assert guess.ms == pytest.approx(16.0, rel=0.05)
    assert baseline.usual(("decode", 1, 8192)) is None
    assert baseline.usual(("decode", 2, 0)) is None


def test_peers_tell_what_a_new_cell_takes() -> None:
    guess = Baseline().usual(ONE, [learnt(10.0)])
    assert guess is not None
    assert not guess.known
    assert guess.ms == pytest.approx(10.0, rel=0.05)


def test_a_group_that_was_always_slow_is_held_against_its_peers() -> None:
    slow = learnt(20.0)
    alone, beside = slow.usual(ONE), slow.usual(ONE, [learnt(10.0), learnt(10.4), learnt(30.0)])
    assert alone is not None
    assert beside is not None
    assert alone.ms == pytest.approx(20.0, rel=0.05)
    assert beside.ms == pytest.approx(1.2 * 10.4, rel=0.05)


def test_peers_do_not_count_where_cells_hold_different_numbers_of_answers() -> None:
    slow, peer = Baseline(), Baseline()
    for _ in range(10):
        slow.learn([counts(30.0, decodes=5)])
        peer.learn([counts(15.0, decodes=5)])
    usual = slow.usual(("decode", 5, 0), [peer])
    assert usual is not None
    assert usual.ms == pytest.approx(30.0, rel=0.05)


def test_forgetting_makes_all_new() -> None:
    baseline = learnt(16.0)
    baseline.forget()
    assert baseline.usual(ONE) is None
    assert baseline.worst == {}
