"""The chain's state table: walked by hypothesis over legal events, and step by step where the order matters."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pingpongd.chain_state import (
    ENDED,
    LIVE,
    Abort,
    Admitted,
    CancelAsked,
    ChainState,
    Checked,
    Dispatch,
    Ended,
    Event,
    Finish,
    FirstToken,
    IllegalTransition,
    Opened,
    Phase,
    Stage,
    Unplaceable,
    new_chain,
    transition,
    validate,
)

SERIES_OF_THREE = ((), (0,), (1,))


def run(state: ChainState, *events: Event) -> tuple[ChainState, list[object]]:
    """Apply events; returns the last state and the commands of the last event."""
    commands: list[object] = []
    for event in events:
        state, found = transition(state, event)
        validate(state)
        commands = list(found)
    return state, commands


def written(agent: int) -> list[Event]:
    return [Opened(agent), FirstToken(agent), Ended(agent, "finished"), Checked(agent)]


def test_series_dispatches_the_next_agent_when_the_one_before_is_written() -> None:
    state, commands = run(new_chain(SERIES_OF_THREE, "first_token"), Admitted("serial"))
    assert commands == [Dispatch(0)]
    state, commands = run(state, Opened(0), FirstToken(0))
    assert commands == []
    state, commands = run(state, Ended(0, "finished"))
    assert commands == [Dispatch(1)]


def test_series_runs_unrelated_agents_one_after_the_other() -> None:
    _, commands = run(new_chain(((), ()), "first_token"), Admitted("serial"))
    assert commands == [Dispatch(0)]


def test_read_ahead_waits_for_the_upstreams_first_token() -> None:
    state, commands = run(new_chain(SERIES_OF_THREE, "first_token"), Admitted("ping-pong"))
    assert commands == [Dispatch(0)]
    state, commands = run(state, Opened(0))
    assert commands == []
    state, commands = run(state, FirstToken(0))
    assert commands == [Dispatch(1)]


def test_an_immediate_chain_reads_ahead_at_once() -> None:
    _, commands = run(new_chain(SERIES_OF_THREE, "immediate"), Admitted("ping-pong"))
    assert commands == [Dispatch(0), Dispatch(1), Dispatch(2)]


def test_fan_in_waits_for_every_upstream_to_have_emitted() -> None:
    state, commands = run(new_chain(((), (), (0, 1)), "first_token"), Admitted("ping-pong"))
    assert commands == [Dispatch(0), Dispatch(1)]
    state, commands = run(state, Opened(0), FirstToken(0))
    assert commands == []
    _, commands = run(state, Opened(1), FirstToken(1))
    assert commands == [Dispatch(2)]


def test_an_upstream_without_a_token_still_lets_its_reader_start() -> None:
    state, _ = run(new_chain(((), (0,)), "first_token"), Admitted("ping-pong"), Opened(0))
    _, commands = run(state, Ended(0, "finished"))
    assert commands == [Dispatch(1)]


def test_the_chain_finishes_once_every_agent_is_checked() -> None:
    state, _ = run(new_chain(((), (0,)), "first_token"), Admitted("serial"), *written(0))
    state, commands = run(state, Opened(1), FirstToken(1), Ended(1, "finished"))
    assert commands == []
    state, commands = run(state, Checked(1))
    assert commands == [Finish(Stage.FINISHED, "")]
    assert state.stage is Stage.FINISHED


def test_a_failed_hop_aborts_the_others_and_the_chain_ends_after_them() -> None:
    state, _ = run(new_chain(((), (0,)), "first_token"), Admitted("ping-pong"), Opened(0), FirstToken(0), Opened(1))
    state, commands = run(state, Ended(0, "failed", "the engine died"))
    assert commands == [Abort(1)]
    state, commands = run(state, Ended(1, "aborted"))
    assert commands == [Finish(Stage.FAILED, "the engine died")]
    assert state.phases == (Phase.FAILED, Phase.CANCELLED)


def test_an_upstreams_failure_is_the_cause_even_if_its_readers_is_heard_of_first() -> None:
    state, _ = run(new_chain(((), (0,)), "first_token"), Admitted("ping-pong"), Opened(0), FirstToken(0), Opened(1))
    state, commands = run(state, Ended(1, "failed", "the output ended incomplete"))
    assert commands == [Abort(0)]
    _, commands = run(state, Ended(0, "failed", "the engine died"))
    assert commands == [Finish(Stage.FAILED, "the engine died")]


def test_a_queued_chain_whose_groups_are_gone_fails_with_the_reason() -> None:
    _, commands = run(new_chain(SERIES_OF_THREE, "first_token"), Unplaceable("group b is gone"))
    assert commands == [Finish(Stage.FAILED, "group b is gone")]


def test_a_queued_chain_is_cancelled_at_once() -> None:
    state, commands = run(new_chain(SERIES_OF_THREE, "first_token"), CancelAsked("cancelled"))
    assert commands == [Finish(Stage.CANCELLED, "cancelled")]
    assert set(state.phases) == {Phase.CANCELLED}


def test_an_illegal_event_is_refused_with_the_history() -> None:
    state, _ = run(new_chain(SERIES_OF_THREE, "first_token"), Admitted("serial"), Opened(0))
    with pytest.raises(IllegalTransition, match=r"(?s)reading.*Admitted.*Opened"):
        transition(state, Opened(0))


class AnyChain(RuleBasedStateMachine):
    """Legal events in any order: commands are carried out once, and every chain ends exactly once."""

    @initialize(
        data=st.data(),
        count=st.integers(1, 5),
        start=st.sampled_from(["first_token", "immediate"]),
        placement=st.sampled_from(["serial", "ping-pong"]),
    )
    def begin(self, data: st.DataObject, count: int, start: str, placement: str) -> None:
        reads = tuple(
            tuple(sorted(data.draw(st.sets(st.integers(0, index - 1), max_size=3)))) if index else ()
            for index in range(count)
        )
        self.state = new_chain(reads, start)  # type: ignore[arg-type]
        self.placement = placement
        self.dispatched: list[int] = []
        self.finishes: list[Finish] = []

    def apply(self, event: Event) -> None:
        self.state, commands = transition(self.state, event)
        for command in commands:
            if isinstance(command, Dispatch):
                assert command.agent not in self.dispatched
                assert self.state.stage is Stage.RUNNING
                self.dispatched.append(command.agent)
            elif isinstance(command, Finish):
                self.finishes.append(command)

    def pick(self, data: st.DataObject, *phases: Phase) -> int:
        return data.draw(st.sampled_from([i for i, phase in enumerate(self.state.phases) if phase in phases]))

    @precondition(lambda self: self.state.stage is Stage.QUEUED)
    @rule()
    def admit(self) -> None:
        self.apply(Admitted(self.placement))  # type: ignore[arg-type]

    @precondition(lambda self: Phase.DISPATCHED in self.state.phases)
    @rule(data=st.data())
    def opened(self, data: st.DataObject) -> None:
        self.apply(Opened(self.pick(data, Phase.DISPATCHED)))

    @precondition(lambda self: Phase.READING in self.state.phases)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.apply(FirstToken(self.pick(data, Phase.READING)))

    @precondition(lambda self: {Phase.READING, Phase.WRITING} & set(self.state.phases))
    @rule(data=st.data())
    def finished(self, data: st.DataObject) -> None:
        self.apply(Ended(self.pick(data, Phase.READING, Phase.WRITING), "finished"))

    @precondition(lambda self: LIVE & set(self.state.phases))
    @rule(data=st.data(), end=st.sampled_from(["failed", "aborted"]))
    def broken(self, data: st.DataObject, end: str) -> None:
        self.apply(Ended(self.pick(data, *LIVE), end, "cause"))  # type: ignore[arg-type]

    @precondition(lambda self: Phase.WRITTEN in self.state.phases)
    @rule(data=st.data())
    def checked(self, data: st.DataObject) -> None:
        index = self.pick(data, Phase.WRITTEN)
        ended = self.state.stage in ENDED
        before = self.state.phases
        self.apply(Checked(index))
        if ended:
            assert self.state.phases == before

    @rule()
    def cancel(self) -> None:
        self.apply(CancelAsked("cancelled"))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "state"):
            validate(self.state)
            assert len(self.finishes) == (self.state.stage in ENDED)

    def teardown(self) -> None:
        """Let everything that runs end: then the chain has ended."""
        if not hasattr(self, "state"):
            return
        if self.state.stage is Stage.QUEUED:
            self.apply(CancelAsked("cancelled"))
        while self.state.stage not in ENDED:
            for index, phase in enumerate(self.state.phases):
                if phase is Phase.DISPATCHED:
                    self.apply(Opened(index))
                elif phase in LIVE:
                    self.apply(Ended(index, "finished"))
                elif phase is Phase.WRITTEN:
                    self.apply(Checked(index))
        assert len(self.finishes) == 1


TestAnyChain = AnyChain.TestCase
