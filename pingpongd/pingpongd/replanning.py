"""Where those agents of a running chain go that have not started, when the group of their plan decodes late. Pure.

Those that run stay where they are. The rest is placed on the groups that are well, by what is predicted to be left of
the chain and to be lost by others; where engines were not measured, as near to the plan as these groups allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pingpong_bus.messages import Mode, Placement
from pingpongd.agent_task import Stage
from pingpongd.candidates import MOST_BESIDE, MOST_WALKED, able_to_overlap, by_model, one_each
from pingpongd.cost_model import AgentProgress, CostModel, RunningChain
from pingpongd.shapes import LARGEST, GroupView

MOST_GROUPS = 4
"""That are looked at: the least busy ones."""
_ALIKE = 0.01
"""Placements of which the rest takes the same within this part: the plan's is kept, else series is taken."""


class Replan(msgspec.Struct, frozen=True):
    """How a chain goes on."""

    placement: Placement
    groups: tuple[str, ...]
    """Per agent; those that have started or ended are where they were."""
    ms: float | None = None
    """What is left of the chain, and what others lose by it; None where that cannot be predicted."""


def replan(
    chain: RunningChain, waiting: Sequence[int], mode: Mode, groups: Sequence[GroupView], model: CostModel
) -> Replan | None:
    """Place the agents that have not started; those of models that none of the groups serves stay where they are.

    Args:
        chain: as far as it has come; `placement` is how it runs now.
        waiting: those agents, rising.
        mode: what its submission asks for.
        groups: that are well and can take them.
        model: of the moment, without this chain.

    Returns:
        None where nothing else can be done within the mode.
    """
    options = _options(chain, waiting, mode, groups)
    if not options:
        return None
    names = {agent.group for agent in chain.agents if agent.stage is not Stage.ENDED} | {view.name for view in groups}
    costs = [model.cost(name) for name in sorted(names) if name]
    if chain.shape.size > LARGEST or not chain.shape.outputs or None in costs:
        return _by_thumb(chain, options)
    options = [msgspec.structs.replace(one, ms=model.rest(_placed(chain, one)).total_ms) for one in options]
    least = min(option.ms or 0.0 for option in options)
    alike = [option for option in options if (option.ms or 0.0) <= least * (1.0 + _ALIKE)]
    return min(alike, key=lambda option: (option.placement != chain.placement, option.placement != "serial"))


def _options(chain: RunningChain, waiting: Sequence[int], mode: Mode, groups: Sequence[GroupView]) -> list[Replan]:
    found: list[Replan] = []
    shape = chain.shape
    most = max(1, MOST_WALKED // (3 * (shape.size + MOST_BESIDE)))  # as where chains are placed
    orders = {
        model: sorted(views, key=lambda view: view.hops)[:MOST_GROUPS]
        for model, views in by_model(shape, groups).items()
        if views
    }
    if not orders:
        return []
    able = able_to_overlap(shape, orders)

    def place(placement: Placement, names: Sequence[str]) -> None:
        groups = [names[at] if at in waiting and names[at] else one.group for at, one in enumerate(chain.agents)]
        found.append(Replan(placement, tuple(groups)))

    for names in one_each(shape, orders, min(most, MOST_GROUPS)):
        if mode in ("auto", "serial"):
            place("serial", names)
    if mode in ("auto", "overlap") and shape.grid is None:
        for names in one_each(shape, able, min(most, MOST_GROUPS)):
            place("overlap", names)
    if mode in ("auto", "ping-pong") and (around := _around(chain, waiting, orders)) is not None:
        place("ping-pong", around)
    return found


def _around(chain: RunningChain, waiting: Sequence[int], orders: Mapping[str, Sequence[GroupView]]) -> list[str] | None:
    """Agent by agent the least busy group of its model that its last-ending upstream is not on; None where there is
    none."""
    shape = chain.shape
    at, sources = [agent.group for agent in chain.agents], shape.sources()
    if len({view.name for views in orders.values() for view in views}) < 2 and len(shape.wanted) < 2:
        return None
    for index in waiting:
        if shape.is_step(index) or shape.model(index) not in orders:
            continue
        beside = at[max(sources[index])] if sources[index] else ""
        free = [view for view in orders[shape.model(index)] if view.name != beside]
        if not free:
            return None
        at[index] = free[0].name
    return at


def _placed(chain: RunningChain, option: Replan) -> RunningChain:
    agents = tuple(
        AgentProgress(group, written=one.written) if one.stage is Stage.WAITING else one
        for one, group in zip(chain.agents, option.groups, strict=True)
    )
    return RunningChain(chain.shape, option.placement, agents)


def _by_thumb(chain: RunningChain, options: Sequence[Replan]) -> Replan:
    """The plan's placement, else the one that reads ahead like it, else series; on the least busy group."""
    ahead = chain.placement != "serial"

    def rank(option: Replan) -> tuple[bool, bool]:
        return option.placement != chain.placement, (option.placement == "serial") is ahead

    return min(options, key=rank)
