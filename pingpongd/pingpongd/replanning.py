"""Where those agents of a running chain go that have not started, when the group of their plan decodes late. Pure.

Those that run stay where they are. The rest is placed on the groups that are well, by what is predicted to be left of
the chain and to be lost by others; where engines were not measured, as near to the plan as these groups allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pingpong_bus.messages import Mode, Placement
from pingpongd.agent_task import Stage
from pingpongd.candidates import MOST_BESIDE, MOST_WALKED
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
    """Place the agents that have not started.

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
    costs = [model.cost(name) for name in sorted(names)]
    if chain.shape.size > LARGEST or not chain.shape.outputs or None in costs:
        return _by_thumb(chain, options)
    options = [msgspec.structs.replace(one, ms=model.rest(_placed(chain, one)).total_ms) for one in options]
    least = min(option.ms or 0.0 for option in options)
    alike = [option for option in options if (option.ms or 0.0) <= least * (1.0 + _ALIKE)]
    return min(alike, key=lambda option: (option.placement != chain.placement, option.placement != "serial"))


def _options(chain: RunningChain, waiting: Sequence[int], mode: Mode, groups: Sequence[GroupView]) -> list[Replan]:
    found: list[Replan] = []
    best = sorted(groups, key=lambda view: view.hops)[:MOST_GROUPS]
    most = max(1, MOST_WALKED // (3 * (chain.shape.size + MOST_BESIDE)))  # as where chains are placed

    def place(placement: Placement, names: Sequence[str]) -> None:
        at = dict(zip(waiting, names, strict=True))
        found.append(Replan(placement, tuple(at.get(index, one.group) for index, one in enumerate(chain.agents))))

    for view in best[:most]:
        if mode in ("auto", "serial"):
            place("serial", [view.name] * len(waiting))
        if mode in ("auto", "overlap") and view.overlap and chain.shape.grid is None:
            place("overlap", [view.name] * len(waiting))
    if mode in ("auto", "ping-pong") and len(best) > 1:
        place("ping-pong", _around(chain, waiting, best))
    return found


def _around(chain: RunningChain, waiting: Sequence[int], groups: Sequence[GroupView]) -> list[str]:
    """Agent by agent the least busy group that its last-ending upstream is not on."""
    at = [agent.group for agent in chain.agents]
    for index in waiting:
        reads = chain.shape.upstreams[index]
        beside = at[max(reads)] if reads else ""
        free = [view for view in groups if view.name != beside]
        at[index] = free[0].name
    return [at[index] for index in waiting]


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
