"""The life of a chain, as a pure function: (state, event) -> (state, commands).

An agent's phases::

    waiting ──Dispatch──► dispatched ──HopOpened──► reading ──HopFirstToken──► writing
                                                                                  │ HopEnded finished
                              (any live phase) ──HopEnded failed──► failed        ▼
                              (any live phase) ──HopEnded aborted─► cancelled   written ──HopChecked──► done

A chain's::

    queued ──Admitted──► running ──all done──► finished
      │                     │ HopEnded failed ──► failing ──no live hop──► failed ◄──Unplaceable── queued
      └──Cancelled──► cancelled ◄──no live hop── cancelling ◄──Cancelled──┘

A chain's end waits until no hop is live: only then may its token logs be freed. Which agents are dispatched when is
decided here as well, from the placement (see `placement.py`). An event that the table does not know in the phase at
hand raises `IllegalTransition` with the chain's history.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal

import msgspec

from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import Placement


class Phase(Enum):
    """Where an agent stands."""

    WAITING = "waiting"
    DISPATCHED = "dispatched"
    READING = "reading"
    WRITING = "writing"
    WRITTEN = "written"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset({Phase.DISPATCHED, Phase.READING, Phase.WRITING})
"""A hop runs on a worker, which touches the chain's token logs."""
_EMITTED = frozenset({Phase.WRITING, Phase.WRITTEN, Phase.DONE})
_WRITTEN = frozenset({Phase.WRITTEN, Phase.DONE})


class Stage(Enum):
    """Where a chain stands."""

    QUEUED = "queued"
    RUNNING = "running"
    FAILING = "failing"
    CANCELLING = "cancelling"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({Stage.FINISHED, Stage.FAILED, Stage.CANCELLED})


# Events


class Admitted(msgspec.Struct, frozen=True):
    """The chain has its slots and a plan."""

    placement: Placement


class Opened(msgspec.Struct, frozen=True):
    agent: int


class FirstToken(msgspec.Struct, frozen=True):
    agent: int


class Ended(msgspec.Struct, frozen=True):
    agent: int
    state: Literal["finished", "failed", "aborted"]
    error: str = ""


class Checked(msgspec.Struct, frozen=True):
    agent: int


class CancelAsked(msgspec.Struct, frozen=True):
    why: str = ""


class Unplaceable(msgspec.Struct, frozen=True):
    """A waiting chain's turn has come, and the groups that it needs are gone."""

    why: str


Event = Admitted | Opened | FirstToken | Ended | Checked | CancelAsked | Unplaceable


# Commands


class Dispatch(msgspec.Struct, frozen=True):
    """Start the agent's hop."""

    agent: int


class Abort(msgspec.Struct, frozen=True):
    """End the agent's hop; its `Ended` will follow."""

    agent: int


class Finish(msgspec.Struct, frozen=True):
    """The chain has ended: free its slots, tell its followers."""

    stage: Stage
    error: str


Command = Dispatch | Abort | Finish


class ChainState(msgspec.Struct, frozen=True):
    """A chain's state; replaced, never changed."""

    upstreams: tuple[tuple[int, ...], ...]
    start: Literal["first_token", "immediate"]
    phases: tuple[Phase, ...]
    stage: Stage = Stage.QUEUED
    placement: Placement | None = None
    error: str = ""
    history: tuple[str, ...] = ()
    """The latest events, for people who have to understand a fault."""


Outcome = tuple[ChainState, list[Command]]
_HISTORY = 64


class IllegalTransition(PingpongError):
    """An event came that cannot come in this phase: a bug of ours, shown with the history."""

    def __init__(self, state: ChainState, event: Event) -> None:
        lines = "\n  ".join(state.history)
        phases = ", ".join(phase.value for phase in state.phases)
        super().__init__(f"{event} in a chain that is {state.stage.value} ({phases}); before it:\n  {lines}")
        self.state = state
        self.event = event


def new_chain(upstreams: tuple[tuple[int, ...], ...], start: Literal["first_token", "immediate"]) -> ChainState:
    """The state of a chain that has just been accepted."""
    return ChainState(upstreams, start, (Phase.WAITING,) * len(upstreams))


def transition(state: ChainState, event: Event) -> Outcome:
    """Apply one event.

    Raises:
        IllegalTransition: the table has no such event in this phase.
    """
    handler = _TABLE.get((state.stage, type(event)))
    if handler is None:
        raise IllegalTransition(state, event)
    history = (*state.history, repr(event))[-_HISTORY:]
    return handler(msgspec.structs.replace(state, history=history), event)


def validate(state: ChainState) -> None:
    """Check what must hold of every state; for tests and for debugging.

    Raises:
        AssertionError: naming what does not hold.
    """
    live = [phase for phase in state.phases if phase in LIVE]
    if state.stage is Stage.QUEUED:
        assert all(phase is Phase.WAITING for phase in state.phases), "a queued chain has started agents"  # noqa: S101
    if state.stage in ENDED:
        assert not live, "an ended chain has live hops"  # noqa: S101
    if state.stage is Stage.FINISHED:
        assert all(phase is Phase.DONE for phase in state.phases), "a finished chain has unfinished agents"  # noqa: S101
    if state.placement == "serial":
        assert len(live) <= 1, "a chain in series has two live hops"  # noqa: S101
    for phase, reads in zip(state.phases, state.upstreams, strict=True):
        if phase in LIVE and state.start == "first_token" and state.stage is Stage.RUNNING:
            assert all(state.phases[at] in _EMITTED for at in reads), "a hop runs before its upstream's first token"  # noqa: S101


def _ready(state: ChainState, index: int) -> bool:
    """Whether a waiting agent may be dispatched."""
    reads = [state.phases[at] for at in state.upstreams[index]]
    if state.placement == "serial":
        return all(phase in _WRITTEN for phase in state.phases[:index])
    if state.start == "immediate":
        return all(phase is not Phase.WAITING for phase in reads)
    return all(phase in _EMITTED for phase in reads)


def _dispatch_ready(state: ChainState) -> Outcome:
    commands: list[Command] = []
    for index, phase in enumerate(state.phases):
        if phase is Phase.WAITING and _ready(state, index):
            state = _with_phase(state, index, Phase.DISPATCHED)
            commands.append(Dispatch(index))
    return state, commands


def _with_phase(state: ChainState, index: int, phase: Phase) -> ChainState:
    phases = (*state.phases[:index], phase, *state.phases[index + 1 :])
    return msgspec.structs.replace(state, phases=phases)


def _step(state: ChainState, event: Opened | FirstToken | Ended | Checked) -> ChainState:
    """Move one agent on by the agents' table."""
    phase = state.phases[event.agent]
    key = (type(event), event.state) if isinstance(event, Ended) else (type(event), None)
    before, after = _AGENT_TABLE[key]
    if phase not in before:
        raise IllegalTransition(state, event)
    return _with_phase(state, event.agent, after)


def _end_if_idle(state: ChainState, stage: Stage) -> Outcome:
    """Where no hop is live any more, end the chain in `stage`."""
    if any(phase in LIVE for phase in state.phases):
        return state, []
    phases = tuple(Phase.CANCELLED if phase is Phase.WAITING else phase for phase in state.phases)
    ended = msgspec.structs.replace(state, stage=stage, phases=phases)
    return ended, [Finish(stage, state.error)]


def _wind_down(state: ChainState, stage: Stage, final: Stage, error: str) -> Outcome:
    """Abort every live hop; the chain ends once they have ended."""
    state = msgspec.structs.replace(state, stage=stage, error=error)
    aborts: list[Command] = [Abort(index) for index, phase in enumerate(state.phases) if phase in LIVE]
    state, commands = _end_if_idle(state, final)
    return state, aborts + commands


def _admitted(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Admitted)  # noqa: S101
    return _dispatch_ready(msgspec.structs.replace(state, stage=Stage.RUNNING, placement=event.placement))


def _progress(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Opened | FirstToken | Ended | Checked)  # noqa: S101
    state = _step(state, event)
    if isinstance(event, Ended) and event.state != "finished":
        error = event.error or "a worker ended the hop unasked"
        return _wind_down(state, Stage.FAILING, Stage.FAILED, error)
    if all(phase is Phase.DONE for phase in state.phases):
        return msgspec.structs.replace(state, stage=Stage.FINISHED), [Finish(Stage.FINISHED, "")]
    return _dispatch_ready(state)


def _failing(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Opened | FirstToken | Ended | Checked)  # noqa: S101
    if isinstance(event, Ended) and event.state == "failed" and event.error:
        # An upstream's failure is the cause of its readers', and theirs may be heard of first.
        failed = [at for at, phase in enumerate(state.phases) if phase is Phase.FAILED]
        if event.agent < min(failed, default=len(state.phases)):
            state = msgspec.structs.replace(state, error=event.error)
    return _end_if_idle(_step(state, event), Stage.FAILED)


def _cancelling(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Opened | FirstToken | Ended | Checked)  # noqa: S101
    return _end_if_idle(_step(state, event), Stage.CANCELLED)


def _fail_queued(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Unplaceable)  # noqa: S101
    return _wind_down(state, Stage.FAILING, Stage.FAILED, event.why)


def _cancel(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, CancelAsked)  # noqa: S101
    return _wind_down(state, Stage.CANCELLING, Stage.CANCELLED, event.why)


def _ignored(state: ChainState, event: Event) -> Outcome:  # noqa: ARG001
    return state, []


_AGENT_TABLE: dict[tuple[type[Event], str | None], tuple[frozenset[Phase], Phase]] = {
    (Opened, None): (frozenset({Phase.DISPATCHED}), Phase.READING),
    (FirstToken, None): (frozenset({Phase.READING}), Phase.WRITING),
    # An answer that begins with its stop token has no first token.
    (Ended, "finished"): (frozenset({Phase.READING, Phase.WRITING}), Phase.WRITTEN),
    (Ended, "failed"): (LIVE, Phase.FAILED),
    (Ended, "aborted"): (LIVE, Phase.CANCELLED),
    (Checked, None): (frozenset({Phase.WRITTEN}), Phase.DONE),
}

_TABLE: dict[tuple[Stage, type[Event]], Callable[[ChainState, Event], Outcome]] = {
    (Stage.QUEUED, Admitted): _admitted,
    (Stage.QUEUED, CancelAsked): _cancel,
    (Stage.QUEUED, Unplaceable): _fail_queued,
    (Stage.RUNNING, Opened): _progress,
    (Stage.RUNNING, FirstToken): _progress,
    (Stage.RUNNING, Ended): _progress,
    (Stage.RUNNING, Checked): _progress,
    (Stage.RUNNING, CancelAsked): _cancel,
    (Stage.FAILING, CancelAsked): _ignored,
    (Stage.CANCELLING, CancelAsked): _ignored,
    **{(Stage.FAILING, event): _failing for event in (Opened, FirstToken, Ended, Checked)},
    **{(Stage.CANCELLING, event): _cancelling for event in (Opened, FirstToken, Ended, Checked)},
    # What was under way when the chain ended.
    **{(stage, event): _ignored for stage in ENDED for event in (Checked, CancelAsked)},
}
