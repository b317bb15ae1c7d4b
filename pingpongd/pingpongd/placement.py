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

A chain of several models has one group of each in place of one, and ping-pong among the groups of each. Steps between
agents take no group.

``auto`` takes the placement that costs least by the cost model (`cost_model.py`): its predicted end-to-end time, and by
how much it delays the chains that run already, so that load is spread and nobody gains at the cost of all. It leaves
series only for a gain above `MARGIN`. Where engines were not measured a rule of thumb stands in (`thumb_rule.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pingpong_bus.errors import UsageError
from pingpong_bus.messages import Mode, Placement, Prediction
from pingpongd.candidates import able_to_overlap, by_model, candidates, held_tokens, turned, without_second
from pingpongd.cost_model import Cost, CostModel, scaled
from pingpongd.engine_costs import usable
from pingpongd.factors import Factors, kind_of
from pingpongd.plan import Plan
from pingpongd.prefix_memory import PrefixMemory
from pingpongd.shapes import LARGEST, ChainShape, GroupView, chain_shape
from pingpongd.thumb_rule import by_thumb, overlapping

__all__ = ["ChainShape", "GroupView", "Plan", "PrefixMemory", "chain_shape", "place", "replacement"]

MARGIN = 0.02
"""Another placement than series has to be predicted to cost less than series by more than this part. Decode steps of
two devices, and of one device at two times, were seen to differ by up to 2.5 %: with warm caches, where there is hardly
anything to gain, series is then never lost to noise."""
ALIKE = 0.01
"""Of placements that cost the same within this part, series is taken, then the one on fewer groups. Where other chains
run it is `MARGIN`: how they go on is less sure, and every group more is one more to wait for."""

LATE_MARGIN = 0.1
"""By this part a group whose tokens come late has to be the better one, for it may become slower still."""
_SLOW = 1.05
"""Slowdowns below this are not worth telling."""


def replacement(groups: Sequence[GroupView], beside: frozenset[str], *, join: bool = False) -> str | None:
    """A group for an agent whose own is lost: the least busy, rather none of those that its neighbours run on.

    Args:
        groups: that take hops now, in the configuration's order.
        beside: groups of the agents that it reads from or that read from it.
        join: it overlaps with its neighbours: one of theirs is better than any other, and then one that can overlap.
    """

    def rank(view: GroupView) -> tuple[bool, bool, int]:
        near = view.name in beside
        return (not view.overlap, not near, view.hops) if join else (False, near, view.hops)

    best = min(groups, key=rank, default=None)
    return best.name if best else None


def place(
    shape: ChainShape,
    mode: Mode,
    groups: Sequence[GroupView],
    number: int,
    group: str | None = None,
    *,
    model: CostModel | None = None,
    factors: Factors | None = None,
    done: frozenset[int] = frozenset(),
) -> Plan:
    """Plan a chain.

    Args:
        shape: the chain.
        mode: what its submission asks for.
        groups: the groups that take hops now, in the configuration's order.
        number: the chain's number; the k-th chain starts at group k mod N, other things equal.
        group: run on this group alone: in series, or overlapping where `mode` says so.
        model: of the moment, with these groups and the chains that run; None: of these groups alone.
        factors: learned ones, that predictions are multiplied by.
        done: agents that have ended already.

    Raises:
        UsageError: the groups at hand cannot do what is asked.
    """
    if not groups:
        raise UsageError("no device group is ready.", hint="See `pingpong-client status`.")
    model = model or CostModel(groups)
    if group is not None and group not in [view.name for view in groups]:
        known = ", ".join(view.name for view in groups)
        raise UsageError(
            f'there is no device group "{group}", or it was given up.',
            field="options.group",
            hint=f"There are: {known}.",
        )
    groups = _serving(shape, groups, group)
    chosen = _steady(shape, mode, groups)

    def plan_on(views: Sequence[GroupView]) -> tuple[Plan, float | None]:
        return _plan(shape, mode, views, number, group, model, factors or Factors(), done)

    plan, total_ms = plan_on(chosen)
    if len(chosen) < len(groups) and total_ms is not None and model.busy(view.name for view in chosen):
        # Others run there: a group that is late can still be the sooner one, and all are worse off without it.
        wider, wider_ms = plan_on(groups)
        if wider_ms is not None and wider_ms < total_ms * (1.0 - LATE_MARGIN):
            plan, chosen = wider, groups
    late = "; ".join(
        f"{'' if view in chosen else 'without '}{view.name}: {lateness(view)}" for view in groups if view.degraded
    )
    return msgspec.structs.replace(plan, why=f"{plan.why}; {late}") if late else plan


def _serving(shape: ChainShape, groups: Sequence[GroupView], group: str | None) -> Sequence[GroupView]:
    """Those of the groups that serve a model of the chain; with `group`, that one alone.

    Raises:
        UsageError: a model that it needs is served by none of them.
    """
    wanted = shape.wanted
    views = [view for view in groups if view.model in wanted and group in (None, view.name)]
    served = {view.model for view in views}
    for model in wanted:
        if model in served:
            continue
        whose = f'the model "{model}"' if model else "the default model"
        if group is not None:
            raise UsageError(
                f'an agent of the chain takes {whose}, and the device group "{group}" does not serve it.',
                field="options.group",
                hint="Leave the group out.",
            )
        raise UsageError(f"no device group that is ready serves {whose}.", hint="See `pingpong-client status`.")
    return views


def _steady(shape: ChainShape, mode: Mode, groups: Sequence[GroupView]) -> Sequence[GroupView]:
    """Those of the groups that come into question where tokens of some come late: the others, if they are enough for
    the mode and have room; of each model by itself."""
    if not any(view.degraded for view in groups):
        return groups
    kept: set[str] = set()
    for views in by_model(shape, groups).values():
        room = [view for view in views if not view.full]
        choices = [[view for view in room if not view.degraded], room, views]
        others = [view for view in groups if view not in views]
        enough = next((choice for choice in choices if choice and _enough(shape, mode, [*others, *choice])), views)
        kept.update(view.name for view in enough)
    return [view for view in groups if view.name in kept]


def _enough(shape: ChainShape, mode: Mode, groups: Sequence[GroupView]) -> bool:
    if mode == "ping-pong":
        return without_second(shape, groups) is None
    return mode != "overlap" or all(able_to_overlap(shape, by_model(shape, groups)).values())


def lateness(view: GroupView) -> str:
    """Why a group is avoided, or would be, in a clause."""
    cause = "" if view.cause is None else f" ({view.cause.replace('_', ' ')})"
    state = f"its tokens take {view.slowdown:.1f} times as long now" if view.slowdown > _SLOW else "it recovers"
    return f"{state}{cause}"


def _plan(
    shape: ChainShape,
    mode: Mode,
    groups: Sequence[GroupView],
    number: int,
    group: str | None,
    model: CostModel,
    factors: Factors,
    done: frozenset[int],
) -> tuple[Plan, float | None]:
    """See `place`: the plan on some groups, and what it costs everybody, where that can be predicted."""
    if mode == "overlap":
        overlapping(shape, groups)
    if mode == "ping-pong":
        _check_second(shape, groups)
    wanted: Mode = "serial" if mode == "auto" and group is not None else mode
    asked = "the submission names the group" if group is not None and mode != "overlap" else "asked for"
    costs = _costs(shape, wanted, groups, number, model, factors, done)
    if not costs:
        return by_thumb(shape, wanted, groups, number, asked), None
    alike = MARGIN if model.busy(view.name for view in groups) else ALIKE
    best = _choose(shape, costs, groups, number, alike)
    predictions = sorted((cost.prediction for cost in costs), key=lambda prediction: prediction.e2e_ms)
    taken = best.prediction
    if wanted != "auto":
        return Plan(taken.placement, taken.groups, asked, (taken,), taken), best.total_ms
    if (spare := _spare(shape, groups)) is not None:
        names = tuple("" if shape.is_step(at) else spare.name for at in range(len(shape.upstreams)))
        why = f"{spare.name} is idle, though it was not measured"
        return Plan("serial", names, why, tuple(predictions)), None
    return Plan(taken.placement, taken.groups, _why(best, costs), tuple(predictions), taken), best.total_ms


def _check_second(shape: ChainShape, groups: Sequence[GroupView]) -> None:
    """Raises:
    UsageError: ping-pong takes one more group.
    """
    index = without_second(shape, groups)
    if index is None:
        return
    what, more = "ping-pong takes two device groups and one is ready.", "Configure another group"
    if len(shape.wanted) > 1 and shape.sources()[index]:
        model = f'the model "{shape.model(index)}"' if shape.model(index) else "the default model"
        what = (
            f"ping-pong runs an agent on another device group than the one that it reads: agents[{index}] and that one "
            f"are both of {model}, which one group serves now."
        )
        more += " for it"
    raise UsageError(what, field="mode", hint=f"{more}, or ask for overlap; submit knows serial, too.")


def predicted(
    shape: ChainShape, groups: Sequence[GroupView], number: int, model: CostModel, factors: Factors
) -> list[Prediction]:
    """Every placement that the groups allow, the least first; see `place`. Empty where they were not measured."""
    costs = _costs(shape, "auto", groups, number, model, factors, frozenset())
    return sorted((cost.prediction for cost in costs), key=lambda prediction: prediction.e2e_ms)


def _costs(
    shape: ChainShape,
    mode: Mode,
    groups: Sequence[GroupView],
    number: int,
    model: CostModel,
    factors: Factors,
    done: frozenset[int],
) -> list[Cost]:
    """What the placements cost that the mode allows, with learned factors; of groups that were measured alone."""
    measured = [view for view in groups if usable(view.figures)]
    if not all(by_model(shape, measured).values()) or not shape.outputs or shape.size > LARGEST:
        return []
    found = list[Cost]()
    for placement, names in candidates(shape, mode, measured, number):
        cost = model.predict(shape, placement, names, done)
        factor = factors.factor(kind_of(shape, cost.prediction, busy=model.busy(names)), placement, names)
        found.append(Cost(scaled(cost.prediction, factor), cost.delay_ms))
    return found


def _choose(shape: ChainShape, costs: Sequence[Cost], groups: Sequence[GroupView], number: int, alike: float) -> Cost:
    """The cheapest; of those that are alike the simplest, then the least busy, the warmest, and the k-th."""
    least = min(cost.total_ms for cost in costs)
    series = [cost for cost in costs if cost.prediction.placement == "serial"]
    in_series = min((cost.total_ms for cost in series), default=None)
    if in_series is not None and least > in_series * (1.0 - MARGIN):
        costs, least = series, in_series
    views = {view.name: view for view in groups}
    order = {view.name: at for at, view in enumerate(turned(groups, number))}

    def rank(cost: Cost) -> tuple[bool, int, int, int, int]:
        places = [views.get(name) for name in cost.prediction.groups]
        taken = [view for view in places if view is not None]
        busy, held = max(view.hops for view in taken), held_tokens(shape, places)
        used = len({view.name for view in taken})
        return cost.prediction.placement != "serial", used, busy, -held, order[taken[0].name]

    return min((cost for cost in costs if cost.total_ms <= least * (1.0 + alike)), key=rank)


def _spare(shape: ChainShape, groups: Sequence[GroupView]) -> GroupView | None:
    """A group that could not be measured and is idle, where all that were measured are busy: it works all the same."""
    if len(shape.wanted) > 1 or any(usable(view.figures) and not view.hops for view in groups):
        return None
    return next((view for view in groups if not usable(view.figures) and not view.hops), None)


def _why(best: Cost, costs: Sequence[Cost]) -> str:
    """The choice in a clause, with what was next to it."""
    text = f"predicted {best.prediction.e2e_ms:.0f} ms"
    if best.delay_ms >= 1:
        text += f" and {best.delay_ms:.0f} ms for the chains that run"
    placement = best.prediction.placement
    rivals = [cost for cost in costs if (cost.prediction.placement == "serial") != (placement == "serial")]
    if rivals:
        rival = min(rivals, key=lambda cost: cost.total_ms)
        names = ", ".join(name for name in dict.fromkeys(rival.prediction.groups) if name)
        text += f"; {_NAMES[rival.prediction.placement]} on {names} {rival.prediction.e2e_ms:.0f} ms"
        if rival.delay_ms >= 1:
            text += f" and {rival.delay_ms:.0f} ms"
        if placement == "serial" and rival.total_ms < best.total_ms:
            text += f", within the {MARGIN:.0%} by which series is preferred"
    return text


_NAMES: dict[Placement, str] = {"serial": "series", "ping-pong": "ping-pong", "overlap": "overlap"}
