"""Long runs of tokens that stand in several prompts: documents that agents share. Pure.

A run of `at_least` tokens holds a whole block of half that length wherever blocks begin, so it is enough to index every
prompt's blocks and to slide a window over the prompts after it. A window's fingerprint is the sum of a hash of each of
its tokens: the difference of two prefix sums, whatever its length. Windows with the fingerprint of a block are compared
token by token, so a collision costs time and finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import sub

import msgspec

MAX_TOKENS = 500_000
"""Of all texts together; what goes beyond is not looked at, for the caller waits: they take about 0.1 s."""

_MAX_SIGHTINGS = 4
"""Places of a block that are kept: text that repeats itself more often is no document."""
_FREE_COMPARISONS = 100_000
_COMPARISONS_PER_TOKEN = 8
"""What texts may cost that seem to match everywhere and do not."""
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads neighbouring ids
_OFFSET = 40503  # makes the hash quadratic: sums of ids alone would often be equal
_MASK = 2**64 - 1


class SharedRun(msgspec.Struct, frozen=True):
    """The same tokens in several texts, not at the beginning of all."""

    members: tuple[int, ...]
    """Indices of the texts, rising, two at least."""
    starts: tuple[int, ...]
    """Per member, where the run begins, in tokens."""
    tokens: int
    """Its length."""


class _Match(msgspec.Struct, frozen=True):
    """The same tokens in two texts, and different ones before and after them."""

    first: int
    first_start: int
    second_start: int
    tokens: int


class _Blocks:
    """Where the blocks of the texts so far stand."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.texts: list[tuple[int, ...]] = []
        self._places: dict[int, list[tuple[int, int]]] = {}
        self._room = _FREE_COMPARISONS

    def add(self, text: tuple[int, ...]) -> list[_Match]:
        """Take a text in, and return what it has in common with earlier ones: runs of twice the width at least."""
        hashes = [token * (token + _OFFSET) * _MULTIPLIER & _MASK for token in text]
        sums = list(accumulate(hashes, initial=0))
        matches = list(self._matches(text, sums))
        index, width = len(self.texts), self.width
        self.texts.append(text)
        for start in range(0, len(text) - width + 1, width):
            if not any(it.second_start <= start and start + width <= it.second_start + it.tokens for it in matches):
                places = self._places.setdefault(sums[start + width] - sums[start], [])
                if len(places) < _MAX_SIGHTINGS:
                    places.append((index, start))
        return matches

    def _matches(self, text: tuple[int, ...], sums: Sequence[int]) -> Iterator[_Match]:
        done = 0
        self._room += _COMPARISONS_PER_TOKEN * len(text)
        places = self._places
        for start, fingerprint in enumerate(map(sub, sums[self.width :], sums)):
            if fingerprint not in places or start < done:
                continue
            found = [self._extend(index, at, text, start) for index, at in places[fingerprint]]
            best = max(found, key=lambda match: match.tokens)
            if best.tokens >= 2 * self.width:
                yield best
                done = best.second_start + best.tokens - self.width + 1
            self._room -= sum(match.tokens + self.width for match in found)
            if self._room < 0:
                return

    def _extend(self, index: int, at: int, text: tuple[int, ...], start: int) -> _Match:
        """The longest match around a block that has the fingerprint of a window; of no tokens where they differ."""
        other, width = self.texts[index], self.width
        if other[at : at + width] != text[start : start + width]:
            return _Match(index, at, start, 0)
        before = 0
        while before < at and before < start and other[at - before - 1] == text[start - before - 1]:
            before += 1
        after = width
        while at + after < len(other) and start + after < len(text) and other[at + after] == text[start + after]:
            after += 1
        return _Match(index, at - before, start - before, before + after)


def shared_runs(texts: Sequence[Sequence[int]], at_least: int) -> list[SharedRun]:
    """Runs that two texts or more hold, but for those that all of them begin with: prefix caches keep these already.

    A run is told once, as far as it is the same in all its texts. First comes what is worth most: its length times the
    texts that need not compute it again.

    Args:
        at_least: tokens of a run, 2 or more; shorter ones are not told, an odd number counts as the next even one.
    """
    blocks = _Blocks((at_least + 1) // 2)
    runs: list[SharedRun] = []
    room = MAX_TOKENS
    for index, text in enumerate(texts):
        for match in blocks.add(tuple(text[:room])):
            if match.first_start or match.second_start:
                _gather(runs, index, match, at_least)
        room = max(room - len(text), 0)
    return sorted(runs, key=_worth, reverse=True)


def _gather(runs: list[SharedRun], index: int, match: _Match, at_least: int) -> None:
    """Add a text to the run that it shares, where that makes it worth more; else the two have a run of their own."""
    for at, run in enumerate(runs):
        if run.members[0] != match.first or index in run.members:
            continue
        start = max(run.starts[0], match.first_start)
        tokens = min(run.starts[0] + run.tokens, match.first_start + match.tokens) - start
        skipped = start - run.starts[0]
        wider = SharedRun(
            (*run.members, index),
            (*(each + skipped for each in run.starts), match.second_start + start - match.first_start),
            tokens,
        )
        if tokens >= at_least and _worth(wider) > _worth(run):
            runs[at] = wider
            return
    runs.append(SharedRun((match.first, index), (match.first_start, match.second_start), match.tokens))


def _worth(run: SharedRun) -> int:
    return run.tokens * (len(run.members) - 1)
