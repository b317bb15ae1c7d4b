"""What chains have taken lately, over what was predicted: corrects what the cost model does not know. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from pingpong_bus.messages import Placement

LEAST, MOST = 0.7, 1.5
"""Bounds of a factor: beyond them something is wrong that no factor mends."""
_WEIGHT = 0.3
"""Of the latest chain in the decayed mean."""


class Key(NamedTuple):
    """What factors are kept by."""

    placement: Placement
    groups: frozenset[str]
    alone: bool
    """Its hops had their groups to themselves, as on a grid."""


class Factors:
    """A decayed mean of actual over predicted, per placement and set of groups."""

    def __init__(self) -> None:
        self._means: dict[Key, float] = {}

    def factor(self, placement: Placement, groups: Iterable[str], *, alone: bool = False) -> float:
        """By what a prediction is to be multiplied.

        What was never run takes the mean of what ran in series, on some of its groups or else on any: nothing looks
        better than series only because less is known of it, and series never worse because another did worse than
        predicted.
        """
        key = Key(placement, frozenset(groups), alone)
        found = self._means.get(key)
        if found is None:
            serial = {other.groups: mean for other, mean in self._means.items() if other.placement == "serial"}
            near = [mean for held, mean in serial.items() if not held.isdisjoint(key.groups)]
            found = fmean(near or serial.values() or [1.0])
        return min(MOST, max(LEAST, found))

    def learn(self, placement: Placement, groups: Iterable[str], ratio: float, *, alone: bool = False) -> None:
        """A chain has taken `ratio` times what was predicted without a factor."""
        key = Key(placement, frozenset(groups), alone)
        before = self.factor(placement, key.groups, alone=alone)
        self._means[key] = before + _WEIGHT * (min(MOST, max(LEAST, ratio)) - before)

    def forget(self, group: str) -> None:
        """The group's engine was measured anew: nothing that was learned with it holds any more."""
        self._means = {key: mean for key, mean in self._means.items() if group not in key.groups}
