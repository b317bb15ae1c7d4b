"""What a placement of a chain should take, predicted from what the engines were measured to take. Pure.

A prediction walks the chain, and the other chains that run on its groups, through `timeline.py`: prefill of what the
prefix caches do not hold, decodes by context and by how many share a step, what is read ahead on another group or
beside decodes, what of it the upstream's decoding does not hide, steps between agents, and waiting for groups. It knows
nothing of what the engines were not measured for: two busy engines that share cores, say. That is what `Factors` are
for (`factors.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from pingpong_bus.messages import OutputOf, Placement, Prediction
from pingpongd.agent_task import Piece, Stage, Task
from pingpongd.candidates import MOST_BESIDE
from pingpongd.engine_cost import EngineCost
from pingpongd.engine_costs import EngineCosts, usable
from pingpongd.shapes import ChainShape, GroupView
from pingpongd.timeline import run

MOST_OTHERS = 16
"""Other chains that are walked through with a prediction, as far as `MOST_BESIDE` goes; where more run on its groups,
the latest of them."""


class AgentProgress(msgspec.Struct, frozen=True):
    """How far an agent has come."""

    group: str
    stage: Stage = Stage.WAITING
    read: int = 0
    """Prompt tokens that are computed."""
    written: int = 0
    """Tokens of its output."""


class RunningChain(msgspec.Struct, frozen=True):
    """A chain that runs beside the one that is placed."""

    shape: ChainShape
    placement: Placement
    agents: tuple[AgentProgress, ...]


class Cost(NamedTuple):
    """What a placement costs."""

    prediction: Prediction
    delay_ms: float
    """By which the chains that run already end later, all together."""

    @property
    def total_ms(self) -> float:
        """What it costs everybody: by this placements are compared."""
        return self.prediction.e2e_ms + self.delay_ms


class CostModel:
    """Predicts placements at one moment: its load, and what its prefix caches hold."""

    def __init__(
        self, views: Sequence[GroupView], others: Sequence[RunningChain] = (), costs: EngineCosts | None = None
    ) -> None:
        """Args:
        views: the groups; those without figures are never predicted for.
        others: the chains that run now, the latest last.
        costs: kept from one moment to the next.
        """
        self._views = {view.name: view for view in views}
        self._others = others
        self._touching: dict[str, list[int]] = {}
        """By group, those of the others that it has work for, where all their groups are known."""
        for at, other in enumerate(others):
            left = _places(other.agents)
            if all(name in self._views and usable(self._views[name].figures) for name in left):
                for name in left:
                    self._touching.setdefault(name, []).append(at)
        self._costs = costs if costs is not None else EngineCosts()
        self._undisturbed: dict[tuple[int, ...], float] = {}
        """When the others end, all together, without the chain; by their places in the list."""

    def predict(
        self, shape: ChainShape, placement: Placement, groups: Sequence[str], done: frozenset[int] = frozenset()
    ) -> Cost:
        """What a placement takes, without learned factors.

        Args:
            shape: the chain; made with its outputs.
            placement: how its agents are started.
            groups: per agent, its group, and "" of a step; all have figures.
            done: agents that have ended already.
        """
        # What has ended did so before the daemon's start: no cache holds it.
        placed = [
            AgentProgress("", Stage.ENDED) if at in done else AgentProgress(name) for at, name in enumerate(groups)
        ]
        return self._cost_of(RunningChain(shape, placement, tuple(placed)), tuple(groups))

    def rest(self, chain: RunningChain) -> Cost:
        """What is left of a chain that runs, from now on, and by how much it delays the others; it is none of them.

        Args:
            chain: as far as it has come; all groups that it has work for have figures.
        """
        return self._cost_of(chain, tuple(agent.group for agent in chain.agents))

    def _cost_of(self, chain: RunningChain, groups: tuple[str, ...]) -> Cost:
        beside = self._beside(_places(chain.agents))
        own, walked = self._walk(chain.shape, chain.placement, chain.agents, beside)
        if beside and any(task.stage is not Stage.ENDED for task in own):
            # It waits for one that waits for a group to come back, or the like: that will be seen to, and not by us.
            beside = ()
            own, walked = self._walk(chain.shape, chain.placement, chain.agents, beside)
        delay = sum(_end(tasks) for tasks in walked) - self._alone(beside) if beside else 0.0
        prediction = _prediction(own, chain.placement, groups, chain.shape.unknown_steps)
        return Cost(prediction, max(0.0, delay))

    def series_ends(
        self, shape: ChainShape, groups: Sequence[str], done: frozenset[int] = frozenset()
    ) -> tuple[float, ...]:
        """When each agent of a chain would end in series, in ms from its beginning; see `predict`."""
        placed = [
            AgentProgress("" if at in done else group, Stage.ENDED if at in done else Stage.WAITING)
            for at, group in enumerate(groups)
        ]
        beside = self._beside(_places(placed))
        own, _ = self._walk(shape, "serial", placed, beside)
        if any(task.stage is not Stage.ENDED for task in own):
            own, _ = self._walk(shape, "serial", placed, ())
        return tuple(task.ended for task in own)

    def cost(self, group: str) -> EngineCost | None:
        """What a group's engine takes now; None where it was not measured."""
        view = self._views.get(group)
        return self._costs.of(view) if view is not None and usable(view.figures) else None

    def of(self, groups: Iterable[str]) -> CostModel:
        """What is to be kept of it to predict placements on these groups later on."""
        others = [self._others[at] for at in self._beside(frozenset(groups))]
        names = {*groups, *(agent.group for other in others for agent in other.agents)}
        return CostModel([self._views[name] for name in names if name in self._views], others, self._costs)

    def _walk(
        self, shape: ChainShape, placement: Placement, placed: Sequence[AgentProgress], beside: tuple[int, ...]
    ) -> tuple[list[Task], list[list[Task]]]:
        """Walk a chain and others to their ends."""
        own = _tasks(shape, placement, placed, self._views)
        walked = [_tasks(self._others[at].shape, *self._seen(at), self._views) for at in beside]
        self._run([*walked, own])
        return own, walked

    def _run(self, chains: Sequence[Sequence[Task]]) -> None:
        names = {task.group for tasks in chains for task in tasks if task.group and task.stage is not Stage.ENDED}
        run([task for tasks in chains for task in tasks], {name: self._cost(name) for name in names})

    def _beside(self, groups: frozenset[str]) -> tuple[int, ...]:
        """The other chains that touch the groups and can be walked through."""
        found = {at for name in groups for at in self._touching.get(name, ())}
        latest = sorted(found)[-MOST_OTHERS:]
        sizes = accumulate(self._others[at].shape.size for at in reversed(latest))
        return tuple(latest[len(latest) - sum(size <= MOST_BESIDE for size in sizes) :])

    def _alone(self, beside: tuple[int, ...]) -> float:
        if beside not in self._undisturbed:
            walked = [_tasks(self._others[at].shape, *self._seen(at), self._views) for at in beside]
            self._run(walked)
            self._undisturbed[beside] = sum(_end(tasks) for tasks in walked)
        return self._undisturbed[beside]

    def _seen(self, at: int) -> tuple[Placement, Sequence[AgentProgress]]:
        return self._others[at].placement, self._others[at].agents

    def busy(self, groups: Iterable[str]) -> bool:
        """Whether other chains run on any of the groups."""
        return any(name in self._touching for name in groups)

    def _cost(self, group: str) -> EngineCost:
        return self._costs.of(self._views[group])


def scaled(prediction: Prediction, factor: float) -> Prediction:
    """A prediction with all its times multiplied by a learned factor."""
    return msgspec.structs.replace(
        prediction,
        e2e_ms=round(prediction.e2e_ms * factor, 3),
        prefill_ms=round(prediction.prefill_ms * factor, 3),
        decode_ms=round(prediction.decode_ms * factor, 3),
        wait_ms=round(prediction.wait_ms * factor, 3),
        steps_ms=round(prediction.steps_ms * factor, 3),
        hidden_ms=round(prediction.hidden_ms * factor, 3),
        factor=round(factor, 4),
    )


def _tasks(
    shape: ChainShape, placement: Placement, agents: Sequence[AgentProgress], views: Mapping[str, GroupView]
) -> list[Task]:
    """The chain's agents, as they would start."""
    tasks: list[Task] = []
    read = {at for reads in shape.upstreams for at in reads}
    sources = shape.sources()
    for index, agent in enumerate(agents):
        reads = tuple(tasks[at] for at in shape.upstreams[index])
        serial = placement == "serial"
        if shape.is_step(index):
            tasks.append(_step(shape, index, agent, reads, tuple(tasks[-1:]) if serial else ()))
            continue
        tokens, rows = shape.pace(index)
        begun = tuple(tasks[at] for at in sources[index])
        task = Task(
            agent.group,
            max(1, shape.prompt_tokens(index)),
            max(0, shape.outputs[index] - agent.written),
            after=tuple(tasks[-1:]) if serial else (),
            begun=() if serial or shape.start == "immediate" else begun,
            dispatched=() if serial or shape.start == "first_token" else begun,
            reads=reads,
            pieces=() if serial or shape.joined[index] else _pieces(shape, index, tasks),
            held=cached_prefix(shape, index, views.get(agent.group)),
            kin=tuple(
                (tasks[at], tokens)
                for at, tokens in enumerate(shape.shared[index])
                if tokens and agents[at].group == agent.group
            ),
            inner=index in read,
            grid=shape.grid,
            pace=tokens,
            rows=rows,
            stage=agent.stage,
            read=float(agent.read),
        )
        tasks.append(task)
    return tasks


def _step(
    shape: ChainShape, index: int, agent: AgentProgress, reads: tuple[Task, ...], before: tuple[Task, ...]
) -> Task:
    """A step between agents: it begins when all that it reads is there."""
    return Task("", 1, shape.steps[index] or 0.0, after=(*before, *reads), reads=reads, stage=agent.stage)


def _pieces(shape: ChainShape, index: int, tasks: Sequence[Task]) -> tuple[Piece, ...]:
    """What of an agent's prompt can be read ahead: up to each output, and that but for the tokens of a last append."""
    pieces: list[Piece] = []
    position, before = 0, None
    for part in shape.parts[index]:
        if isinstance(part, OutputOf) and shape.is_step(part.agent):  # nothing of it is there before all of it is
            pieces.append(Piece(position, before))
            position += shape.outputs[part.agent]
            before = tasks[part.agent]
        elif isinstance(part, OutputOf):
            position += shape.outputs[part.agent]
            tail = min(shape.outputs[part.agent], shape.append_tokens)
            pieces.append(Piece(position - tail, before))
            before = tasks[part.agent]
        else:
            position += part
    return tuple(pieces)


def cached_prefix(shape: ChainShape, index: int, view: GroupView | None) -> int:
    """Tokens of an agent's prefix that a group's cache holds."""
    if shape.isolated or view is None:
        return 0
    rungs = shape.rungs[index]
    if not rungs or (rungs[0][0] not in view.held and rungs[-1][0] not in view.held):
        return 0  # where the beginning is not held, nothing is
    return next((length for digest, length in reversed(rungs) if digest in view.held), 0)


def _places(agents: Iterable[AgentProgress]) -> frozenset[str]:
    """The groups that agents have still to run on."""
    return frozenset(agent.group for agent in agents if agent.group and agent.stage is not Stage.ENDED)


def _end(tasks: Sequence[Task]) -> float:
    return max(task.ended for task in tasks)


def _prediction(
    tasks: Sequence[Task], placement: Placement, groups: tuple[str, ...], unknown_steps: tuple[int, ...]
) -> Prediction:
    """The times on the chain's critical path, which add up to its end."""
    last = max(tasks, key=lambda task: task.ended)
    prefill = decode = wait = steps = 0.0
    at: Task | None = last
    while at is not None:
        waited = min(at.waited, at.first - at.ready)
        prefill += at.first - at.ready - waited
        if at.group:
            decode += at.ended - at.first
        else:
            steps += at.ended - at.first
        wait += waited
        before = [*at.reads, *at.after]
        at = max(before, key=lambda task: task.ended) if before else None
    return Prediction(
        placement=placement,
        groups=groups,
        e2e_ms=round(last.ended, 3),
        prefill_ms=round(prefill, 3),
        decode_ms=round(decode, 3),
        wait_ms=round(wait, 3),
        steps_ms=round(steps, 3),
        hidden_ms=round(sum(task.hidden for task in tasks), 3),
        unknown_steps=unknown_steps,
    )
