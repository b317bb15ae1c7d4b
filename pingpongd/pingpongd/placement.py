"""Where a chain's agents run. Pure: values in, a plan out.

============ =========================== ==============================================
placement    agent i runs on             and starts reading
============ =========================== ==============================================
serial       the chain's one group       when every earlier agent has finished
ping-pong    a group other than that of  at its upstreams' first tokens (or at once, if
             its last-ending upstream    the chain says ``"start": "immediate"``)
overlap      the chain's one group       the same; the engine holds what is read to a
                                         budget beside its decodes
============ =========================== ==============================================

``auto`` reads ahead only where there is cold prefill to hide. Where the agents' static prefixes already sit in one
group's prefix cache, series is as fast and keeps the other groups free, so it is chosen; what the caches hold is
remembered in `PrefixMemory`. It never takes overlap, which has to be asked for.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from pingpong_bus.errors import UsageError
from pingpong_bus.messages import Literals, Mode, Placement, PreparedAgent

COLD_TOKENS_WORTH_HIDING = 256
"""``auto`` takes series where fewer downstream prefix tokens than this are cold: prefilling them takes about as long as
what a second busy device costs in decode time (some percent of a chain of a few hundred decode steps)."""


class GroupView(msgspec.Struct, frozen=True):
    """A group as placement sees it."""

    name: str
    hops: int
    """Hops that it runs now."""
    held: frozenset[str] = frozenset()
    """Digests of the static prefixes that its prefix cache holds."""
    decode_first: bool = False
    """Whether its engine holds appends to a budget beside decodes."""


class ChainShape(msgspec.Struct, frozen=True):
    """A chain as placement sees it."""

    upstreams: tuple[tuple[int, ...], ...]
    """Per agent, the agents it reads."""
    prefixes: tuple[tuple[str, int], ...]
    """Per agent, digest and length in tokens of the literal ids its prompt begins with; on a grid of their whole cells,
    for only these are computed ahead and cached."""


class Plan(msgspec.Struct, frozen=True):
    """Where each agent runs, and why."""

    placement: Placement
    groups: tuple[str, ...]
    """Per agent, the group's name."""
    why: str


def replacement(groups: Sequence[GroupView], beside: frozenset[str], *, join: bool = False) -> str | None:
    """A group for an agent whose own is lost: the least busy, rather none of those that its neighbours run on.

    Args:
        groups: that take hops now, in the configuration's order.
        beside: groups of the agents that it reads from or that read from it.
        join: it overlaps with its neighbours: one of theirs is better than any other, and then one that can overlap.
    """

    def rank(view: GroupView) -> tuple[bool, bool, int]:
        near = view.name in beside
        return (not view.decode_first, not near, view.hops) if join else (False, near, view.hops)

    best = min(groups, key=rank, default=None)
    return best.name if best else None


class PrefixMemory:
    """Which static prefixes a group's prefix cache holds: the latest computed there, as far as its KV cache reaches."""

    def __init__(self, kv_tokens: int) -> None:
        self._room = kv_tokens
        self._held: OrderedDict[str, int] = OrderedDict()

    def computed(self, digest: str, prefix_tokens: int, total_tokens: int) -> None:
        """A hop has computed `total_tokens`, beginning with the prefix."""
        self._held.pop(digest, None)
        self._held[digest] = max(prefix_tokens, total_tokens)
        while sum(self._held.values()) > self._room and self._held:
            self._held.popitem(last=False)

    def forget(self) -> None:
        """The cache was reset or its engine replaced."""
        self._held.clear()

    @property
    def held(self) -> frozenset[str]:
        """Digests of the prefixes that are held."""
        return frozenset(self._held)


def chain_shape(
    upstreams: Sequence[Sequence[int]], prepared: Sequence[PreparedAgent], grid: int | None = None
) -> ChainShape:
    """Boil a prepared chain down to what placement looks at.

    Args:
        upstreams: per agent, the agents it reads.
        prepared: per agent, its prompt.
        grid: the cell that its prompts are cut at: only such prompts share prefix-cache entries.
    """
    cell = b"" if grid is None else f"grid{grid}/".encode()
    prefixes = []
    for agent in prepared:
        first = agent.segments[0] if agent.segments else None
        ids = first.ids if isinstance(first, Literals) and not agent.joined else []
        ids = ids[: len(ids) - len(ids) % (grid or 1)]
        digest = hashlib.sha256(cell + b"".join(token.to_bytes(4, "little") for token in ids)).hexdigest()
        prefixes.append((digest, len(ids)))
    return ChainShape(tuple(tuple(found) for found in upstreams), tuple(prefixes))


def place(shape: ChainShape, mode: Mode, groups: Sequence[GroupView], number: int, group: str | None = None) -> Plan:
    """Plan a chain.

    Args:
        shape: the chain.
        mode: what its submission asks for.
        groups: the groups that take hops now, in the configuration's order.
        number: the chain's number; the k-th chain starts at group k mod N, other things equal.
        group: run on this group alone: in series, or overlapping where `mode` says so.

    Raises:
        UsageError: the groups at hand cannot do what is asked.
    """
    if not groups:
        raise UsageError("no device group is ready.", hint="See `pingpong-client status`.")
    if group is not None:
        if group not in [view.name for view in groups]:
            known = ", ".join(view.name for view in groups)
            raise UsageError(
                f'there is no device group "{group}", or it was given up.',
                field="options.group",
                hint=f"There are: {known}.",
            )
        named = [view for view in groups if view.name == group]
        if mode == "overlap":
            return Plan("overlap", (_overlapping(named)[0].name,) * len(shape.upstreams), "asked for")
        return Plan("serial", (group,) * len(shape.upstreams), "the submission names the group")
    if mode == "overlap":
        best = _best_serial_group(shape, _overlapping(groups), number)
        return Plan("overlap", (best.name,) * len(shape.upstreams), "asked for")
    if mode == "ping-pong":
        if len(groups) < 2:
            raise UsageError(
                "ping-pong takes two device groups and one is ready.",
                field="mode",
                hint="Configure another group, or submit with --mode serial or overlap.",
            )
        return Plan("ping-pong", _ring(shape, groups, number), "asked for")
    serial = _best_serial_group(shape, groups, number)
    if mode == "serial":
        return Plan("serial", (serial.name,) * len(shape.upstreams), "asked for")
    return _auto(shape, groups, number, serial)


def _overlapping(groups: Sequence[GroupView]) -> list[GroupView]:
    """Those of the groups on which agents may overlap."""
    found = [view for view in groups if view.decode_first]
    if not found:
        names = ", ".join(view.name for view in groups)
        raise UsageError(
            f"overlap takes an engine with the decode-first scheduler, and there is none on {names}.",
            field="mode",
            hint="Set `decode_first.enabled` and no scheduler_cls in the configuration, or submit with another mode.",
        )
    return found


def _auto(shape: ChainShape, groups: Sequence[GroupView], number: int, serial: GroupView) -> Plan:
    in_series = (serial.name,) * len(shape.upstreams)
    if len(groups) < 2:
        return Plan("serial", in_series, "one device group")
    if not any(shape.upstreams):
        return Plan("serial", in_series, "no agent reads another")
    cold = _cold_downstream_tokens(shape, serial)
    if cold < COLD_TOKENS_WORTH_HIDING:
        return Plan(
            "serial",
            in_series,
            f"{cold} cold prefix tokens to hide on {serial.name}, worth it from {COLD_TOKENS_WORTH_HIDING}",
        )
    return Plan("ping-pong", _ring(shape, groups, number), f"cold: {cold} prefix tokens to hide")


def _best_serial_group(shape: ChainShape, groups: Sequence[GroupView], number: int) -> GroupView:
    """The least busy group; among those the one with most of the chain in its cache, then the k-th."""
    count = len(groups)
    order = [groups[(number + step) % count] for step in range(count)]
    return min(order, key=lambda view: (view.hops, -_held_tokens(shape, (view,) * len(shape.upstreams))))


def _ring(shape: ChainShape, groups: Sequence[GroupView], number: int) -> tuple[str, ...]:
    """Agent by agent the group after that of the last-ending upstream; of all starts the one whose caches hold most."""
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
    best = max(rings, key=lambda ring: _held_tokens(shape, ring))  # the first of equals: group k mod N
    return tuple(view.name for view in best)


def _held_tokens(shape: ChainShape, views: Sequence[GroupView]) -> int:
    return sum(length for (digest, length), view in zip(shape.prefixes, views, strict=True) if digest in view.held)


def _cold_downstream_tokens(shape: ChainShape, view: GroupView) -> int:
    return sum(
        length
        for reads, (digest, length) in zip(shape.upstreams, shape.prefixes, strict=True)
        if reads and digest not in view.held
    )
