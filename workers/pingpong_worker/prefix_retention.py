"""Which static beginnings of prompts a prefix cache keeps from eviction: those worth most for the room they take.

A prefix is a chain of blocks, each known by a hash of itself and of all before it; prompts that begin alike share
blocks. A prefix is worth what computing it again would cost, as often as it is expected back; each of its blocks has an
equal share of that, and one that several prefixes begin with has a share of each. So no block is worth more than the
one before it, and what is given up first is always an end, never a beginning that something behind it needs.

What is expected halves with every `HALF_LIFE_S` in which a prefix does not come. All fade alike, so that their order
stays and nothing has to be recomputed as time passes: a value is kept as what it would be at `_origin` (forward decay,
Cormode et al. 2009).

Pure: times in seconds come from whoever has a clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from pingpong_worker.step_prices import attention_work

HALF_LIFE_S: Final = 4 * 3600.0
"""Of what is expected; `prefix_value.py` in the supervisor counts arrivals with the same."""
FORGOTTEN: Final = 0.01
"""Returns an hour: a prefix of which fewer are expected is not kept any more."""
_FRESH_S = 10.0
"""A prefix that was told of so lately is not told anew: it is said in every step of every request."""
_MOST = 1024
"""Prefixes that are known at once."""
_REBASE = 256.0
"""Half-lives after which values are counted from a new origin, for the numbers grow with them."""


Key = TypeVar("Key", bound=Hashable)
"""What a block, and all before it, is known by: a hash."""


@dataclass(slots=True)
class _Prefix(Generic[Key]):
    keys: tuple[Key, ...]
    kept: int
    """Of its blocks from the beginning."""
    reuse: float
    """Times an hour, when it was last told of."""
    seen: float
    share: float
    """Of its value for each block, as at the origin."""


@dataclass(slots=True)
class _Block:
    depth: int
    """Blocks before it."""
    value: float = 0.0
    holders: int = 0
    """Prefixes that keep it."""


class PrefixRetention(Generic[Key]):
    """Decides what is kept.

    Args:
        budget: blocks that may be kept.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._prefixes: dict[Key, _Prefix[Key]] = {}
        """By their last block. One of which nothing is kept is remembered for a while, or it would be told of in every
        step and weighed anew."""
        self._blocks: dict[Key, _Block] = {}
        self._origin: float | None = None

    def __len__(self) -> int:
        """Blocks that are kept, in the cache or not."""
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        """Whether a block is kept."""
        return key in self._blocks

    def is_fresh(self, last: Key, reuse: float, now: float) -> bool:
        """Whether telling of a prefix once more would change nothing.

        Args:
            last: its last block.
            reuse: how many times an hour it is expected.
            now: in seconds.
        """
        known = self._prefixes.get(last)
        # Two runs of a chain at once expect other numbers of more: the greater counts, or each would correct the other.
        return known is not None and FORGOTTEN <= reuse <= known.reuse and now - known.seen < _FRESH_S

    def note(self, keys: Sequence[Key], reuse: float, cost: float, now: float) -> list[Key]:
        """A prefix is in use.

        Args:
            keys: its blocks, from the beginning.
            reuse: how many times an hour it is expected to come again.
            cost: seconds that computing it again would take.
            now: in seconds.

        Returns:
            Blocks that are not kept any more.
        """
        if not keys or self._budget <= 0:
            return []
        dropped = self._forget_faded(now)
        self._rebase(now)
        old = self._prefixes.pop(keys[-1], None)
        if old is not None:
            dropped += self._shorten(old, old.kept)
        if reuse >= FORGOTTEN:
            grown = math.exp2((now - (self._origin or 0.0)) / HALF_LIFE_S)
            share = reuse * cost * grown / len(keys)
            self._add(_Prefix(tuple(keys), len(keys), reuse, now, share))
        while len(self._prefixes) > _MOST:
            least = min(self._prefixes, key=lambda last: self._prefixes[last].share)
            gone = self._prefixes.pop(least)
            dropped += self._shorten(gone, gone.kept)
        while (excess := len(self._blocks) - self._budget) > 0:
            dropped += self._drop(excess)
        return [key for key in dropped if key not in self._blocks]

    def least(self, keys: Iterable[Key], count: int) -> list[Key]:
        """Of some blocks, those that are worth least: what to give up where there is no other memory.

        Ends come before beginnings, and what is not kept before all.
        """
        return heapq.nsmallest(count, keys, key=self._rank)

    def give_up(self, keys: Collection[Key]) -> None:
        """Keep some blocks no more, until their prefixes are told of anew."""
        given = frozenset(keys)
        for one in self._prefixes.values():
            self._shorten(one, sum(1 for _ in itertools.takewhile(given.__contains__, _backwards(one))))

    def clear(self) -> None:
        """Keep nothing: the cache was emptied."""
        self._prefixes.clear()
        self._blocks.clear()

    def _rank(self, key: Key) -> tuple[float, int]:
        block = self._blocks.get(key)
        return (block.value, -block.depth) if block is not None else (-math.inf, 0)

    def _add(self, prefix: _Prefix[Key]) -> None:
        self._prefixes[prefix.keys[-1]] = prefix
        for depth, key in enumerate(prefix.keys):
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = _Block(depth)
            block.value += prefix.share
            block.holders += 1

    def _shorten(self, prefix: _Prefix[Key], blocks: int) -> list[Key]:
        """Let a prefix keep so many blocks fewer, from its end; gives those that nothing keeps any more."""
        gone: list[Key] = []
        for key in reversed(prefix.keys[prefix.kept - blocks : prefix.kept]):
            block = self._blocks[key]
            block.holders -= 1
            block.value -= prefix.share
            if block.holders == 0:
                del self._blocks[key]
                gone.append(key)
        prefix.kept -= blocks
        return gone

    def _drop(self, most: int) -> list[Key]:
        """Give up the end that is worth least, of at most so many blocks; some of them may be kept by others still."""
        found = [one for one in self._prefixes.values() if one.kept]
        # Of equal ones the deeper, that no beginning goes before its end; then the one that was told of longest ago.
        least = min(found, key=lambda one: self._rank(one.keys[one.kept - 1]))
        end = least.keys[least.kept - 1]
        holders = self._blocks[end].holders
        alike = itertools.takewhile(lambda key: self._blocks[key].holders == holders, _backwards(least))
        blocks = sum(1 for _ in itertools.islice(alike, most))
        gone: list[Key] = []
        for one in [one for one in found if one.keys[one.kept - 1] == end]:
            gone += self._shorten(one, min(blocks, one.kept))
        return gone

    def _forget_faded(self, now: float) -> list[Key]:
        faded = [
            last
            for last, one in self._prefixes.items()
            if one.reuse * math.exp2((one.seen - now) / HALF_LIFE_S) < FORGOTTEN
            or (one.kept == 0 and now - one.seen >= _FRESH_S)
        ]
        return [key for one in map(self._prefixes.pop, faded) for key in self._shorten(one, one.kept)]

    def _rebase(self, now: float) -> None:
        if self._origin is None:
            self._origin = now
        if (now - self._origin) / HALF_LIFE_S < _REBASE:
            return
        scale = math.exp2((self._origin - now) / HALF_LIFE_S)
        self._origin = now
        for prefix in self._prefixes.values():
            prefix.share *= scale
        for block in self._blocks.values():
            block.value *= scale


def _backwards(prefix: _Prefix[Key]) -> Iterator[Key]:
    return (prefix.keys[at] for at in range(prefix.kept - 1, -1, -1))


def prefill_seconds(tokens: int, chunk: int, price: Callable[[int, float], float]) -> float:
    """What computing a prompt's first `tokens` takes, in chunks.

    Args:
        tokens: from the beginning.
        chunk: tokens of a step at most.
        price: seconds of a step of so many tokens that look at so much context together (`attention_work`).
    """
    seconds = 0.0
    for start in range(0, tokens, chunk):
        size = min(chunk, tokens - start)
        seconds += price(size, attention_work(start, size))
    return seconds
