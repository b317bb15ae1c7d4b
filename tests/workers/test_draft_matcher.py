"""Guesses: the longest match in earlier runs, the prompt and the answer itself, and what is learnt of how often it is
right."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_worker.draft_index import LONGEST, GrowingPairs, PairIndex
from pingpong_worker.draft_matcher import DraftMatcher, GuessOdds

few_words = st.lists(st.integers(0, 3), max_size=60)


def naive(text: list[int], recent: list[int]) -> tuple[int, list[int]]:
    """The longest end of `recent` that is in `text` with something behind it, by trying all."""
    for length in range(min(LONGEST, len(recent)), 1, -1):
        end = recent[-length:]
        found = [at + length for at in range(len(text) - length) if text[at : at + length] == end]
        if found:
            return length, found
    return 0, []


@given(few_words, few_words)
def test_an_index_finds_what_a_search_of_everything_finds(text: list[int], recent: list[int]) -> None:
    length, found = PairIndex(text).longest(recent)
    assert (length, found.tolist()) == naive(text, recent)


@given(few_words)
def test_a_growing_text_finds_its_end_once_more(text: list[int]) -> None:
    pairs = GrowingPairs()
    pairs.extend(text)
    length, found = pairs.longest()
    whole, places = naive(text, text)
    if len(places) < 8:  # more places of a pair are not remembered
        assert length <= whole
    for place in found:
        assert text[place - length : place] == text[-length:]
        assert place < len(text)


def test_ids_of_large_vocabularies_are_told_apart() -> None:
    big = 2**31 - 2
    text = [big, 1, 7, 0, big, 9, big, 1, 8, 5]
    assert PairIndex(text).longest([3, big, 1])[1].tolist() == [2, 8]
    assert PairIndex(text).longest([1, big])[0] == 0


def test_an_answer_is_taken_to_begin_as_the_latest_run() -> None:
    matcher = DraftMatcher([1, 2, 3], [[10, 11, 12, 13], [20, 21]])
    ids, chances = matcher.guess(3)
    assert ids == [10, 11, 12]
    assert chances == sorted(chances, reverse=True)
    matcher.extend([10, 11])
    assert matcher.guess(8)[0] == [12, 13]


def test_a_copy_is_found_again_behind_a_difference() -> None:
    run = list(range(100, 140))
    matcher = DraftMatcher([], [run])
    matcher.extend(run[:10])
    matcher.extend([7, 8])
    assert matcher.guess(4) == ([], [])
    matcher.extend(run[12:14])
    assert matcher.guess(3)[0] == run[14:17]


def test_the_prompt_is_copied_and_the_seam_counts() -> None:
    matcher = DraftMatcher([5, 6, 7, 8, 9, 1, 5], [])
    matcher.extend([6])  # 5 6 stands in the prompt; its 5 is the prompt's last token
    assert matcher.guess(3)[0] == [7, 8, 9]


def test_of_places_that_match_alike_the_next_one_is_taken() -> None:
    prompt = [1, 2, 50, 9, 1, 2, 60, 9, 1, 2, 70]
    matcher = DraftMatcher(prompt, [])
    matcher.extend([1, 2, 50, 9, 1, 2])
    assert matcher.guess(1)[0] == [60]


def test_what_repeats_itself_goes_on_repeating() -> None:
    matcher = DraftMatcher([], [])
    matcher.extend([4, 5, 6, 4, 5, 6, 4, 5])
    assert matcher.guess(7)[0] == [6, 4, 5, 6, 4, 5, 6]


def test_odds_follow_what_is_seen_and_others_begin_with_them() -> None:
    usual = GuessOdds()
    before = usual.share("prompt", 4)
    odds = GuessOdds(usual)
    for _ in range(40):
        odds.learn("prompt", 4, False)
    assert odds.share("prompt", 4) < 0.1
    assert usual.share("prompt", 4) < before / 2
    assert GuessOdds(usual).share("prompt", 4) == pytest.approx(usual.share("prompt", 4), abs=0.05)
    for _ in range(100):
        odds.learn("prompt", 4, True)
    assert odds.share("prompt", 4) > 0.8
    assert odds.share("run", 4) > 0.5, "another source keeps its own"


def test_a_source_that_misleads_gives_way() -> None:
    """Two sources match alike; the one that was right is taken from then on."""
    rng = random.Random(1)
    pairs = [(2 * n, 2 * n + 1) for n in range(100, 160)]
    run = list(itertools.chain.from_iterable((a, b, 7) for a, b in pairs))
    prompt = list(itertools.chain.from_iterable((a, b, rng.randrange(10, 90)) for a, b in pairs))
    matcher = DraftMatcher(prompt, [run])
    taken = []
    for number, (a, b) in enumerate(pairs):
        matcher.extend([a, b])
        taken.append(matcher.guess(1)[0])
        matcher.extend([prompt[3 * number + 2]])
    assert taken[0] == [7]
    assert taken[-1] == [prompt[-1]]


@given(few_words, st.lists(few_words, max_size=3), few_words, st.data())
def test_guesses_never_hang_on_how_the_tokens_came(
    prompt: list[int], runs: list[list[int]], answer: list[int], data: st.DataObject
) -> None:
    at_once, one_by_one = DraftMatcher(prompt, runs), DraftMatcher(prompt, runs)
    at_once.extend(answer)
    left = list(answer)
    while left:
        count = data.draw(st.integers(1, len(left)))
        one_by_one.extend(left[:count])
        one_by_one.guess(5)
        del left[:count]
    assert at_once.guess(5) == one_by_one.guess(5)
    assert at_once.written == len(answer)


def test_a_long_prompt_costs_no_more_than_it_must() -> None:
    """A token is followed without looking at the prompt again: what is looked up is counted, not the time."""
    rng = random.Random(3)
    prompt = [rng.randrange(50_000) for _ in range(20_000)]
    matcher = DraftMatcher(prompt, [])
    looked = 0
    find = matcher._find

    def counted() -> object:
        nonlocal looked
        looked += 1
        return find()

    matcher._find = counted  # type: ignore[method-assign, assignment]
    matcher.extend(prompt[5_000:7_000])
    assert looked <= 3


def test_a_copy_is_kept_to_and_none_looked_for_where_there_is_no_time() -> None:
    run = list(range(100, 130))
    matcher = DraftMatcher([1, 2, 3], [run])
    matcher.extend(run[:5], look=False)
    assert matcher.guess(2)[0] == run[5:7]
    matcher.extend([7, 105, 106], look=False)
    assert matcher.guess(2)[0] == []
    matcher.extend([107])
    assert matcher.guess(2)[0] == run[8:10]
