"""Which placements of a chain there are to choose from. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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


def candidates(
    shape: ChainShape, mode: Mode, groups: Sequence[GroupView], number: int
) -> list[tuple[Placement, tuple[str, ...]]]:
    """Placements with the group of each agent.

    Args:
        shape: the chain.
        mode: what is asked for; "auto": any.
        groups: to choose from.
        number: of the chain; see `turned`.
    """
    count, found = len(shape.upstreams), list[tuple[Placement, tuple[str, ...]]]()
    most = FEW_GROUPS if len(groups) <= FEW_GROUPS else MOST_OF_MANY
    most = max(1, min(most, MOST_WALKED // (3 * (shape.size + MOST_BESIDE))))
    order = by_preference(shape, groups, number)
    if mode in ("auto", "serial"):
        found += [("serial", (view.name,) * count) for view in order[:most]]
    # Of several agents, also those that read nobody are better side by side: series has them one after the other.
    if mode == "overlap" or (mode == "auto" and count > 1 and shape.grid is None):
        able = [view for view in order if view.overlap]
        found += [("overlap", (view.name,) * count) for view in able[:most]]
    if len(groups) > 1 and (mode == "ping-pong" or (mode == "auto" and count > 1)):
        # Among many groups no ring of neighbours may be idle, while two groups somewhere are: these alternate.
        pairs = rings(shape, order[:2], 0) if len(groups) > 2 else []
        around = sorted(
            [*rings(shape, groups, number), *pairs],
            key=lambda views: (max(view.hops for view in views), -held_tokens(shape, views)),
        )
        found += [("ping-pong", tuple(view.name for view in views)) for views in around[:most]]
    return found


def turned(groups: Sequence[GroupView], number: int) -> list[GroupView]:
    """The groups from the k-th on."""
    return [groups[(number + step) % len(groups)] for step in range(len(groups))]


def by_preference(shape: ChainShape, groups: Sequence[GroupView], number: int) -> list[GroupView]:
    """The least busy group first; among those the one with most of the chain in its cache, then the k-th."""
    count = len(shape.upstreams)
    return sorted(turned(groups, number), key=lambda view: (view.hops, -held_tokens(shape, (view,) * count)))


def ring(shape: ChainShape, groups: Sequence[GroupView], number: int) -> tuple[str, ...]:
    """Of all rings the one whose caches hold most; the first of equals, from group k mod N."""
    best = max(rings(shape, groups, number), key=lambda views: held_tokens(shape, views))
    return tuple(view.name for view in best)


def rings(shape: ChainShape, groups: Sequence[GroupView], number: int) -> list[list[GroupView]]:
    """Agent by agent the group after that of the last-ending upstream, from each group on; where an agent reads nobody,
    the group after that of the agent before it."""
    count = len(groups)
    rings = []
    for start in range(count):
        at: list[int] = []
        for index, reads in enumerate(shape.upstreams):
            if reads:
                at.append((at[max(reads)] + 1) % count)
            else:
                at.append((number + start + index) % count)
        rings.append([groups[position] for position in at])
    return rings


def held_tokens(shape: ChainShape, views: Sequence[GroupView]) -> int:
    """Tokens of the prefixes that are held where their agents run."""
    return sum(length for (digest, length), view in zip(shape.prefixes, views, strict=True) if digest in view.held)
