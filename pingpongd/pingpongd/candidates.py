"""Which placements of a chain there are to choose from. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from pingpong_bus.messages import Mode, Placement
from pingpongd.shapes import ChainShape, GroupView

FEW_GROUPS = 8
"""With more than these, not all are predicted for."""
MOST_OF_MANY = 2
"""Then so many of each kind of placement: on the least busy groups, and of these on those that hold most of the chain.
A prediction takes 0.1 ms on idle groups, and 1.5 ms beside as many chains as are looked at."""
MOST_WALKED = 4000
"""Sizes of all chains that are walked through to place one (see `ChainShape.size`): the event loop waits some 60 ms."""
MOST_BESIDE = 100
"""Sizes of the running chains that a prediction looks at."""
_MOST_COMBINED = 256
"""Of the groups of several models, so many combinations are sorted."""


def candidates(
    shape: ChainShape, mode: Mode, groups: Sequence[GroupView], number: int
) -> list[tuple[Placement, tuple[str, ...]]]:
    """Placements with the group of each agent, which serves the agent's model; of a step, which takes none, "".

    Args:
        shape: the chain.
        mode: what is asked for; "auto": any.
        groups: to choose from.
        number: of the chain; see `turned`.
    """
    found = list[tuple[Placement, tuple[str, ...]]]()
    most = FEW_GROUPS if len(groups) <= FEW_GROUPS else MOST_OF_MANY
    most = max(1, min(most, MOST_WALKED // (3 * (shape.size + MOST_BESIDE))))
    orders = {model: by_preference(shape, views, number) for model, views in by_model(shape, groups).items()}
    if mode in ("auto", "serial"):
        found += [("serial", names) for names in one_each(shape, orders, most)]
    # Of several agents, also those that read nobody are better side by side: series has them one after the other.
    if mode == "overlap" or (mode == "auto" and shape.grid is None and crowded(shape)):
        found += [("overlap", names) for names in one_each(shape, able_to_overlap(shape, orders), most)]
    several = sum(not shape.is_step(at) for at in range(len(shape.upstreams))) > 1
    if without_second(shape, groups) is None and (mode == "ping-pong" or (mode == "auto" and several)):
        # Among many groups no ring of neighbours may be idle, while two groups somewhere are: these alternate.
        few = [view for order in orders.values() for view in order[:2]]
        pairs = rings(shape, few, 0) if any(len(order) > 2 for order in orders.values()) else []
        around = sorted(
            [*rings(shape, groups, number), *pairs],
            key=lambda views: (max(view.hops for view in views if view is not None), -held_tokens(shape, views)),
        )
        apart = {names_of(views) for views in around[:most]}
        # With a group of each model it may come to the same.
        found = [(placement, names) for placement, names in found if placement != "overlap" or names not in apart]
        found += [("ping-pong", names_of(views)) for views in around[:most]]
    return found


def by_model(shape: ChainShape, groups: Sequence[GroupView]) -> dict[str, list[GroupView]]:
    """The groups that serve each model that the chain needs, in their order."""
    return {model: [view for view in groups if view.model == model] for model in shape.wanted}


def crowded(shape: ChainShape) -> frozenset[str]:
    """The models of which the chain has several agents: they share a group where there is one for each model."""
    agents = [shape.model(at) for at in range(len(shape.upstreams)) if not shape.is_step(at)]
    return frozenset(model for model in shape.wanted if agents.count(model) > 1)


def able_to_overlap(shape: ChainShape, orders: Mapping[str, Sequence[GroupView]]) -> dict[str, list[GroupView]]:
    """By model, the groups on which its agents may overlap: any, for the only agent of a model has it to itself."""
    shared = crowded(shape) if len(shape.wanted) > 1 else shape.wanted
    return {model: [view for view in views if view.overlap or model not in shared] for model, views in orders.items()}


def without_second(shape: ChainShape, groups: Sequence[GroupView]) -> int | None:
    """An agent that no ping-pong can be played with: there is no group of its model but that of the one that it reads.

    None where there is no such agent.
    """
    found = by_model(shape, groups)
    alone = sum(map(len, found.values())) < 2
    for index, sources in enumerate(shape.sources()):
        if shape.is_step(index):
            continue
        model = shape.model(index)
        if alone or (sources and shape.model(max(sources)) == model and len(found[model]) < 2):
            return index
    return None


def one_each(shape: ChainShape, orders: Mapping[str, Sequence[GroupView]], most: int) -> list[tuple[str, ...]]:
    """Ways to run all agents of a model on one group, the best of each model first; of models that are not among them,
    on none.

    Args:
        shape: the chain.
        orders: by model, its groups, the best first.
        most: how many of them.
    """
    width = max(1, int(_MOST_COMBINED ** (1 / max(1, len(orders)))))
    ranks = product(*(range(min(len(views), most, width)) for views in orders.values()))
    ways = sorted(ranks, key=lambda way: (sum(way), way))[:most]
    return [
        names_of([None if shape.is_step(at) else at_model.get(shape.model(at)) for at in range(len(shape.upstreams))])
        for at_model in (
            {model: views[rank] for (model, views), rank in zip(orders.items(), way, strict=True)} for way in ways
        )
    ]


def names_of(views: Sequence[GroupView | None]) -> tuple[str, ...]:
    """Names of groups; "" where there is none."""
    return tuple("" if view is None else view.name for view in views)


def turned(groups: Sequence[GroupView], number: int) -> list[GroupView]:
    """The groups from the k-th on."""
    return [groups[(number + step) % len(groups)] for step in range(len(groups))]


def by_preference(shape: ChainShape, groups: Sequence[GroupView], number: int) -> list[GroupView]:
    """The least busy group first; among those the one with most of the chain in its cache, then the k-th."""
    count = len(shape.upstreams)
    return sorted(turned(groups, number), key=lambda view: (view.hops, -held_tokens(shape, (view,) * count)))


def ring(shape: ChainShape, groups: Sequence[GroupView], number: int) -> tuple[str, ...]:
    """Of all rings the one whose caches hold most; the first of equals, from group k mod N."""
    return names_of(max(rings(shape, groups, number), key=lambda views: held_tokens(shape, views)))


def rings(shape: ChainShape, groups: Sequence[GroupView], number: int) -> list[list[GroupView | None]]:
    """Agent by agent the group after that of the last-ending upstream, from each group on; where an agent reads nobody,
    or one of another model, the group after that of the agent of its model before it. Of each model, its own groups
    take turns."""
    found = by_model(shape, groups)
    turns = _turns(shape)
    rings: list[list[GroupView | None]] = []
    for start in range(max(map(len, found.values()), default=0)):
        at: list[int] = []
        ring: list[GroupView | None] = []
        for turn in turns:
            if turn is None:
                at.append(0)
                ring.append(None)
                continue
            views = found[turn.model]
            position = number + start + turn.before if turn.last is None else at[turn.last] + 1
            at.append(position % len(views))
            ring.append(views[at[-1]])
        rings.append(ring)
    return rings


class _Turn(NamedTuple):
    """An agent in a ring."""

    model: str
    last: int | None
    """The agent of its model whose group its own follows; None: it begins anew."""
    before: int
    """Agents of its model before it."""


def _turns(shape: ChainShape) -> list[_Turn | None]:
    """Per agent; None of a step."""
    turns: list[_Turn | None] = []
    before = Counter[str]()
    for index, sources in enumerate(shape.sources()):
        if shape.is_step(index):
            turns.append(None)
            continue
        model, last = shape.model(index), max(sources, default=None)
        follows = last is not None and shape.model(last) == model
        turns.append(_Turn(model, last if follows else None, before[model]))
        before[model] += 1
    return turns


def held_tokens(shape: ChainShape, views: Sequence[GroupView | None]) -> int:
    """Tokens of the prefixes that are held where their agents run; agents of other models do not count."""
    models = shape.models or ("",) * len(views)
    return sum(
        length
        for (digest, length), model, view in zip(shape.prefixes, models, views, strict=True)
        if view is not None and digest in view.held and view.model == model
    )
