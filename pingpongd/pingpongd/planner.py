"""Plans chains by the moment's load and caches, and learns from how they end.

A chain's time is compared with what was predicted where the two can be compared: it finished as it was planned, and no
other chain came to its groups meanwhile. That makes the factors that later predictions are multiplied by, and shows
where an engine does not take any more what it was measured to take.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import structlog

from pingpong_bus.chain import Chain, Exactness
from pingpong_bus.messages import Mode, Prediction, SubmitOptions
from pingpongd.candidates import able_to_overlap, by_model, without_second
from pingpongd.chain_progress import running
from pingpongd.chain_record import ChainRecord
from pingpongd.chain_state import Phase
from pingpongd.chain_state import Stage as ChainStage
from pingpongd.cost_model import CostModel, scaled
from pingpongd.drift import Drift
from pingpongd.engine_costs import EngineCosts
from pingpongd.factors import Factors, Kind, kind_of
from pingpongd.habits import Habits
from pingpongd.hindsight import as_it_went, expected_tokens, ran_as_planned, ran_rerouted, step_ms
from pingpongd.hop_room import HopRoom
from pingpongd.placement import Plan, place, predicted
from pingpongd.shapes import ChainShape, GroupView
from pingpongd.speculation import speculates

_log = structlog.get_logger()

_MOST_DRIFTS = 512
"""Of kinds of chains on a grid, the latest."""


@dataclass
class _Run:
    """A chain that runs."""

    record: ChainRecord
    model: CostModel
    """Of the moment at which it was planned, as far as its groups go."""
    started_ns: int
    groups: frozenset[str]
    load: int
    """Chains that ran on its groups then."""
    disturbed: bool = False
    """Another one has come to its groups since, or a measurement had to make way for it."""
    late: bool = False
    """Tokens have come late on its groups meanwhile."""
    done: frozenset[int] = frozenset()
    """Agents that had ended before it began."""


class Preview(NamedTuple):
    """What would become of a chain now."""

    plan: Plan
    predictions: list[Prediction]
    """Of every placement, the least first."""
    groups: list[GroupView]
    """That it was placed among, and predicted for."""


class _Placed(NamedTuple):
    plan: Plan
    model: CostModel
    groups: list[GroupView]
    """That there were to choose from."""


class Planner:
    """Places chains, and knows those that run; belongs to one event loop."""

    def __init__(self, room: HopRoom) -> None:
        """Args:
        room: says which groups there are.
        """
        self.guesses = False
        """Whether tokens are guessed of agents of which nobody says whether they are to be."""
        self._room = room
        self._factors = Factors()
        self._costs = EngineCosts()
        self._habits = Habits()
        self._drifts: dict[str, Drift] = {}
        self._grid_drifts = OrderedDict[tuple[str, Kind], Drift]()
        self._measuring: set[str] = set()
        self._runs: dict[str, _Run] = {}
        self._planned: tuple[str, CostModel] | None = None
        """The chain that was planned last, and by what."""
        self.drifted: set[str] = set()
        """Groups whose engines should be measured anew."""

    def plan(self, record: ChainRecord) -> Plan:
        """Where the chain's agents are to run.

        A group that is down counts where the chain needs it: it comes back, or its agents run elsewhere meanwhile.

        Raises:
            PingpongError: a group that the chain needs is gone for good.
        """
        done = frozenset(at for at, phase in enumerate(record.state.phases) if phase is Phase.DONE)
        options = record.options
        record.shape = self.informed(record.shape, record.chain, options, record.job.exact.level)
        plan, model, _ = self._place(record.shape, options.mode, options.group, record.number, done)
        self._planned = record.id, model.of({*plan.groups, *(_series_groups(plan) or ())} - {""})
        return plan

    def informed(self, shape: ChainShape, chain: Chain, options: SubmitOptions, level: Exactness) -> ChainShape:
        """A chain's shape with what earlier runs of it have shown."""
        guessed = [speculates(chain, at, options, level, enabled=self.guesses) for at in range(len(chain.agents))]
        agents = [(agent.name, agent.model or "") for agent in chain.agents]
        return self._habits.applied(shape, chain.name, agents, guessed)

    def preview(self, shape: ChainShape, mode: Mode, group: str | None, number: int) -> Preview:
        """How a chain would be placed now.

        Raises:
            PingpongError: the groups at hand cannot do what is asked.
        """
        plan, model, views = self._place(shape, mode, group, number)
        if mode == "auto" and group is None:
            return Preview(plan, list(plan.predictions), views)
        found = predicted(shape, views, number, model, self._factors)
        if plan.predicted is not None and plan.predicted not in found:
            # `auto` would not look at it: one of many groups, or ping-pong of one agent.
            found = sorted([*found, plan.predicted], key=lambda prediction: prediction.e2e_ms)
        return Preview(plan, found, views)

    def began(self, record: ChainRecord) -> None:
        """A chain runs from now on, by the plan that was just made."""
        assert record.plan is not None  # noqa: S101 - made before
        groups, beside = frozenset(record.plan.groups) - {""}, 0
        assert self._planned is not None  # noqa: S101 - as the plan was
        planned, model = self._planned
        assert planned == record.id  # noqa: S101 - nothing is planned between a chain's plan and its beginning
        for run in self._runs.values():
            if not run.groups.isdisjoint(groups):
                beside += 1
                run.disturbed = True
        # What it takes on a group that decodes late, for nobody knows how long, says nothing of later ones.
        delayed = not groups.isdisjoint(self._measuring) or any(map(self._room.is_avoided, groups))
        done = frozenset(at for at, phase in enumerate(record.state.phases) if phase is Phase.DONE)
        self._runs[record.id] = _Run(record, model, time.monotonic_ns(), groups, beside, delayed, done=done)

    def degraded(self, group: str) -> None:
        """The group's tokens come late from now on.

        What chains on it take then is what their placements take on groups that are not steady, so it is learned; but
        it is no sign that the engine has to be measured anew.
        """
        for run in self._runs.values():
            run.late |= group in run.groups

    def series_end_ns(self, record: ChainRecord, index: int) -> int | None:
        """When an agent would have ended had its chain run in series from its start, by CLOCK_MONOTONIC; None where
        that cannot be predicted."""
        run, plan = self._runs.get(record.id), record.plan
        if run is None or plan is None or plan.predicted is None:
            return None
        shape = msgspec.structs.replace(record.shape, outputs=expected_tokens(record))
        groups = _series_groups(plan) or _beside(shape, plan, index)
        ends = run.model.series_ends(shape, groups, run.done)
        factor = next((one.factor for one in plan.predictions if one.placement == "serial"), plan.predicted.factor)
        return run.started_ns + int(ends[index] * factor * 1e6)

    def without(self, record: ChainRecord) -> CostModel:
        """The moment's model, as this chain sees it."""
        others = [running(run.record) for run in self._runs.values() if run.record is not record]
        return CostModel(self._room.groups(), others, self._costs)

    def ended(self, record: ChainRecord, stage: ChainStage) -> None:
        """A chain runs no more; harmless where it never did."""
        run = self._runs.pop(record.id, None)
        if run is None or stage is not ChainStage.FINISHED:
            return
        self._remember(record)
        assert record.plan is not None  # noqa: S101 - it ran
        prediction = record.plan.predicted
        if prediction is None:
            return
        actual_ms = (max(agent.last_token_ns for agent in record.agents) - run.started_ns) / 1e6
        expected_ms = self._hindsight_ms(run, prediction)
        as_planned = ran_as_planned(record)
        comparable = (as_planned or ran_rerouted(record)) and not run.disturbed and min(actual_ms, expected_ms) > 0
        _log.info(
            "prediction",
            chain=record.id,
            placement=prediction.placement,
            groups=sorted(run.groups),
            predicted_ms=round(expected_ms, 1),
            actual_ms=round(actual_ms, 1),
            ratio=round(actual_ms / expected_ms, 4) if expected_ms > 0 else None,
            factor=prediction.factor,
            load=run.load,
            learned=comparable,
        )
        if comparable:
            self._learn(record, run, prediction, actual_ms / expected_ms * prediction.factor, steady=not run.late)

    @contextmanager
    def measuring(self, group: str) -> Iterator[None]:
        """While the group's engine is measured: chains that come to it meanwhile are delayed and not learned from."""
        self._measuring.add(group)
        for run in self._runs.values():
            run.disturbed |= group in run.groups
        try:
            yield
        finally:
            self._measuring.discard(group)

    def measured(self, group: str) -> None:
        """The group's engine was measured anew."""
        self._factors.forget(group)
        self._drifts.setdefault(group, Drift()).measured()
        for key in [key for key in self._grid_drifts if key[0] == group]:
            del self._grid_drifts[key]
        self.drifted.discard(group)

    def _views(self, shape: ChainShape, mode: Mode, group: str | None) -> tuple[Mode, str, list[GroupView]]:
        """The mode that a chain can have, why it is not the one asked for, and the groups to choose from."""
        ready = self._room.groups()
        short = (
            (group is not None and group not in [view.name for view in ready])
            or not all(by_model(shape, ready).values())
            or (mode == "overlap" and not all(able_to_overlap(shape, by_model(shape, ready)).values()))
            or (mode == "ping-pong" and without_second(shape, ready) is not None)
        )
        views = self._room.standing() if short else ready
        if mode == "ping-pong" and without_second(shape, views) is not None:
            left = "and one group is left" if len(shape.wanted) < 2 else "and too few groups are left"
            return "serial", f"asked for ping-pong, {left}", ready if all(by_model(shape, ready).values()) else views
        return mode, "", views

    def _place(
        self, shape: ChainShape, mode: Mode, group: str | None, number: int, done: frozenset[int] = frozenset()
    ) -> _Placed:
        mode, fewer, views = self._views(shape, mode, group)
        views = self._room.with_room(views, shape)
        model = self._model(views)
        plan = place(shape, mode, views, number, group, model=model, factors=self._factors, done=done)
        return _Placed(msgspec.structs.replace(plan, why=fewer) if fewer else plan, model, views)

    def _model(self, views: Sequence[GroupView]) -> CostModel:
        return CostModel(views, [running(run.record) for run in self._runs.values()], self._costs)

    def _remember(self, record: ChainRecord) -> None:
        """Note what a finished chain has shown of its agents."""
        name = record.chain.name
        for index, (spec, agent) in enumerate(zip(record.chain.agents, record.agents, strict=True)):
            if spec.is_step:
                self._habits.learn_step(name, spec.name, step_ms(record, index), len(agent.output_ids))
            elif agent.drafts is not None:
                self._habits.learn_pace(name, spec.name, spec.model or "", agent.drafts)

    def _hindsight_ms(self, run: _Run, prediction: Prediction) -> float:
        """What would have been predicted had it been known how much is written, and how guesses and steps go."""
        record = run.record
        if record.recovered or (shape := as_it_went(record)) == record.shape:
            return prediction.e2e_ms
        cost = run.model.predict(shape, prediction.placement, prediction.groups)
        return cost.prediction.e2e_ms * prediction.factor

    def _learn(self, record: ChainRecord, run: _Run, prediction: Prediction, ratio: float, *, steady: bool) -> None:
        kind = kind_of(record.shape, scaled(prediction, 1.0 / prediction.factor), busy=run.load > 0)
        self._factors.learn(kind, prediction.placement, run.groups, ratio)
        if prediction.placement != "serial" or run.load or not steady:
            return
        if len(run.groups) > 1 or record.shape.steps or any(agent.drafts is not None for agent in record.agents):
            return  # what takes longer may be another engine, a step, or guesses that were wrong
        (group,) = run.groups
        if self._drift(group, record.shape, kind).add(ratio) and group not in self.drifted:
            _log.warning("figures_drifted", group=group, ratio=round(ratio, 4))
            self.drifted.add(group)

    def _drift(self, group: str, shape: ChainShape, kind: Kind) -> Drift:
        """Prompts that are cut on a grid take longer than those that were measured: such chains are compared with their
        like."""
        if shape.grid is None:
            return self._drifts.setdefault(group, Drift())
        found = self._grid_drifts.setdefault((group, kind), Drift(exact=False))
        self._grid_drifts.move_to_end((group, kind))
        if len(self._grid_drifts) > _MOST_DRIFTS:
            self._grid_drifts.popitem(last=False)
        return found


def _series_groups(plan: Plan) -> tuple[str, ...] | None:
    """The groups on which series was predicted to be fastest, per agent; None where it was not predicted."""
    return next((one.groups for one in plan.predictions if one.placement == "serial"), None)


def _beside(shape: ChainShape, plan: Plan, index: int) -> tuple[str, ...]:
    """Series on an agent's own group, and for other models on the first that the plan has of each."""
    at: dict[str, str] = {}
    for other in (index, *range(len(plan.groups))):
        if not shape.is_step(other):
            at.setdefault(shape.model(other), plan.groups[other])
    return tuple("" if shape.is_step(other) else at[shape.model(other)] for other in range(len(plan.groups)))
