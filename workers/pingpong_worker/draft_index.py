"""Finds where two tokens stand one behind the other in a text, in logarithmic time, without a loop over it.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

LONGEST: Final = 32
"""How far back a match is followed, in tokens: what matches so far is as good as certain."""


class PairIndex:
    """All pairs of neighbours of a text that does not change.

    Args:
        ids: its tokens.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids: Ids = np.asarray(ids, dtype=np.int64)
        pairs = (self.ids[:-1] << 32) | self.ids[1:]
        self._order = np.argsort(pairs, kind="stable")
        self._sorted = pairs[self._order]

    def after(self, first: int, second: int) -> Ids:
        """Where the text goes on behind each place of the pair, rising: positions of what follows it."""
        pair = (first << 32) | second
        low, high = np.searchsorted(self._sorted, pair), np.searchsorted(self._sorted, pair, side="right")
        return self._order[low:high] + 2

    def longest(self, recent: Sequence[int], least: int = 2) -> tuple[int, Ids]:
        """The longest end of `recent` that stands in the text, with a token behind it.

        Args:
            recent: what was written last, the latest token last.
            least: tokens that a match has at least; 2 or more.

        Returns:
            Its length, `LONGEST` at most and 0 where there is none, and the positions behind it, rising.
        """
        if len(recent) < least:
            return 0, self._order[:0]
        found = self.after(recent[-2], recent[-1])
        found = found[found < len(self.ids)]
        length = 2
        while len(found) and length < min(LONGEST, len(recent)):
            reach = found[found > length]
            longer = reach[self.ids[reach - length - 1] == recent[-1 - length]]
            if not len(longer):
                break
            found, length = longer, length + 1
        return (length, found) if len(found) and length >= least else (0, found[:0])


class GrowingPairs:
    """The same of a text that grows, for the latest places of each pair only."""

    _PLACES: Final = 8

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}

    def extend(self, ids: Sequence[int]) -> None:
        """The text goes on."""
        for token in ids:
            if self.ids:
                places = self._places.setdefault((self.ids[-1], token), [])
                places.append(len(self.ids) + 1)
                del places[: -self._PLACES]
            self.ids.append(token)

    def longest(self, least: int = 2) -> tuple[int, list[int]]:
        """The longest end of the text that stands in it once more, before; as `PairIndex.longest`."""
        ids = self.ids
        if len(ids) < least:
            return 0, []
        best, found = 0, []
        for place in self._places.get((ids[-2], ids[-1]), ()):
            if place == len(ids):
                continue  # the end itself
            length = 2
            while length < min(LONGEST, place) and ids[place - 1 - length] == ids[-1 - length]:
                length += 1
            if length > best:
                best, found = length, [place]
            elif length == best:
                found.append(place)
        return (best, found) if best >= least else (0, [])
