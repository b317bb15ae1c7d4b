"""Hops end each for itself, whatever becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

import pytest
import zmq

from pingpong_bus.chain import Agent
from pingpong_bus.errors import EngineError, EngineLost
from pingpong_bus.messages import (
    EngineLimits,
    HopChecked,
    HopEnded,
    HopSpec,
    JoinedPrompt,
    Literals,
    Sampling,
    SessionKind,
    StreamRef,
    WorkerMessage,
)
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_worker.engine import OutputTokens
from pingpong_worker.hops import Hops
from pingpong_worker.prompt import PromptCodec
from pingpong_worker.simulated_prompts import SimulatedPrompts
from pingpong_worker.surroundings import Surroundings

HANG_S = 20


class StubSession:
    kind: SessionKind = "prefix-cache"

    def __init__(self, outcome: str) -> None:
        self._outcome = outcome

    async def append(self, ids: Sequence[int]) -> None: ...

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        yield OutputTokens([1])
        if self._outcome.startswith("hang"):
            try:
                await asyncio.Future()
            finally:
                if "swallow" in self._outcome:
                    await asyncio.Future()
        if self._outcome == "fail":
            raise EngineError("it burns.")
        if self._outcome == "lose":
            raise EngineLost("gone.")
        if self._outcome == "bug":
            raise ZeroDivisionError("oops")
        yield OutputTokens([2], "length")

    async def abort(self) -> None:
        if "stuck" in self._outcome:
            await asyncio.Future()


class StubEngine:
    """Sessions whose id says what becomes of them."""

    limits = EngineLimits(
        engine="stub", model="", max_model_len=64, vocabulary_size=64, block_size=1, kv_tokens=64, max_num_seqs=1
    )

    def open(self, session_id: str, **_: object) -> StubSession:
        return StubSession(session_id)

    async def start(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def check(self) -> None: ...

    async def shutdown(self) -> None: ...


class BrokenPrompts(SimulatedPrompts):
    def tokenize_whole(self, joined: JoinedPrompt, outputs: Mapping[int, Sequence[int]]) -> list[int]:
        raise ZeroDivisionError("oops")


class Stage:
    def __init__(
        self, slab: Slab, publisher: Publisher, subscriber: Subscriber, prompts: PromptCodec | None = None
    ) -> None:
        self.slab = slab
        self.messages: list[WorkerMessage] = []
        self.engine_errors = 0
        around = Surroundings(StubEngine(), prompts, slab, subscriber, publisher, self.messages.append)
        self.hops = Hops(around, self._count)

    def start(self, outcome: str, *, stop: Sequence[str] = (), match: JoinedPrompt | None = None) -> StreamRef:
        output = self.slab.allocate()
        sampling = Sampling(max_tokens=5, stop=list(stop))
        spec = HopSpec(hop=outcome, output=output, segments=[Literals(ids=[1])], sampling=sampling, match=match)
        self.hops.start(spec)
        return output

    async def ended(self, hop: str) -> HopEnded:
        async with asyncio.timeout(HANG_S):
            while True:
                for message in self.messages:
                    if isinstance(message, HopEnded) and message.hop == hop:
                        return message
                await asyncio.sleep(0)

    def state(self, output: StreamRef) -> LogState:
        return self.slab.require(output)[0]

    def _count(self) -> None:
        self.engine_errors += 1


@pytest.fixture
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    slab = Slab.create(8, 64)
    publisher = Publisher(context, "inproc://bell-hops")
    subscriber = Subscriber(context, slab)
    stage = Stage(slab, publisher, subscriber, getattr(request, "param", None))
    yield stage
    await stage.hops.close()
    await subscriber.close()
    publisher.close()
    slab.close()
    context.term()


async def test_a_failing_hop_leaves_its_neighbours_alone(stage: Stage) -> None:
    outputs = {outcome: stage.start(outcome) for outcome in ("fail", "finish", "hang")}
    assert (await stage.ended("fail")).code == "EngineError"
    assert (await stage.ended("finish")).state == "finished"
    assert stage.hops.load() == (1, 4)
    assert stage.state(outputs["fail"]) is LogState.ABORTED
    assert stage.state(outputs["finish"]) is LogState.CLOSED
    assert stage.state(outputs["hang"]) is LogState.OPEN
    assert stage.engine_errors == 1


async def test_a_fault_of_the_program_costs_its_hop_only(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    output = stage.start("bug")
    ended = await stage.ended("bug")
    assert (ended.state, ended.code) == ("failed", "PingpongError")
    assert "ZeroDivisionError" in ended.message
    assert "ZeroDivisionError" in caplog.text
    assert stage.state(output) is LogState.ABORTED


async def test_abort_in_the_moment_of_the_start(stage: Stage) -> None:
    output = stage.start("hang")
    stage.hops.abort("hang")
    assert (await stage.ended("hang")).state == "aborted"
    assert stage.state(output) is LogState.ABORTED


async def test_a_lost_engine_leaves_the_log_open(stage: Stage) -> None:
    output = stage.start("lose")
    ended = await stage.ended("lose")
    assert (ended.state, ended.code, ended.message, ended.output_tokens) == ("lost", "EngineLost", "gone.", 1)
    assert stage.state(output) is LogState.OPEN
    assert stage.engine_errors == 1


@pytest.mark.parametrize("hop", ["hang, stuck", "hang, swallow"])
@pytest.mark.parametrize("how", ["aborted", "lost", "released"])
async def test_an_engine_that_does_not_let_go_holds_up_no_report(
    stage: Stage, hop: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    output = stage.start(hop)
    async with asyncio.timeout(HANG_S):
        while stage.hops.load() != (1, 1):
            await asyncio.sleep(0)
        match how:
            case "aborted":
                stage.hops.abort(hop)
            case "released":
                stage.hops.release(hop)
            case _:
                await stage.hops.close()
        ended = await stage.ended(hop)
    assert (ended.state, ended.output_tokens) == (how, 1)
    assert stage.state(output) is (LogState.ABORTED if how == "aborted" else LogState.OPEN)
    assert stage.hops.load() == (0, 1)
    assert "let go" in caplog.text
    stage.slab.free(output)  # nobody touches it any more
    await stage.hops.close()
    assert [message for message in stage.messages if isinstance(message, HopEnded)] == [ended]


async def test_an_answer_is_reported_even_if_its_session_does_not_end(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    output = stage.start("finish, stuck")
    assert (await stage.ended("finish, stuck")).state == "finished"
    assert stage.state(output) is LogState.CLOSED
    assert "let go" in caplog.text


async def test_a_released_hop_leaves_its_log_to_others(stage: Stage) -> None:
    output = stage.start("hang")
    async with asyncio.timeout(HANG_S):
        while stage.hops.load() != (1, 1):
            await asyncio.sleep(0)
    stage.hops.release("hang")
    ended = await stage.ended("hang")
    assert (ended.state, ended.output_tokens, ended.code) == ("released", 1, "")
    assert stage.state(output) is LogState.OPEN
    assert stage.hops.load() == (0, 1)
    assert stage.engine_errors == 0


async def test_release_in_the_moment_of_the_start(stage: Stage) -> None:
    output = stage.start("hang")
    stage.hops.release("hang")
    assert (await stage.ended("hang")).state == "released"
    assert stage.state(output) is LogState.OPEN


async def test_release_of_an_unknown_hop_is_answered(stage: Stage) -> None:
    stage.hops.release("never")
    assert (await stage.ended("never")).state == "aborted"


async def test_a_hop_that_is_released_too_late_has_finished(stage: Stage) -> None:
    output = stage.start("finish, stuck")
    async with asyncio.timeout(HANG_S):
        while stage.state(output) is not LogState.CLOSED:
            await asyncio.sleep(0)
    stage.hops.release("finish, stuck")
    ended = await stage.ended("finish, stuck")
    assert (ended.state, ended.finish_reason, ended.output_tokens) == ("finished", "length", 2)


@pytest.mark.parametrize("hop", ["hang", "hang, stuck", "hang, swallow"])
async def test_a_hop_that_is_aborted_while_it_is_released_is_aborted(stage: Stage, hop: str) -> None:
    output = stage.start(hop)
    async with asyncio.timeout(HANG_S):
        while stage.hops.load() != (1, 1):
            await asyncio.sleep(0)
    stage.hops.release(hop)
    stage.hops.abort(hop)
    assert (await stage.ended(hop)).state == "aborted"
    assert stage.state(output) is LogState.ABORTED


async def test_abort_of_an_unknown_hop_is_answered(stage: Stage) -> None:
    stage.hops.abort("never")
    assert (await stage.ended("never")).state == "aborted"


async def test_close_reports_all_as_lost_and_leaves_their_logs_open(stage: Stage) -> None:
    output = stage.start("hang")
    await asyncio.sleep(0)
    await stage.hops.close()
    ended = await stage.ended("hang")
    assert (ended.state, ended.code, ended.message) == ("lost", "EngineLost", "the worker was stopped.")
    assert stage.state(output) is LogState.OPEN
    assert stage.hops.load() == (0, 0) or stage.hops.load() == (0, 1)


async def test_close_with_a_reason_names_it(stage: Stage) -> None:
    outputs = {outcome: stage.start(outcome) for outcome in ("hang", "hang, asked")}
    await asyncio.sleep(0)
    stage.hops.abort("hang, asked")
    await stage.hops.close(EngineLost("the engine has died."))
    ended = await stage.ended("hang")
    assert (ended.state, ended.code, ended.message) == ("lost", "EngineLost", "the engine has died.")
    assert stage.state(outputs["hang"]) is LogState.OPEN
    assert (await stage.ended("hang, asked")).state == "aborted", "that was asked for"
    assert stage.state(outputs["hang, asked"]) is LogState.ABORTED


@pytest.mark.parametrize("stage", [BrokenPrompts()], indirect=True, ids=["broken"])
async def test_a_check_that_breaks_is_answered(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.start("finish", match=JoinedPrompt(agent=Agent(name="a", prompt="x"), messages=[], outputs={}))
    async with asyncio.timeout(HANG_S):
        while not any(isinstance(message, HopChecked) for message in stage.messages):
            await asyncio.sleep(0.001)
    assert stage.messages[-1] == HopChecked(hop="finish", prompt_token_match=None)
    assert "ZeroDivisionError" in caplog.text


async def test_stop_strings_without_a_tokenizer_are_refused(stage: Stage) -> None:
    output = stage.start("finish", stop=["END"])
    ended = await stage.ended("finish")
    assert (ended.state, ended.code) == ("failed", "ConfigError")
    assert stage.state(output) is LogState.ABORTED


async def test_an_output_log_that_is_gone_fails_the_hop(stage: Stage) -> None:
    output = stage.slab.allocate()
    stage.slab.free(output)
    spec = HopSpec(hop="finish", output=output, segments=[Literals(ids=[1])], sampling=Sampling(max_tokens=5))
    stage.hops.start(spec)
    assert (await stage.ended("finish")).code == "StreamGone"
