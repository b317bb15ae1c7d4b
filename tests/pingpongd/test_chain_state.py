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
    FailAsked,
    Finish,
    FirstToken,
    GiveWay,
    Held,
    IllegalTransition,
    Lost,
    Moved,
    Opened,
    Phase,
    Renew,
    Retry,
    RunStep,
    Stage,
    awaited_steps,
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


def test_a_step_runs_when_what_it_reads_is_written_and_its_reader_reads_ahead_of_it() -> None:
    """Agent 0, the step 1 that reads it, the step 2 that reads that, and agent 3 that reads it all through them."""
    chain = new_chain(((), (0,), (1,), (2,)), "first_token", steps=[1, 2])
    state, commands = run(chain, Admitted("ping-pong"), Opened(0))
    assert commands == []
    state, commands = run(state, FirstToken(0))
    assert commands == [Dispatch(3)]
    state, commands = run(state, Opened(3), Ended(0, "finished"))
    assert commands == [RunStep(1)]
    state, commands = run(state, Ended(1, "finished"))
    assert commands == [RunStep(2)]
    state, commands = run(state, Checked(0), Checked(1), Ended(2, "finished"), Checked(2), *written(3)[1:])
    assert commands == [Finish(Stage.FINISHED, "")]


def test_in_series_nothing_runs_beside_a_step() -> None:
    chain = new_chain(((), (0,), (), (1,)), "first_token", steps=[1])
    state, commands = run(chain, Admitted("serial"), *written(0))
    assert state.phases[1] is Phase.STEPPING
    assert commands == []
    _, commands = run(state, Ended(1, "finished"))
    assert commands == [Dispatch(2)]


def test_a_step_that_reads_nobody_runs_at_once() -> None:
    _, commands = run(new_chain(((), (0,)), "first_token", steps=[0]), Admitted("ping-pong"))
    assert commands == [RunStep(0), Dispatch(1)]


def test_a_step_that_fails_ends_its_readers_and_the_chain() -> None:
    chain = new_chain(((), (0,), (1,)), "first_token", steps=[1])
    state, _ = run(chain, Admitted("ping-pong"), *written(0)[:2], Opened(2), *written(0)[2:])
    state, commands = run(state, Ended(1, "failed", "exit code 1"))
    assert commands == [Abort(2)]
    _, commands = run(state, Ended(2, "aborted"))
    assert commands == [Finish(Stage.FAILED, "exit code 1")]


def test_a_cancelled_chain_ends_when_its_step_has_ended() -> None:
    chain = new_chain(((), (0,)), "first_token", steps=[1])
    state, commands = run(chain, Admitted("serial"), *written(0), CancelAsked("cancelled"))
    assert commands == [Abort(1)]
    assert state.stage is Stage.CANCELLING
    _, commands = run(state, Ended(1, "aborted"))
    assert commands == [Finish(Stage.CANCELLED, "cancelled")]


def test_who_reads_a_held_agent_through_a_step_gives_way() -> None:
    chain = new_chain(((), (0,), (1,)), "first_token", steps=[1])
    state, _ = run(chain, Admitted("ping-pong"), Opened(0), FirstToken(0), Opened(2), Lost(0, written=True))
    state, commands = run(state, Held(0))
    assert commands == [Abort(2)]
    state, commands = run(state, Ended(2, "aborted"))
    assert commands == [Renew(2)]
    _, commands = run(state, Retry(0))
    assert commands == [Dispatch(0), Dispatch(2)]


def test_who_waits_for_a_step_gives_way_once_and_runs_again_when_that_has_ended() -> None:
    chain = new_chain(((), (0,), (1,), (2,)), "immediate", steps=[1])
    state, _ = run(chain, Admitted("ping-pong"), *written(0)[:2], Opened(2), Opened(3))
    assert run(state, GiveWay(2))[1] == [], "what it waits for is written by an engine"
    state, _ = run(state, *written(0)[2:])
    assert awaited_steps(state, 2) == [1]
    state, commands = run(state, GiveWay(2))
    assert commands == [Abort(2), Abort(3)], "and who reads from it gives way with it"
    assert run(state, GiveWay(2))[1] == []
    state, commands = run(state, Ended(3, "aborted"), Ended(2, "aborted"))
    assert commands == [Renew(2)]
    state, commands = run(state, Ended(1, "finished"))
    assert commands == [Dispatch(2), Dispatch(3)]
    assert run(state, Opened(2), GiveWay(2))[1] == []


def test_a_step_that_ends_while_its_reader_gives_way_lets_it_run_again() -> None:
    chain = new_chain(((), (0,)), "first_token", steps=[0])
    state, _ = run(chain, Admitted("ping-pong"), Opened(1), GiveWay(1))
    state, commands = run(state, Ended(0, "finished"))
    assert commands == []
    _, commands = run(state, Ended(1, "aborted"))
    assert commands == [Renew(1), Dispatch(1)]


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
    _, commands = run(new_chain(SERIES_OF_THREE, "first_token"), FailAsked("group b is gone"))
    assert commands == [Finish(Stage.FAILED, "group b is gone")]


def test_a_queued_chain_is_cancelled_at_once() -> None:
    state, commands = run(new_chain(SERIES_OF_THREE, "first_token"), CancelAsked("cancelled"))
    assert commands == [Finish(Stage.CANCELLED, "cancelled")]
    assert set(state.phases) == {Phase.CANCELLED}


def test_a_lost_hop_that_has_written_is_resumed_and_its_reader_reads_on() -> None:
    state, _ = run(new_chain(((), (0,)), "first_token"), Admitted("ping-pong"), Opened(0), FirstToken(0), Opened(1))
    state, commands = run(state, Lost(0, written=True))
    assert commands == [Dispatch(0)]
    assert state.phases == (Phase.RESUMING, Phase.READING)
    state, _ = run(state, Opened(0), FirstToken(0), Ended(0, "finished"), Checked(0))
    assert state.phases == (Phase.DONE, Phase.READING)


def test_a_lost_hop_that_has_written_nothing_begins_again() -> None:
    state, commands = run(
        new_chain(((), (0,)), "first_token"), Admitted("ping-pong"), Opened(0), Lost(0, written=False)
    )
    assert commands == [Dispatch(0)]
    assert state.phases == (Phase.DISPATCHED, Phase.WAITING)


def test_tokens_that_nobody_was_told_of_count_as_written() -> None:
    state, _ = run(new_chain(((), (0,)), "first_token"), Admitted("ping-pong"), Opened(0))
    state, commands = run(state, Lost(0, written=True))
    assert commands == [Dispatch(0), Dispatch(1)]  # its first token stands in the log, so its reader may start
    assert state.phases[0] is Phase.RESUMING


def test_who_reads_from_a_held_agent_gives_its_memory_back() -> None:
    chain = new_chain(((), (0,), (1,)), "first_token")
    state, _ = run(chain, Admitted("ping-pong"), Opened(0), FirstToken(0), Opened(1), Lost(0, written=True))
    state, commands = run(state, Held(0))
    assert commands == [Abort(1)]
    assert state.phases == (Phase.INTERRUPTED, Phase.YIELDING, Phase.WAITING)
    state, commands = run(state, Ended(1, "aborted"))
    assert commands == [Renew(1)]  # and it is not dispatched while its upstream is held
    state, commands = run(state, Retry(0))
    assert commands == [Dispatch(0), Dispatch(1)]


def test_who_fails_while_it_yields_waits_all_the_same() -> None:
    """The log of an upstream that yields, too, may be renewed before its reader has heard that it is to end."""
    chain = new_chain(((), (0,), (1,)), "immediate")
    state, _ = run(chain, Admitted("ping-pong"), Opened(0), Opened(1), Opened(2), Lost(0, written=False), Held(0))
    assert state.phases == (Phase.WAITING, Phase.YIELDING, Phase.YIELDING)
    state, commands = run(state, Ended(1, "aborted"))
    assert commands == [Renew(1)]
    state, commands = run(state, Ended(2, "failed", "generation 3 of slot 7 is gone"))
    assert commands == [Renew(2)]
    assert state.phases == (Phase.WAITING, Phase.WAITING, Phase.WAITING)
    _, commands = run(state, Retry(0))
    assert commands == [Dispatch(0), Dispatch(1), Dispatch(2)]


def test_an_upstream_that_can_go_on_wakes_its_reader_only_once_that_has_yielded() -> None:
    state, _ = run(new_chain(((), (0,)), "first_token"), Admitted("ping-pong"), Opened(0), FirstToken(0), Opened(1))
    state, _ = run(state, Lost(0, written=True), Held(0))
    state, commands = run(state, Retry(0))
    assert commands == [Dispatch(0)]
    state, commands = run(state, Ended(1, "aborted"))
    assert commands == [Renew(1), Dispatch(1)]


def test_who_writes_already_does_not_yield() -> None:
    state, _ = run(new_chain(((), ()), "first_token"), Admitted("ping-pong"), Opened(0), FirstToken(0), Opened(1))
    _, commands = run(state, Lost(0, written=True), Held(0))
    assert commands == []


def test_a_chain_that_moves_to_one_group_goes_on_in_series() -> None:
    state, _ = run(new_chain(SERIES_OF_THREE, "first_token"), Admitted("ping-pong"), Opened(0), Lost(0, written=False))
    state, _ = run(state, Moved("serial"), Opened(0))
    state, commands = run(state, FirstToken(0))
    assert commands == []
    _, commands = run(state, Ended(0, "finished"))
    assert commands == [Dispatch(1)]


def test_a_hop_lost_while_its_chain_is_cancelled_has_ended() -> None:
    state, _ = run(new_chain(((),), "first_token"), Admitted("serial"), Opened(0), FirstToken(0), CancelAsked("stop"))
    _, commands = run(state, Lost(0, written=True))
    assert commands == [Finish(Stage.CANCELLED, "stop")]


def test_an_interrupted_agent_does_not_keep_a_chain_from_ending() -> None:
    state, _ = run(new_chain(((),), "first_token"), Admitted("serial"), Opened(0), FirstToken(0))
    state, _ = run(state, Lost(0, written=True), Held(0))
    state, commands = run(state, FailAsked("too late"))
    assert commands == [Finish(Stage.FAILED, "too late")]
    assert state.phases == (Phase.CANCELLED,)


def test_a_restored_chain_goes_on_from_its_last_finished_agent() -> None:
    state, commands = run(new_chain(SERIES_OF_THREE, "first_token", finished=[0]), Admitted("serial"))
    assert commands == [Dispatch(1)]
    assert state.phases == (Phase.DONE, Phase.DISPATCHED, Phase.WAITING)


def test_a_restored_chain_of_which_all_was_finished_ends_at_once() -> None:
    _, commands = run(new_chain(SERIES_OF_THREE, "first_token", finished=[0, 1, 2]), Admitted("serial"))
    assert commands == [Finish(Stage.FINISHED, "")]


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
        placement=st.sampled_from(["serial", "ping-pong", "overlap"]),
    )
    def begin(self, data: st.DataObject, count: int, start: str, placement: str) -> None:
        reads = tuple(
            tuple(sorted(data.draw(st.sets(st.integers(0, index - 1), max_size=3)))) if index else ()
            for index in range(count)
        )
        steps = data.draw(st.sets(st.integers(0, count - 1)))
        self.state = new_chain(reads, start, steps=steps)  # type: ignore[arg-type]
        self.placement = placement
        self.running: set[int] = set()
        """Agents with a hop, as workers see it."""
        self.finishes: list[Finish] = []

    def apply(self, event: Event) -> None:
        if isinstance(event, Ended | Lost | Held):
            self.running.discard(event.agent)
        self.state, commands = transition(self.state, event)
        for command in commands:
            if isinstance(command, Dispatch):
                assert self.state.phases[command.agent] in (Phase.DISPATCHED, Phase.RESUMING)
                assert self.state.stage is Stage.RUNNING
                assert command.agent not in self.running
                self.running.add(command.agent)
            elif isinstance(command, RunStep):
                assert command.agent in self.state.steps
                assert self.state.phases[command.agent] is Phase.STEPPING
                assert command.agent not in self.running
                self.running.add(command.agent)
            elif isinstance(command, Abort):
                assert command.agent in self.running
            elif isinstance(command, Finish):
                self.finishes.append(command)

    def whole(self, *phases: Phase) -> list[int]:
        """Agents in these phases whose prompt is complete: who writes has read all."""
        over = (Phase.WRITTEN, Phase.DONE)
        return [
            index
            for index, phase in enumerate(self.state.phases)
            if phase in phases and all(self.state.phases[at] in over for at in self.state.upstreams[index])
        ]

    def pick(self, data: st.DataObject, *phases: Phase) -> int:
        return data.draw(st.sampled_from([i for i, phase in enumerate(self.state.phases) if phase in phases]))

    @precondition(lambda self: self.state.stage is Stage.QUEUED)
    @rule()
    def admit(self) -> None:
        self.apply(Admitted(self.placement))  # type: ignore[arg-type]

    @precondition(lambda self: {Phase.DISPATCHED, Phase.RESUMING} & set(self.state.phases))
    @rule(data=st.data())
    def opened(self, data: st.DataObject) -> None:
        self.apply(Opened(self.pick(data, Phase.DISPATCHED, Phase.RESUMING)))

    @precondition(lambda self: {Phase.DISPATCHED, Phase.RESUMING, Phase.YIELDING} & set(self.state.phases))
    @rule(data=st.data())
    def held(self, data: st.DataObject) -> None:
        self.apply(Held(self.pick(data, Phase.DISPATCHED, Phase.RESUMING, Phase.YIELDING)))

    @precondition(lambda self: self.state.held)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        self.apply(Retry(data.draw(st.sampled_from(sorted(self.state.held)))))

    @precondition(lambda self: LIVE - {Phase.STEPPING} & set(self.state.phases))
    @rule(data=st.data(), written=st.booleans())
    def lost(self, data: st.DataObject, written: bool) -> None:
        index = self.pick(data, *LIVE - {Phase.STEPPING})
        phase = self.state.phases[index]
        if phase in (Phase.DISPATCHED, Phase.READING):
            written = written and index in self.whole(phase)
        else:
            written = phase is not Phase.YIELDING
        self.apply(Lost(index, written))

    @precondition(lambda self: self.state.stage is not Stage.QUEUED)
    @rule()
    def moved(self) -> None:
        self.apply(Moved("serial"))

    @precondition(lambda self: self.whole(Phase.READING, Phase.RESUMING))
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.apply(FirstToken(data.draw(st.sampled_from(self.whole(Phase.READING, Phase.RESUMING)))))

    @precondition(lambda self: self.whole(Phase.READING, Phase.WRITING, Phase.RESUMING, Phase.STEPPING))
    @rule(data=st.data())
    def finished(self, data: st.DataObject) -> None:
        choices = self.whole(Phase.READING, Phase.WRITING, Phase.RESUMING, Phase.STEPPING)
        self.apply(Ended(data.draw(st.sampled_from(choices)), "finished"))

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
            for held in self.state.held:
                self.apply(Retry(held))
            for index in range(len(self.state.phases)):
                phase = self.state.phases[index]
                if phase is Phase.DISPATCHED:
                    self.apply(Opened(index))
                elif phase is Phase.YIELDING:
                    self.apply(Ended(index, "aborted"))
                elif phase in LIVE:
                    self.apply(Ended(index, "finished"))
                elif phase is Phase.WRITTEN:
                    self.apply(Checked(index))
        assert len(self.finishes) == 1


TestAnyChain = AnyChain.TestCase
