"""One agent on a timeline: what it waits for, reads ahead and computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from pingpongd.engine_cost import EngineCost
from pingpongd.ride_cost import Ride

_BLOCK = 16
"""Cache hits are whole blocks of tokens."""
NOTHING = 1e-9
"""Milliseconds, and tokens: what is left of something takes as much at least."""


class Stage(IntEnum):
    """Where a task stands."""

    WAITING = 0
    READING = 1
    FINAL = 2
    """Its whole prompt is known, and its first token is computed."""
    WRITING = 3
    ENDED = 4


class Piece(NamedTuple):
    """A part of a prompt that can be read ahead."""

    end: int
    """In tokens from the prompt's beginning."""
    after: Task | None
    """The one that has to have ended before it is known, beside those of the pieces before it."""


@dataclass(slots=True, eq=False)
class Task:
    """One agent; times in ms from the beginning of the timeline."""

    group: str
    """Empty: it is a step between agents, which no engine runs."""
    prompt: int
    """Tokens of its prompt."""
    output: float
    """Tokens that it has still to write; of a step, milliseconds that it takes."""
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
    past: int = 0
    """So many of the pieces are read, or were begun."""
    held: int = 0
    """Tokens of its prompt that its group's prefix cache holds at the beginning."""
    kin: tuple[tuple[Task, int], ...] = ()
    """Earlier tasks on its group whose prompts and outputs begin with so many of its tokens."""
    inner: bool = False
    """Other agents read what it writes: then appends may slow it down more."""
    grid: int | None = None
    """The cell in tokens that it is cut at; then it is alone on its group."""
    pace: float = 1.0
    """Tokens that a step of the engine gives it: more than one where tokens are guessed."""
    rows: float = 1.0
    """Rows that it takes up in such a step: the guesses among them."""
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
    begin: int = 0
    end: int = 0
    """Tokens of the piece that it reads."""
    shared: float = 0.0
    """Of its last part, milliseconds that are no more where the prompt before it in the queue has paid for them."""
    rate: float = 0.0
    """Of `left`, per ms."""


def blocker(task: Task) -> Task | None:
    """One that keeps a task from starting, the latest that does; None: its turn has come."""
    for other in reversed(task.after):
        if other.stage is not Stage.ENDED:
            return other
    for other in reversed(task.begun):
        if other.stage < Stage.WRITING:
            return other
    for other in reversed(task.dispatched):
        if other.stage is Stage.WAITING:
            return other
    return None


def start(task: Task, cost: EngineCost, now: float) -> None:
    """Let an agent's task begin whose turn has come."""
    task.started = now
    task.read = float(_cached(task))
    task.stage = Stage.READING
    go_on_reading(task, cost)
    if task.stage is Stage.FINAL:
        task.waited = now - task.ready


def start_step(task: Task, now: float) -> None:
    """Let a step between agents run: all that it reads is there."""
    task.started = task.ready = task.first = now
    task.stage, task.left = Stage.WRITING, max(task.output, NOTHING)


def _cached(task: Task) -> int:
    """Tokens of its prompt that its group's prefix cache holds by now."""
    computed = [
        min(shared, other.prompt) if task.grid is not None or other.stage is not Stage.ENDED else shared
        for other, shared in task.kin
        if other.stage >= Stage.WRITING
    ]
    cached = min(max([task.held, *computed]), task.prompt - 1)
    return cached - cached % (task.grid or _BLOCK)


def take_up(task: Task, cost: EngineCost) -> None:
    """Go on with a task that is under way at the beginning."""
    task.read = max(task.read, float(_cached(task)))
    if task.stage is Stage.WRITING:
        task.left = max(task.output, NOTHING)
    elif task.stage is Stage.FINAL:
        _finalize(task, cost)
    else:
        go_on_reading(task, cost)


def go_on_reading(task: Task, cost: EngineCost) -> None:
    """Let a task read what is known of its prompt by now, or finalize it."""
    if all(other.stage is Stage.ENDED for other in reversed(task.reads)):
        if task.full_ms > 0:
            take_read(task, cost)
        _finalize(task, cost)
        return
    while task.full_ms <= 0 and task.past < len(task.pieces):
        piece = task.pieces[task.past]
        if piece.after is not None and piece.after.stage is not Stage.ENDED:
            return
        task.past += 1
        if piece.end > task.read:
            begin = task.begin = int(task.read)
            task.end, task.left = piece.end, 1.0
            task.full_ms = max(NOTHING, cost.read_ms(begin, piece.end))
            task.rides = cost.riding.ride(begin, piece.end, inner=False), cost.riding.ride(begin, piece.end, inner=True)


def take_read(task: Task, cost: EngineCost) -> None:
    """Note how far the piece was read: early tokens are cheaper than late ones, which attend to more."""
    part = 1.0 - task.left
    task.read = float(task.end if part >= 1.0 else cost.reached(task.begin, task.end, part * task.full_ms))
    task.hidden += part * task.full_ms
    task.full_ms = 0.0


def _finalize(task: Task, cost: EngineCost) -> None:
    cell = task.grid or 1
    read = min(int(task.read) // cell * cell, task.prompt - 1)
    task.stage = Stage.FINAL
    task.ready = max([0.0, *(other.ended for other in (*task.reads, *task.after))])
    task.left = max(NOTHING, cost.first_token_ms(read, task.prompt - read))
    task.shared = min(task.left, cost.first_token_ms(read, 1))
