"""When the agents of some chains start, write and end on engines whose costs are known. Pure.

Agents are walked through as tasks, from one event to the next; between two events everything goes on evenly:

- A prompt whose answer is waited for has its group's engine to itself; others queue behind it, and share what a prompt
  of one token takes. Decodes stand still but for a token, as an engine's step computes whole chunks of it.
- Decodes of a group share its steps.
- What is read ahead goes on at full speed where nothing decodes. Beside decodes it rides at the measured speed and
  slows them by the measured factor; where no such figures are, it is computed like a prompt that is waited for.
- A task that has to be alone starts when its group is empty, and nothing starts beside it.
- Steps between agents begin when all that they read has ended, and take their time whatever else goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from pingpongd.agent_task import (
    NOTHING,
    Stage,
    Task,
    blocker,
    go_on_reading,
    start,
    start_step,
    take_read,
    take_up,
)
from pingpongd.engine_cost import EngineCost

_FINAL, _WRITING, _ENDED = Stage.FINAL, Stage.WRITING, Stage.ENDED
"""Looked up once: this is where predictions spend their time."""


def run(tasks: Sequence[Task], costs: Mapping[str, EngineCost]) -> None:
    """Walk all tasks to their ends, which are noted in them.

    Args:
        tasks: in an order in which they could start; those that are under way have `stage`, `read` and `output` set.
        costs: of their groups.
    """
    timeline = _Timeline(tasks, costs)
    while timeline.step():
        pass


class _Place:
    """Where tasks run: here, steps between agents, which do not get in each other's way. Tasks are brought forward only
    when something happens to them."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        """That run in it, in the order of their starts."""
        self.held: list[Task] = []
        """Whose turn has come, and that wait for it."""
        self.now = 0.0
        """How far it was brought forward."""
        self.next = inf
        """When the next of its tasks completes what it does."""
        self.due: Task | None = None
        """Which one that is: it does so then, whatever rounding leaves of it."""

    def advance(self, now: float) -> None:
        """Bring its tasks forward."""
        passed, self.now = now - self.now, now
        if passed <= 0.0:
            return
        for task in self.tasks:
            if task.rate > 0.0:
                task.left -= task.rate * passed
            elif task.stage is _FINAL:
                task.waited += passed

    def begin(self, task: Task, now: float) -> None:
        """Start a task whose turn has come."""
        start_step(task, now)

    def take_up(self, task: Task) -> None:
        """Go on with one that is under way at the beginning."""
        start_step(task, 0.0)

    def go_on(self, task: Task) -> None:
        """Let one that reads go on with what is known by now: no step reads ahead."""

    def take(self, task: Task) -> None:
        """Note how far one has read that reads."""

    def plan(self) -> None:
        """Set how fast its tasks go on from now, and when the first of them completes what it does."""
        self.next, self.due = inf, None
        for task in self.tasks:
            task.rate = 1.0
            self._expect(task)

    def _expect(self, task: Task) -> None:
        at = self.now + task.left / task.rate
        if at < self.next:
            self.next, self.due = at, task


class _Group(_Place):
    """One engine."""

    def __init__(self, cost: EngineCost) -> None:
        super().__init__()
        self.cost = cost

    def begin(self, task: Task, now: float) -> None:
        start(task, self.cost, now)

    def take_up(self, task: Task) -> None:
        take_up(task, self.cost)

    def go_on(self, task: Task) -> None:
        go_on_reading(task, self.cost)

    def take(self, task: Task) -> None:
        take_read(task, self.cost)

    def plan(self) -> None:
        """Set how fast its tasks go on from now, and when the first of them completes what it does."""
        final: Task | None = None
        writers: list[Task] = []
        readers: list[Task] = []
        for task in self.tasks:
            task.rate = 0.0
            if task.stage is _WRITING:
                writers.append(task)
            elif task.stage is _FINAL:
                final = final or task
            elif task.full_ms > 0.0:
                readers.append(task)
        self.next, self.due = inf, None
        if final is not None:
            final.rate = 1.0
            self._expect(final)
            return
        inner = all(task.inner for task in writers)
        if readers:
            share = 1.0 / len(readers)
            for task in readers:
                task.rate = share / (max(NOTHING, task.rides[inner].ms) if writers else task.full_ms)
                self._expect(task)
        if not writers or (readers and not self.cost.riding.known):
            return
        context = sum(task.prompt + task.output / 2 for task in writers) / len(writers)
        step = self.cost.decode_ms(context, sum(task.rows for task in writers))
        if readers:
            step *= sum(task.rides[inner].slowed for task in readers) / len(readers)
        rate = 1.0 / max(step, NOTHING)
        for task in writers:
            task.rate = rate * task.pace
            self._expect(task)


class _Timeline:
    def __init__(self, tasks: Sequence[Task], costs: Mapping[str, EngineCost]) -> None:
        self._groups: dict[str, _Place] = {name: _Group(cost) for name, cost in costs.items()}
        if any(not task.group and task.stage is not _ENDED for task in tasks):
            self._groups[""] = _Place()
        self._waiting: dict[Task, list[Task]] = {}
        """Those that have not started, by one that they wait for: looked at again when something happens to it."""
        self._readers: dict[Task, list[Task]] = {}
        self._dirty = set(self._groups)
        for task in tasks:
            for other in task.reads:
                self._readers.setdefault(other, []).append(task)
            if Stage.WAITING < task.stage < _ENDED:
                self._groups[task.group].tasks.append(task)
                self._groups[task.group].take_up(task)
        for task in tasks:
            self._try(task, 0.0)

    def step(self) -> bool:
        """Go on to the next event; whether there was one."""
        for name in self._dirty:
            self._groups[name].plan()
        self._dirty.clear()
        group = min(self._groups.values(), key=_next, default=None)
        if group is None or group.next == inf:
            return False
        now = group.next
        group.advance(now)
        due = [task for task in group.tasks if task is group.due or 0.0 < task.rate * NOTHING >= task.left]
        for task, stage in [(task, task.stage) for task in due]:
            if task.stage is not stage:
                continue  # it read one of the others, and goes on to what comes next
            self._dirty.add(task.group)
            _complete(task, group, now)
            if task.stage is Stage.READING:
                group.go_on(task)
                continue
            if task.stage is _ENDED:
                for reader in self._readers.get(task, ()):
                    self._tell(reader, now)
                held, group.held = group.held, []
                for other in held:
                    self._try(other, now)
            self._look_at_waiting(task, now)
        return True

    def _look_at_waiting(self, task: Task, now: float) -> None:
        for other in self._waiting.pop(task, ()):
            self._try(other, now)

    def _tell(self, reader: Task, now: float) -> None:
        """One that it reads has ended."""
        if reader.stage is Stage.READING:
            group = self._groups[reader.group]
            group.advance(now)
            group.go_on(reader)
            self._dirty.add(reader.group)

    def _try(self, task: Task, now: float) -> None:
        """Start a task if its turn has come."""
        if task.stage is not Stage.WAITING:
            return
        if (other := blocker(task)) is not None:
            self._waiting.setdefault(other, []).append(task)
            return
        group = self._groups[task.group]
        if group.tasks and (task.grid is not None or group.tasks[0].grid is not None):
            if task not in group.held:
                group.held.append(task)
            return
        group.advance(now)
        group.tasks.append(task)
        group.begin(task, now)
        self._dirty.add(task.group)
        self._look_at_waiting(task, now)


def _next(group: _Place) -> float:
    return group.next


def _complete(task: Task, group: _Place, now: float) -> None:
    """What a task did has come to its end."""
    if task.stage is Stage.READING:
        task.left = 0.0
        group.take(task)
    elif task.stage is _FINAL:
        task.first, task.stage = now, _WRITING
        for other in group.tasks:
            if other.stage is _FINAL:  # the step of a short prompt had room for it
                other.left, other.shared = max(other.left - other.shared, NOTHING), 0.0
            elif other.stage is _WRITING:  # a token of each came with the last step of the prompt
                other.left = max((other.left - other.pace) if other is not task else (task.output - 1), NOTHING)
    else:
        task.ended, task.stage = now, _ENDED
        group.tasks.remove(task)
