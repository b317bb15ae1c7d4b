"""The life of a chain, as a pure function: (state, event) -> (state, commands).

An agent's phases::

    waiting ──Dispatch──► dispatched ──Opened──► reading ──FirstToken──► writing ──┐
       ▲ ▲                     │                    │                       │      │ Ended finished
       │ └──────── Lost, nothing written ───────────┘                      Lost    ▼
       │                                                                    │   written ──Checked──► done
       │        resuming ──FirstToken──► writing                            ▼      ▲
       │           ▲ └──Lost──► interrupted ◄───────────────────────── interrupted │
       │           └──Dispatch───────┘                       resuming ──finished───┘
       │
       └──Ended aborted, Lost── yielding ◄── (dispatched, reading: an agent that it reads from is held, or GiveWay)

       (any live phase) ──Ended failed──► failed          (any live phase) ──Ended aborted──► cancelled

A step's, which no worker runs and no engine holds anything for::

    waiting ──RunStep──► stepping ──Ended finished──► written ──Checked──► done

It begins when all that it reads is written. What an agent reads through steps counts like what it reads itself: it is
dispatched when those have emitted, so that the static parts of its prompt are read while they write and the step runs.

A chain's::

    queued ──Admitted──► running ──all done──► finished
      │                     │ Ended failed ──► failing ──no live hop──► failed ◄──FailAsked── queued
      └──CancelAsked──► cancelled ◄──no live hop── cancelling ◄──CancelAsked──┘

An agent that is to be dispatched and cannot, for want of a group or of room in its engine, is **held** until `Retry`.
Whoever reads from it, and has written nothing, then *yields*: it gives its memory back and waits, too. So whatever
holds memory in an engine depends on nothing but hops that run, and no chains can wait for each other.

A step may take as long as it likes, and an agent that waits for one holds memory, perhaps a whole group. Where others
want that it is told to **give way**: it yields, too, and is dispatched again once the steps that it reads have ended.

A chain's end waits until no hop is live: only then may its token logs be freed. Which agents are dispatched when is
decided here as well, from the placement (see `placement.py`). An event that the table does not know in the phase at
hand raises `IllegalTransition` with the chain's history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    INTERRUPTED = "interrupted"
    """It has written, and lost its worker; its log is open."""
    RESUMING = "resuming"
    """Dispatched again, with what it has written."""
    STEPPING = "stepping"
    """Of a step between agents: it runs."""
    YIELDING = "yielding"
    """Being aborted, to wait again."""
    WRITTEN = "written"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset(
    {Phase.DISPATCHED, Phase.READING, Phase.WRITING, Phase.RESUMING, Phase.YIELDING, Phase.STEPPING},
)
"""A hop runs on a worker, which touches the chain's token logs; or a step runs, which may touch the world."""
_EMITTED = frozenset({Phase.WRITING, Phase.INTERRUPTED, Phase.RESUMING, Phase.WRITTEN, Phase.DONE})
_WRITTEN = frozenset({Phase.WRITTEN, Phase.DONE})
_IDLE = frozenset({Phase.WAITING, Phase.INTERRUPTED})
"""Nothing runs, and something has yet to."""


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


class Lost(msgspec.Struct, frozen=True):
    """The hop is gone with its worker or its engine; nobody writes its log any more."""

    agent: int
    written: bool
    """Tokens stand in its log."""


class Held(msgspec.Struct, frozen=True):
    """A dispatch that could not be carried out now."""

    agent: int


class Retry(msgspec.Struct, frozen=True):
    """There may be a group and room for an agent that is held."""

    agent: int


class GiveWay(msgspec.Struct, frozen=True):
    """Others want what an agent holds that waits for a step; ignored where it does so no more."""

    agent: int


class Moved(msgspec.Struct, frozen=True):
    """Groups are lost, and the agents that have not started run on other ones."""

    placement: Placement


class Checked(msgspec.Struct, frozen=True):
    agent: int


class CancelAsked(msgspec.Struct, frozen=True):
    why: str = ""


class FailAsked(msgspec.Struct, frozen=True):
    """The chain cannot go on: its groups are gone for good, or its deadline has passed."""

    why: str


Event = (
    Admitted | Opened | FirstToken | Ended | Lost | Held | Retry | GiveWay | Moved | Checked | CancelAsked | FailAsked
)


# Commands


class Dispatch(msgspec.Struct, frozen=True):
    """Start the agent's hop, or what is left of it; answered by `Held` where that cannot be now."""

    agent: int


class RunStep(msgspec.Struct, frozen=True):
    """Start a step; its `Ended` will follow, in a later turn of the event loop."""

    agent: int


class Abort(msgspec.Struct, frozen=True):
    """End the agent's hop, or the step; its `Ended` will follow."""

    agent: int


class Renew(msgspec.Struct, frozen=True):
    """Give the agent an empty token log: it will begin anew."""

    agent: int


class Finish(msgspec.Struct, frozen=True):
    """The chain has ended: free its slots, tell its followers."""

    stage: Stage
    error: str


Command = Dispatch | RunStep | Abort | Renew | Finish


class ChainState(msgspec.Struct, frozen=True):
    """A chain's state; replaced, never changed."""

    upstreams: tuple[tuple[int, ...], ...]
    start: Literal["first_token", "immediate"]
    phases: tuple[Phase, ...]
    stage: Stage = Stage.QUEUED
    placement: Placement | None = None
    moved: bool = False
    held: frozenset[int] = frozenset()
    """Agents whose turn has come, and for whom there is no group or no room."""
    gave_way: frozenset[int] = frozenset()
    """Agents that are dispatched only once the steps that they read have ended."""
    error: str = ""
    history: tuple[str, ...] = ()
    """The latest events, for people who have to understand a fault."""
    steps: frozenset[int] = frozenset()
    """Those of the agents that are steps."""
    sources: tuple[tuple[int, ...], ...] = ()
    """Per agent, the agents it reads, itself or through steps; none of them is a step."""


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


def new_chain(
    upstreams: tuple[tuple[int, ...], ...],
    start: Literal["first_token", "immediate"],
    finished: Iterable[int] = (),
    steps: Iterable[int] = (),
) -> ChainState:
    """The state of a chain that waits to be admitted.

    Args:
        upstreams: per agent, the agents it reads.
        start: of the chain.
        finished: agents that an earlier run of the daemon has brought to their end.
        steps: those of the agents that are steps.
    """
    over, between = set(finished), frozenset(steps)
    phases = tuple(Phase.DONE if index in over else Phase.WAITING for index in range(len(upstreams)))
    sources: list[tuple[int, ...]] = []
    for reads in upstreams:  # upstreams come first
        found = {source for at in reads for source in (sources[at] if at in between else (at,))}
        sources.append(tuple(sorted(found)))
    return ChainState(upstreams, start, phases, steps=between, sources=tuple(sources))


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


def awaited_steps(state: ChainState, index: int) -> list[int]:
    """The steps that run and that an agent waits for, itself or through other steps."""
    found: list[int] = []
    for at in state.upstreams[index]:
        if at in state.steps and state.phases[at] is Phase.STEPPING:
            found.append(at)
        elif at in state.steps and state.phases[at] is Phase.WAITING:
            found += awaited_steps(state, at)
    return list(dict.fromkeys(found))


def validate(state: ChainState) -> None:
    """Check what must hold of every state; for tests and for debugging.

    Raises:
        AssertionError: naming what does not hold.
    """
    live = [phase for phase in state.phases if phase in LIVE]
    if state.stage is Stage.QUEUED:
        assert all(phase in (Phase.WAITING, Phase.DONE) for phase in state.phases), "a queued chain has started agents"  # noqa: S101
    if state.stage in ENDED:
        assert not live, "an ended chain has live hops"  # noqa: S101
    if state.stage is Stage.FINISHED:
        assert all(phase is Phase.DONE for phase in state.phases), "a finished chain has unfinished agents"  # noqa: S101
    if state.placement == "serial" and not state.moved:
        assert len(live) <= 1, "a chain in series has two live hops"  # noqa: S101
    if state.stage is not Stage.RUNNING:
        return
    assert all(state.phases[at] in _IDLE for at in state.held), "an agent is held and runs"  # noqa: S101
    for index in state.steps:
        if state.phases[index] is not Phase.WAITING:
            written = all(state.phases[at] in _WRITTEN for at in state.upstreams[index])
            assert written, "a step runs before what it reads is written"  # noqa: S101
    for index in state.gave_way:
        if state.phases[index] not in (Phase.WAITING, Phase.YIELDING):
            assert _steps_over(state, index), "an agent that gave way runs before its step has ended"  # noqa: S101
    for phase, reads in zip(state.phases, state.sources, strict=True):
        if phase in LIVE and phase is not Phase.YIELDING:
            assert not any(at in state.held for at in reads), "a hop holds memory and reads from one that is held"  # noqa: S101
            if state.start == "first_token":
                assert all(state.phases[at] in _EMITTED for at in reads), "a hop runs before its upstream's first token"  # noqa: S101


def _ready(state: ChainState, index: int) -> bool:
    """Whether an idle agent may be dispatched."""
    if index in state.held:
        return False
    if state.phases[index] is Phase.INTERRUPTED:
        return True  # it had its whole prompt
    if index in state.gave_way and not _steps_over(state, index):
        return False
    reads = [state.phases[at] for at in state.sources[index]]
    if any(at in state.held for at in state.sources[index]):
        return False
    if state.placement == "serial":
        return all(phase in _WRITTEN for phase in state.phases[:index])
    if index in state.steps:
        return all(state.phases[at] in _WRITTEN for at in state.upstreams[index])
    if state.start == "immediate":
        return all(phase not in (Phase.WAITING, Phase.YIELDING) for phase in reads)
    return all(phase in _EMITTED for phase in reads)


def _steps_over(state: ChainState, index: int) -> bool:
    """Whether the steps that an agent reads have ended."""
    return all(state.phases[at] in _WRITTEN for at in state.upstreams[index] if at in state.steps)


def _dispatch_ready(state: ChainState) -> Outcome:
    commands: list[Command] = []
    for index, phase in enumerate(state.phases):
        if phase in _IDLE and _ready(state, index) and index in state.steps:
            state = _with_phase(state, index, Phase.STEPPING)
            commands.append(RunStep(index))
        elif phase in _IDLE and _ready(state, index):
            state = _with_phase(state, index, Phase.DISPATCHED if phase is Phase.WAITING else Phase.RESUMING)
            commands.append(Dispatch(index))
    return state, commands


def _with_phase(state: ChainState, index: int, phase: Phase) -> ChainState:
    phases = (*state.phases[:index], phase, *state.phases[index + 1 :])
    return msgspec.structs.replace(state, phases=phases)


def _step(state: ChainState, event: Opened | FirstToken | Ended | Lost | Checked) -> ChainState:
    """Move one agent on by the agents' table."""
    key: tuple[type[Event], str | None] = (type(event), event.state if isinstance(event, Ended) else None)
    after = _AGENT_TABLE[key].get(state.phases[event.agent])
    if after is None:
        raise IllegalTransition(state, event)
    if isinstance(event, Lost) and event.written and after is Phase.WAITING:
        after = Phase.INTERRUPTED  # its first token stood in the log before anyone was told
    return _with_phase(state, event.agent, after)


def _end_if_idle(state: ChainState, stage: Stage) -> Outcome:
    """Where no hop is live any more, end the chain in `stage`."""
    if any(phase in LIVE for phase in state.phases):
        return state, []
    phases = tuple(Phase.CANCELLED if phase in _IDLE else phase for phase in state.phases)
    ended = msgspec.structs.replace(state, stage=stage, phases=phases, held=frozenset())
    return ended, [Finish(stage, state.error)]


def _wind_down(state: ChainState, stage: Stage, final: Stage, error: str) -> Outcome:
    """Abort every live hop; the chain ends once they have ended."""
    state = msgspec.structs.replace(state, stage=stage, error=error)
    aborts: list[Command] = [
        Abort(index)
        for index, phase in enumerate(state.phases)
        if phase in LIVE and phase is not Phase.YIELDING  # which is being aborted already
    ]
    state, commands = _end_if_idle(state, final)
    return state, aborts + commands


def _admitted(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Admitted)  # noqa: S101
    return _go_on(msgspec.structs.replace(state, stage=Stage.RUNNING, placement=event.placement))


def _go_on(state: ChainState) -> Outcome:
    """Dispatch who is ready, or finish the chain where all are through."""
    if all(phase is Phase.DONE for phase in state.phases):
        return msgspec.structs.replace(state, stage=Stage.FINISHED), [Finish(Stage.FINISHED, "")]
    return _dispatch_ready(state)


def _progress(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Opened | FirstToken | Ended | Lost | Checked)  # noqa: S101
    yielded = state.phases[event.agent] is Phase.YIELDING
    # A hop that is being aborted may fail on its way, such as by an upstream's log that was renewed before it was told.
    if yielded and (isinstance(event, Lost) or (isinstance(event, Ended) and event.state != "finished")):
        state, commands = _go_on(_with_phase(state, event.agent, Phase.WAITING))
        return state, [Renew(event.agent), *commands]
    state = _step(state, event)
    if isinstance(event, Ended) and event.state != "finished":
        error = event.error or "a worker ended the hop unasked"
        return _wind_down(state, Stage.FAILING, Stage.FAILED, error)
    return _go_on(state)


def _hold(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Held)  # noqa: S101
    if state.phases[event.agent] is Phase.YIELDING:  # its upstream was held in the same breath; it never ran
        return _go_on(_with_phase(state, event.agent, Phase.WAITING))
    before = {Phase.DISPATCHED: Phase.WAITING, Phase.RESUMING: Phase.INTERRUPTED}.get(state.phases[event.agent])
    if before is None:
        raise IllegalTransition(state, event)
    state = _with_phase(state, event.agent, before)
    state = msgspec.structs.replace(state, held=state.held | {event.agent})
    return _yield_readers(state, event.agent)


def _yield_readers(state: ChainState, agent: int) -> Outcome:
    """Let whoever reads from an agent, and has written nothing, give its memory back."""
    commands: list[Command] = []
    stuck = {agent}
    for index, reads in enumerate(state.upstreams):  # upstreams come first, so one pass finds all
        if stuck.isdisjoint(reads):
            continue
        stuck.add(index)
        if state.phases[index] in (Phase.DISPATCHED, Phase.READING):
            state = _with_phase(state, index, Phase.YIELDING)
            commands.append(Abort(index))
    return state, commands


def _give_way(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, GiveWay)  # noqa: S101
    index = event.agent
    if state.phases[index] not in (Phase.DISPATCHED, Phase.READING) or not awaited_steps(state, index):
        return state, []
    state = msgspec.structs.replace(_with_phase(state, index, Phase.YIELDING), gave_way=state.gave_way | {index})
    state, commands = _yield_readers(state, index)  # those of a chain that starts at once
    return state, [Abort(index), *commands]


def _retry(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Retry)  # noqa: S101
    return _go_on(msgspec.structs.replace(state, held=state.held - {event.agent}))


def _moved(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Moved)  # noqa: S101
    return msgspec.structs.replace(state, placement=event.placement, moved=True), []


def _failing(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Opened | FirstToken | Ended | Lost | Checked)  # noqa: S101
    if isinstance(event, Ended) and event.state == "failed" and event.error:
        # An upstream's failure is the cause of its readers', and theirs may be heard of first.
        failed = [at for at, phase in enumerate(state.phases) if phase is Phase.FAILED]
        if event.agent < min(failed, default=len(state.phases)):
            state = msgspec.structs.replace(state, error=event.error)
    return _end_if_idle(_wound_down(state, event), Stage.FAILED)


def _cancelling(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, Opened | FirstToken | Ended | Lost | Checked)  # noqa: S101
    return _end_if_idle(_wound_down(state, event), Stage.CANCELLED)


def _wound_down(state: ChainState, event: Opened | FirstToken | Ended | Lost | Checked) -> ChainState:
    """Move an agent on in a chain that is being ended: one whose hop is lost has ended, too."""
    if isinstance(event, Lost):
        event = Ended(event.agent, "aborted")
    return _step(state, event)


def _held_while_ending(state: ChainState, event: Event) -> Outcome:
    """A dispatch that failed just when the chain was ended: its hop never ran."""
    assert isinstance(event, Held)  # noqa: S101
    state = _with_phase(state, event.agent, Phase.CANCELLED)
    return _end_if_idle(state, Stage.FAILED if state.stage is Stage.FAILING else Stage.CANCELLED)


def _fail(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, FailAsked)  # noqa: S101
    return _wind_down(state, Stage.FAILING, Stage.FAILED, event.why)


def _cancel(state: ChainState, event: Event) -> Outcome:
    assert isinstance(event, CancelAsked)  # noqa: S101
    return _wind_down(state, Stage.CANCELLING, Stage.CANCELLED, event.why)


def _ignored(state: ChainState, event: Event) -> Outcome:  # noqa: ARG001
    return state, []


_AGENT_TABLE: dict[tuple[type[Event], str | None], dict[Phase, Phase]] = {
    (Opened, None): {
        Phase.DISPATCHED: Phase.READING,
        Phase.RESUMING: Phase.RESUMING,
        Phase.YIELDING: Phase.YIELDING,
    },
    (FirstToken, None): {
        Phase.READING: Phase.WRITING,
        Phase.RESUMING: Phase.WRITING,
        Phase.YIELDING: Phase.YIELDING,
    },
    # An answer that begins with its stop token has no first token, and one that is resumed may have nothing left.
    (Ended, "finished"): dict.fromkeys(
        (Phase.READING, Phase.WRITING, Phase.RESUMING, Phase.YIELDING, Phase.STEPPING), Phase.WRITTEN
    ),
    (Ended, "failed"): dict.fromkeys(LIVE, Phase.FAILED),
    (Ended, "aborted"): dict.fromkeys(LIVE, Phase.CANCELLED),
    (Lost, None): {
        Phase.DISPATCHED: Phase.WAITING,
        Phase.READING: Phase.WAITING,
        Phase.WRITING: Phase.INTERRUPTED,
        Phase.RESUMING: Phase.INTERRUPTED,
    },
    (Checked, None): {Phase.WRITTEN: Phase.DONE},
}

_HOP_EVENTS: tuple[type[Event], ...] = (Opened, FirstToken, Ended, Lost, Checked)
_ENDING = (Stage.FAILING, Stage.CANCELLING)

_TABLE: dict[tuple[Stage, type[Event]], Callable[[ChainState, Event], Outcome]] = {
    (Stage.QUEUED, Admitted): _admitted,
    (Stage.QUEUED, CancelAsked): _cancel,
    (Stage.QUEUED, FailAsked): _fail,
    **{(Stage.RUNNING, event): _progress for event in _HOP_EVENTS},
    (Stage.RUNNING, Held): _hold,
    (Stage.RUNNING, Retry): _retry,
    (Stage.RUNNING, GiveWay): _give_way,
    (Stage.RUNNING, Moved): _moved,
    (Stage.RUNNING, CancelAsked): _cancel,
    (Stage.RUNNING, FailAsked): _fail,
    **{(Stage.FAILING, event): _failing for event in _HOP_EVENTS},
    **{(Stage.CANCELLING, event): _cancelling for event in _HOP_EVENTS},
    **{(stage, Held): _held_while_ending for stage in _ENDING},
    **{(stage, event): _ignored for stage in _ENDING for event in (CancelAsked, FailAsked, Retry, GiveWay, Moved)},
    # What was under way when the chain ended.
    **{
        (stage, event): _ignored
        for stage in ENDED
        for event in (Checked, CancelAsked, FailAsked, Retry, GiveWay, Moved)
    },
}
