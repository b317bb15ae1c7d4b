"""When the agents of some chains start, write and end on engines whose costs are known. Pure.

Agents are walked through as tasks, from one event to the next; between two events everything goes on evenly:

- A prompt whose answer is waited for has its group's engine to itself; others queue behind it, and share what a prompt
  of one token takes. Decodes stand still but for a token, as an engine's step computes whole chunks of it.
- Decodes of a group share its steps.
- What is read ahead goes on at full speed where nothing decodes. Beside decodes it rides at the measured speed and
  slows them by the measured factor; where no such figures are, it is computed like a prompt that is waited for.
- A task that has to be alone starts when its group is empty, and nothing starts beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import NamedTuple

from pingpongd.engine_cost import EngineCost
from pingpongd.ride_cost import Ride

_BLOCK = 16
"""Cache hits are whole blocks of tokens."""
_NOTHING = 1e-9


class Stage(IntEnum):
    """Where a task stands."""

    WAITING = 0
    READING = 1
    FINAL = 2
    """Its whole prompt is known, and its first token is computed."""
    WRITING = 3
    ENDED = 4


_FINAL, _WRITING, _ENDED = Stage.FINAL, Stage.WRITING, Stage.ENDED
"""Looked up once: this is where predictions spend their time."""


class Piece(NamedTuple):
    """A part of a prompt that can be read ahead."""

    end: int
    """In tokens from the prompt's beginning."""
    after: tuple[Task, ...]
    """Those that have to have ended before it is known."""


@dataclass(slots=True, eq=False)
class Task:
    """One agent; times in ms from the beginning of the timeline."""

    group: str
    prompt: int
    """Tokens of its prompt."""
    output: float
    """Tokens that it has still to write."""
    after: tuple[Task, ...] = ()
    """Those that have to have ended before it starts."""
    begun: tuple[Task, ...] = ()
    """Those that have to have written a token before it starts."""
    dispatched: tuple[Task, ...] = ()
    """Those that have to have started before it does."""
    reads: tuple[Task, ...] = ()
    """Those whose outputs its prompt holds."""
    pieces: tuple[Piece, ...] = ()
    """What it reads ahead."""
    held: int = 0
    """Tokens of its prompt that its group's prefix cache holds at the beginning."""
    kin: tuple[tuple[Task, int], ...] = ()
    """Earlier tasks on its group whose prompts and outputs begin with so many of its tokens."""
    inner: bool = False
    """Other agents read what it writes: then appends may slow it down more."""
    grid: int | None = None
    """The cell in tokens that it is cut at; then it is alone on its group."""
    stage: Stage = Stage.WAITING
    read: float = 0.0
    """Tokens of its prompt that are computed."""
    started: float = 0.0
    ready: float = 0.0
    """When nothing but its own work was left to wait for."""
    waited: float = 0.0
    """After that, for a group that others held."""
    first: float = 0.0
    ended: float = 0.0
    hidden: float = 0.0
    """Milliseconds of prefill that were read ahead."""
    left: float = 0.0
    """Of what it does now: a part of the piece, milliseconds until the first token, tokens to write."""
    full_ms: float = 0.0
    """Of the piece that it reads, at full speed; 0: it reads none now."""
    rides: tuple[Ride, Ride] = (Ride(0.0, 1.0), Ride(0.0, 1.0))
    """The same beside decodes: where a user reads one of them, and where other agents read all of them."""
    begin: float = 0.0
    end: int = 0
    """Tokens of the piece that it reads."""
    shared: float = 0.0
    """Of its last part, milliseconds that are no more where the prompt before it in the queue has paid for them."""
    rate: float = 0.0
    """Of `left`, per ms."""


def run(tasks: Sequence[Task], costs: Mapping[str, EngineCost]) -> None:
    """Walk all tasks to their ends, which are noted in them.

    Args:
        tasks: in an order in which they could start; those that are under way have `stage`, `read` and `output` set.
        costs: of their groups.
    """
    timeline = _Timeline(tasks, costs)
    while timeline.step():
        pass


class _Group:
    """One engine. Its tasks are brought forward only when something happens to them."""

    def __init__(self, cost: EngineCost) -> None:
        self.cost = cost
        self.tasks: list[Task] = []
        """That run on it, in the order of their starts."""
        self.held: list[Task] = []
        """Whose turn has come, and that wait for it."""
        self.now = 0.0
        """How far it was brought forward."""
        self.next = inf
        """When the next of its tasks completes what it does."""

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
        self.next = inf
        if final is not None:
            final.rate = 1.0
            self.next = self.now + final.left
            return
        inner = all(task.inner for task in writers)
        if readers:
            share = 1.0 / len(readers)
            for task in readers:
                task.rate = share / (max(_NOTHING, task.rides[inner].ms) if writers else task.full_ms)
                self.next = min(self.next, self.now + task.left / task.rate)
        if not writers or (readers and not self.cost.riding.known):
            return
        context = sum(task.prompt + task.output / 2 for task in writers) / len(writers)
        step = self.cost.decode_ms(context, len(writers))
        if readers:
            step *= sum(task.rides[inner].slowed for task in readers) / len(readers)
        rate = 1.0 / max(step, _NOTHING)
        for task in writers:
            task.rate = rate
            self.next = min(self.next, self.now + task.left / rate)


class _Timeline:
    def __init__(self, tasks: Sequence[Task], costs: Mapping[str, EngineCost]) -> None:
        self._groups = {name: _Group(cost) for name, cost in costs.items()}
        self._waiting: dict[Task, list[Task]] = {}
        """By what they may wait for, those that have not started."""
        self._readers: dict[Task, list[Task]] = {}
        self._dirty: set[str] = set(costs)
        for task in tasks:
            for other in task.reads:
                self._readers.setdefault(other, []).append(task)
            if task.stage is Stage.WAITING:
                for other in {*task.after, *task.begun, *task.dispatched}:
                    self._waiting.setdefault(other, []).append(task)
            elif task.stage is not _ENDED:
                self._groups[task.group].tasks.append(task)
                _take_up(task, self._groups[task.group].cost)
        for task in tasks:
            self._try(task, 0.0)

    def step(self) -> bool:
        """Go on to the next event; whether there was one."""
        for name in self._dirty:
            self._groups[name].plan()
        self._dirty.clear()
        group = min(self._groups.values(), key=_next)
        now = group.next
        if now == inf:
            return False
        group.advance(now)
        for task in [task for task in group.tasks if task.rate > 0.0 and task.left <= task.rate * _NOTHING]:
            self._dirty.add(task.group)
            _complete(task, group, now)
            if task.stage is Stage.READING:
                _go_on_reading(task, group.cost, now)
                continue
            if task.stage is _ENDED:
                for reader in self._readers.get(task, ()):
                    self._tell(reader, now)
                held, group.held = group.held, []
                for other in held:
                    self._try(other, now)
            for other in self._waiting.get(task, ()):
                self._try(other, now)
        return True

    def _tell(self, reader: Task, now: float) -> None:
        """One that it reads has ended."""
        if reader.stage is Stage.READING:
            group = self._groups[reader.group]
            group.advance(now)
            _go_on_reading(reader, group.cost, now)
            self._dirty.add(reader.group)

    def _try(self, task: Task, now: float) -> None:
        """Start a task if its turn has come."""
        if not _may_start(task):
            return
        group = self._groups[task.group]
        if group.tasks and (task.grid is not None or group.tasks[0].grid is not None):
            if task not in group.held:
                group.held.append(task)
            return
        group.advance(now)
        group.tasks.append(task)
        _start(task, group.cost, now)
        self._dirty.add(task.group)
        for other in self._waiting.get(task, ()):
            self._try(other, now)


def _next(group: _Group) -> float:
    return group.next


def _may_start(task: Task) -> bool:
    if task.stage is not Stage.WAITING:
        return False
    for other in task.after:
        if other.stage is not _ENDED:
            return False
    for other in task.begun:
        if other.stage < _WRITING:
            return False
    return all(other.stage is not Stage.WAITING for other in task.dispatched)


def _start(task: Task, cost: EngineCost, now: float) -> None:
    task.started = now
    task.ready = max([0.0, *(other.ended for other in (*task.reads, *task.after))])
    task.read = float(_cached(task))
    task.stage = Stage.READING
    _go_on_reading(task, cost, now)
    if task.stage is _FINAL:
        task.waited = now - task.ready


def _cached(task: Task) -> int:
    """Tokens of its prompt that its group's prefix cache holds by now."""
    computed = [
        min(shared, other.prompt) if task.grid is not None or other.stage is not _ENDED else shared
        for other, shared in task.kin
        if other.stage >= _WRITING
    ]
    cached = min(max([task.held, *computed]), task.prompt - 1)
    return cached - cached % (task.grid or _BLOCK)


def _take_up(task: Task, cost: EngineCost) -> None:
    """Go on with a task that is under way at the beginning."""
    task.read = max(task.read, float(_cached(task)))
    if task.stage is _WRITING:
        task.left = max(task.output, _NOTHING)
    elif task.stage is _FINAL:
        _finalize(task, cost, 0.0)
    else:
        _go_on_reading(task, cost, 0.0)


def _go_on_reading(task: Task, cost: EngineCost, now: float) -> None:
    """Let a task read what is known of its prompt by now, or finalize it."""
    if all(other.stage is _ENDED for other in task.reads):
        if task.full_ms > 0:
            _take_read(task, cost)
        _finalize(task, cost, now)
        return
    if task.full_ms > 0:
        return
    for piece in task.pieces:
        if piece.end <= task.read:
            continue
        if any(other.stage is not _ENDED for other in piece.after):
            return
        task.begin, task.end, task.left = task.read, piece.end, 1.0
        task.full_ms = max(_NOTHING, cost.read_ms(int(task.read), piece.end))
        begin = int(task.read)
        task.rides = cost.riding.ride(begin, piece.end, inner=False), cost.riding.ride(begin, piece.end, inner=True)
        return


def _take_read(task: Task, cost: EngineCost) -> None:
    """Note how far the piece was read: early tokens are cheaper than late ones, which attend to more."""
    part = 1.0 - task.left
    task.read = float(task.end if part >= 1.0 else cost.reached(int(task.begin), task.end, part * task.full_ms))
    task.hidden += part * task.full_ms
    task.full_ms = 0.0


def _finalize(task: Task, cost: EngineCost, now: float) -> None:
    cell = task.grid or 1
    read = min(int(task.read) // cell * cell, task.prompt - 1)
    task.stage = _FINAL
    task.ready = max(task.ready, now if task.started < now else task.ready)
    task.left = max(_NOTHING, cost.first_token_ms(read, task.prompt - read))
    task.shared = min(task.left, cost.first_token_ms(read, 1))


def _complete(task: Task, group: _Group, now: float) -> None:
    """What a task did has come to its end."""
    if task.stage is Stage.READING:
        task.left = 0.0
        _take_read(task, group.cost)
    elif task.stage is _FINAL:
        task.first, task.stage = now, _WRITING
        for other in group.tasks:
            if other.stage is _FINAL:  # the step of a short prompt had room for it
                other.left, other.shared = max(other.left - other.shared, _NOTHING), 0.0
            elif other.stage is _WRITING:  # a token of each came with the last step of the prompt
                other.left = max(other.left - 1, _NOTHING) if other is not task else max(task.output - 1, _NOTHING)
    else:
        task.ended, task.stage = now, _ENDED
        group.tasks.remove(task)
