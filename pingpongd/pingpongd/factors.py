"""What chains have taken lately, over what was predicted: corrects what the cost model does not know. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import log2
from statistics import fmean
from typing import NamedTuple

from pingpong_bus.messages import Placement, Prediction
from pingpongd.shapes import ChainShape

LEAST, MOST = 0.7, 1.5
"""Bounds of a factor: beyond them something is wrong that no factor mends."""
WEIGHT = 0.2
"""Of the latest chain in the decayed mean."""
FADING = 0.02
"""By this part the factors of the placements that a chain did not take fade, so that they are tried again one day."""
SURPRISE = 0.25
"""A chain counts with at most this deviation from the mean: one that met a busy host says little."""
_MOST_KEPT = 512

Kind = tuple[object, ...]
"""Chains of one kind err alike: those of one form, whose lengths differ by less than a factor of two."""


class _Key(NamedTuple):
    kind: Kind
    placement: Placement
    groups: frozenset[str]


class Factors:
    """A decayed mean of actual over predicted, per kind of chain, placement and set of groups."""

    def __init__(self) -> None:
        self._means: OrderedDict[_Key, float] = OrderedDict()

    def factor(self, kind: Kind, placement: Placement, groups: Iterable[str]) -> float:
        """By what a prediction is to be multiplied.

        What was never run takes the mean of what ran in series: of the same kind on some of its groups or on any, or
        of all kinds on these groups. So nothing looks better than series only because less is known of it, nor series
        worse because another placement did worse than predicted.
        """
        key = _Key(kind, placement, frozenset(groups))
        found = self._means.get(key)
        return self._usual(key, self._alike(kind)) if found is None else found

    def learn(self, kind: Kind, placement: Placement, groups: Iterable[str], ratio: float) -> None:
        """A chain has taken `ratio` times what was predicted without a factor."""
        key = _Key(kind, placement, frozenset(groups))
        before = self.factor(kind, placement, key.groups)
        bounded = min(before * (1 + SURPRISE), max(before * (1 - SURPRISE), ratio))
        alike = self._alike(kind)
        for other, mean in alike:
            self._means[other] += FADING * (self._usual(other, alike) - mean)
        self._means[key] = min(MOST, max(LEAST, before + WEIGHT * (bounded - before)))
        self._means.move_to_end(key)
        while len(self._means) > _MOST_KEPT:
            self._means.popitem(last=False)

    def forget(self, group: str) -> None:
        """The group's engine was measured anew: nothing that was learned with it holds any more."""
        for key in [key for key in self._means if group in key.groups]:
            del self._means[key]

    def _usual(self, key: _Key, alike: Sequence[tuple[_Key, float]]) -> float:
        """What it takes that was never run; `alike`: what is known of its kind."""
        serial = [(other.groups, mean) for other, mean in alike if other.placement == "serial" and other != key]
        found = [mean for groups, mean in serial if not groups.isdisjoint(key.groups)] or [mean for _, mean in serial]
        if not found:
            found = [
                mean
                for other, mean in self._means.items()
                if other.placement == "serial" and other != key and not other.groups.isdisjoint(key.groups)
            ]
        return fmean(found) if found else 1.0

    def _alike(self, kind: Kind) -> list[tuple[_Key, float]]:
        return [(key, mean) for key, mean in self._means.items() if key.kind == kind]


def kind_of(shape: ChainShape, prediction: Prediction, *, busy: bool) -> Kind:
    """The kind of a chain.

    Args:
        shape: its form and lengths.
        prediction: of any placement, without a factor: says how much of its prompts has to be computed.
        busy: other chains run on its groups.
    """
    return (
        shape.upstreams,
        _doublings([shape.prompt_tokens(index) for index in range(len(shape.outputs))]),
        _doublings(shape.outputs),
        _doublings([prediction.prefill_ms + prediction.hidden_ms]),
        shape.grid,
        busy,
        shape.models,
        any(tokens > 1.0 for tokens, _ in shape.paces),
    )


def _doublings(values: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(log2(max(1.0, value))) for value in values)
