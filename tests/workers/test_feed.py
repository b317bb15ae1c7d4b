"""The feed between a real bus and an engine that answers when the schedule says so."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from pingpong_bus.chain import Agent, OutputPart, RenderedMessage, TextPart
from pingpong_bus.errors import EngineError
from pingpong_bus.messages import (
    ChunkSettings,
    DecodePace,
    DraftCounts,
    EngineLimits,
    HopAppended,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopSegment,
    HopSpec,
    HopText,
    JoinedPrompt,
    Literals,
    Sampling,
    SessionKind,
    StreamRef,
    StreamSegment,
    WorkerMessage,
)
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import TokenLogReader, TokenLogWriter
from pingpong_worker.engine import OutputTokens
from pingpong_worker.feed import Feed
from pingpong_worker.simulated_prompts import SimulatedPrompts
from pingpong_worker.surroundings import Surroundings

HANG_S = 20


class FakeSession:
    """Records what it is given; an append is computed when `acknowledge` is called."""

    kind: SessionKind = "prefix-cache"

    def __init__(self, answer: Sequence[OutputTokens]) -> None:
        self.prompt: list[int] = []
        self.appends: list[int] = []
        self.finals: list[int] = []
        self.aborts = 0
        self.failure: EngineError | None = None
        self._answer = answer
        self._flight: asyncio.Future[None] | None = None

    async def append(self, ids: Sequence[int]) -> None:
        assert self._flight is None, "appends overlap"
        assert not self.finals, "an append after finalize"
        assert ids
        self.prompt.extend(ids)
        self.appends.append(len(ids))
        self._flight = asyncio.get_running_loop().create_future()
        try:
            await self._flight
        finally:
            self._flight = None

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        self.prompt.extend(ids)
        self.finals.append(len(ids))
        for tokens in self._answer:
            await asyncio.sleep(0)
            yield tokens
        await asyncio.Future()

    async def abort(self) -> None:
        self.aborts += 1

    def acknowledge(self) -> None:
        if self._flight is not None and not self._flight.done():
            if self.failure:
                self._flight.set_exception(self.failure)
            else:
                self._flight.set_result(None)


class FakeEngine:
    def __init__(self, answer: Sequence[OutputTokens], block_size: int) -> None:
        self.session = FakeSession(answer)
        self.opened: list[dict[str, object]] = []
        self.limits = EngineLimits(
            engine="fake",
            model="",
            max_model_len=1024,
            vocabulary_size=2**16,
            block_size=block_size,
            kv_tokens=4096,
            max_num_seqs=8,
        )

    def open(self, session_id: str, **how: object) -> FakeSession:
        self.opened.append(how)
        return self.session

    async def start(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def check(self) -> None: ...

    async def shutdown(self) -> None: ...


ANSWER = [OutputTokens([72, 101], cached_tokens=7), OutputTokens([108]), OutputTokens([108, 111], "length")]


@dataclass
class Bench:
    """A slab, a bus, upstream writers and a fake engine."""

    slab: Slab
    publisher: Publisher
    subscriber: Subscriber
    engine: FakeEngine
    output: StreamRef
    upstreams: list[TokenLogWriter]
    messages: list[WorkerMessage] = field(default_factory=list)

    def feed(self, segments: list[HopSegment], **spec: object) -> Feed:
        values = {
            "hop": "c/a/0",
            "output": self.output,
            "segments": segments,
            "sampling": Sampling(max_tokens=5),
            "chunks": ChunkSettings(append_tokens=4),
            **spec,
        }
        surroundings = Surroundings(
            self.engine, SimulatedPrompts(), self.slab, self.subscriber, self.publisher, self.messages.append
        )
        return Feed(HopSpec(**values), surroundings)  # type: ignore[arg-type]

    def stream(self, upstream: int, expected: int = 0) -> StreamSegment:
        return StreamSegment(stream=self.upstreams[upstream].stream, expected=expected)

    def write(self, upstream: int, ids: Sequence[int]) -> None:
        writer = self.upstreams[upstream]
        first = writer.append(ids)
        self.publisher.ring(writer.stream, first, ids, LogState.OPEN)

    def close(self, upstream: int) -> None:
        writer = self.upstreams[upstream]
        writer.close("stop", 2)
        self.publisher.ring(writer.stream, writer.count, [], LogState.CLOSED)

    def of(self, kind: type[WorkerMessage]) -> list[WorkerMessage]:
        return [message for message in self.messages if isinstance(message, kind)]

    def log(self) -> tuple[list[int], LogState]:
        view = TokenLogReader(self.slab, self.output).read()
        return view.ids, view.state


_names = itertools.count()


class bench:
    def __init__(self, answer: Sequence[OutputTokens] = ANSWER, upstreams: int = 2, block_size: int = 1) -> None:
        self._answer = answer
        self._block_size = block_size
        self._upstreams = upstreams

    async def __aenter__(self) -> Bench:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        slab = Slab.create(self._upstreams + 1, 1024)
        publisher = Publisher(self._context, f"inproc://bell-{next(_names)}")
        subscriber = Subscriber(self._context, slab)
        publisher.local = subscriber
        writers = [TokenLogWriter(slab, slab.allocate()) for _ in range(self._upstreams)]
        self._bench = Bench(
            slab, publisher, subscriber, FakeEngine(self._answer, self._block_size), slab.allocate(), writers
        )
        return self._bench

    async def __aexit__(self, *_: object) -> None:
        await self._bench.subscriber.close()
        self._bench.publisher.close()
        self._bench.slab.close()
        self._context.term()


async def settle() -> None:
    """Let every task run until it waits for something outside."""
    for _ in range(12):
        await asyncio.sleep(0)


async def finish(bench: Bench, task: asyncio.Task[HopEnded]) -> HopEnded:
    """Acknowledge appends until the hop is over."""
    async with asyncio.timeout(HANG_S):
        while not task.done():
            bench.engine.session.acknowledge()
            await asyncio.sleep(0)
    return task.result()


def literals(*ids: int) -> Literals:
    return Literals(ids=list(ids))


async def test_closed_upstreams_make_one_request_without_appends() -> None:
    async with bench() as b:
        b.write(0, [11, 12])
        b.close(0)
        b.close(1)
        feed = b.feed([literals(1, 2), b.stream(0), b.stream(1), literals(3)])
        ended = await finish(b, asyncio.create_task(feed.run()))
        assert ended.state == "finished"
        assert b.engine.session.prompt == [1, 2, 11, 12, 3]
        assert (b.engine.session.appends, b.engine.session.finals) == ([], [5])
        assert b.of(HopAppended) == []


async def test_messages_tell_the_hops_story_in_order() -> None:
    async with bench() as b:
        task = asyncio.create_task(b.feed([literals(1, 2, 3), b.stream(0), literals(4)]).run())
        await settle()
        assert b.engine.session.appends == [3]
        b.engine.session.acknowledge()
        await settle()
        b.write(0, [5, 6, 7, 8])
        await settle()
        assert b.engine.session.appends == [3, 4]
        b.engine.session.acknowledge()
        await settle()
        b.close(0)
        ended = await finish(b, task)
        kinds = [kind for kind, _ in itertools.groupby(type(message) for message in b.messages)]
        assert kinds == [HopOpened, HopAppended, HopFinalized, HopFirstToken, HopText]
        appended = [message.append for message in b.messages if isinstance(message, HopAppended)]
        assert [(record.tokens, record.sent) for record in appended] == [(3, 3), (4, 7)]
        assert all(record.done_ns >= record.at_ns > 0 for record in appended)
        finalized = next(message for message in b.messages if isinstance(message, HopFinalized))
        assert (finalized.prompt_tokens, finalized.final_tokens) == (8, 1)
        assert finalized.prompt_digest == hashlib.sha256(struct.pack("<8I", 1, 2, 3, 5, 6, 7, 8, 4)).hexdigest()
        first = next(message for message in b.messages if isinstance(message, HopFirstToken))
        assert first.cached_tokens == 7
        text = "".join(message.text for message in b.messages if isinstance(message, HopText))
        assert text == "Hello"
        assert ended == HopEnded(
            hop="c/a/0", state="finished", at_ns=ended.at_ns, output_tokens=5, finish_reason="length"
        )
        assert b.log() == (list(b"Hello"), LogState.CLOSED)


async def test_finalize_overtakes_an_append_that_is_caught_by_an_early_end() -> None:
    async with bench() as b:
        task = asyncio.create_task(b.feed([literals(1, 2, 3), b.stream(0, 100), literals(4)]).run())
        await settle()
        b.write(0, [5])
        b.close(0)
        async with asyncio.timeout(HANG_S):
            ended = await task  # the append is never acknowledged
        assert ended.state == "finished"
        assert b.engine.session.prompt == [1, 2, 3, 5, 4]
        assert [message.append.done_ns for message in b.messages if isinstance(message, HopAppended)] == [0]


async def test_stop_string_ends_the_answer_before_it() -> None:
    answer = [OutputTokens(list(b"one E")), OutputTokens(list(b"ND two"))]
    async with bench(answer) as b:
        feed = b.feed([literals(1)], sampling=Sampling(max_tokens=50, stop=["END"]))
        ended = await finish(b, asyncio.create_task(feed.run()))
        assert (ended.state, ended.finish_reason, ended.stop_token) == ("finished", "stop", None)
        assert b.log() == (list(b"one "), LogState.CLOSED)
        assert b.engine.session.aborts >= 1
        assert "".join(m.text for m in b.messages if isinstance(m, HopText)) == "one "


async def test_withheld_tail_is_committed_when_the_answer_ends_by_itself() -> None:
    async with bench([OutputTokens(list(b"one E")), OutputTokens([], "stop", 2)]) as b:
        feed = b.feed([literals(1)], sampling=Sampling(max_tokens=50, stop=["END"]))
        ended = await finish(b, asyncio.create_task(feed.run()))
        assert (ended.finish_reason, ended.stop_token) == ("stop", 2)
        assert b.log() == (list(b"one E"), LogState.CLOSED)


async def test_an_aborted_answer_has_text_for_all_its_ids() -> None:
    async with bench([OutputTokens([72, 101]), OutputTokens([108, 0xC3])]) as b:
        task = asyncio.create_task(b.feed([literals(1)]).run())
        await settle()  # the first text is sent at once, the next would be later
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert b.log() == ([72, 101, 108, 0xC3], LogState.ABORTED)
        texts = [message for message in b.messages if isinstance(message, HopText)]
        assert "".join(message.text for message in texts) == "Hel\N{REPLACEMENT CHARACTER}"
        assert texts[-1].upto == 4


async def test_the_engine_is_told_of_pace_grid_and_salt() -> None:
    async with bench() as b:
        pace = DecodePace(itl_ratio=1.1, itl_target_ms=12.5)
        feed = b.feed([literals(1)], pace=pace, grid=16, cache_salt="s", session="prefix-cache")
        await finish(b, asyncio.create_task(feed.run()))
        (how,) = b.engine.opened
        sampling = Sampling(max_tokens=5)
        told = {"pace": pace, "grid": 16, "cache_salt": "s", "kind": "prefix-cache", "sampling": sampling}
        assert how == told | {"drafts": None, "keep": None}


async def test_guesses_are_asked_for_and_counted() -> None:
    counts = DraftCounts(steps=2, drafted=3, accepted=1)
    answer = [OutputTokens([72], drafts=None), OutputTokens([105, 33], "length", drafts=counts)]
    async with bench(answer) as b:
        feed = b.feed([literals(1)], speculate=True, drafts=[[72, 105]])
        ended = await finish(b, asyncio.create_task(feed.run()))
        assert b.engine.opened[0]["drafts"] == [[72, 105]]
        assert ended.drafts == counts
    async with bench(answer) as b:
        ended = await finish(b, asyncio.create_task(b.feed([literals(1)], drafts=[[72, 105]]).run()))
        assert b.engine.opened[0]["drafts"] is None, "nobody has asked for it"


async def test_guesses_are_counted_where_a_stop_string_ends_the_answer() -> None:
    counts = DraftCounts(steps=2, drafted=4, accepted=3)
    async with bench([OutputTokens(list(b"one END two"), drafts=counts)]) as b:
        feed = b.feed([literals(1)], sampling=Sampling(max_tokens=50, stop=["END"]), speculate=True)
        ended = await finish(b, asyncio.create_task(feed.run()))
        assert (ended.finish_reason, ended.drafts) == ("stop", counts)
        assert b.log() == (list(b"one "), LogState.CLOSED)


async def test_a_grid_that_the_engine_cannot_hold_fails_the_hop() -> None:
    class Refusing(FakeEngine):
        def open(self, session_id: str, **how: object) -> FakeSession:
            raise EngineError("the engine cannot be held to a grid of 16 tokens: no.")

    async with bench() as b:
        b.engine = Refusing(ANSWER, 1)
        ended = await b.feed([literals(1)], grid=16).run()
        assert (ended.state, ended.code) == ("failed", "EngineError")
        assert "grid of 16 tokens" in ended.message
        assert b.log() == ([], LogState.ABORTED)


async def test_aborted_upstream_fails_the_hop_and_its_log() -> None:
    async with bench() as b:
        task = asyncio.create_task(b.feed([literals(1, 2, 3), b.stream(0), literals(4)]).run())
        await settle()
        writer = b.upstreams[0]
        writer.abort()
        b.publisher.ring(writer.stream, 0, [], LogState.ABORTED)
        ended = await finish(b, task)
        assert (ended.state, ended.code) == ("failed", "ChainFailed")
        assert "incomplete" in ended.message
        assert b.log() == ([], LogState.ABORTED)
        assert b.engine.session.finals == []


async def test_freed_upstream_fails_the_hop() -> None:
    async with bench() as b:
        task = asyncio.create_task(b.feed([literals(1, 2, 3), b.stream(0), literals(4)]).run())
        await settle()
        b.slab.free(b.upstreams[0].stream)
        ended = await finish(b, task)
        assert (ended.state, ended.code) == ("failed", "StreamGone")


async def test_engine_failure_during_an_append_fails_the_hop() -> None:
    async with bench() as b:
        b.engine.session.failure = EngineError("it burns.")
        task = asyncio.create_task(b.feed([literals(1, 2, 3), b.stream(0), literals(4)]).run())
        await settle()
        ended = await finish(b, task)
        assert (ended.state, ended.code, ended.message) == ("failed", "EngineError", "it burns.")
        assert b.log() == ([], LogState.ABORTED)


async def test_empty_prompt_is_a_failure() -> None:
    async with bench() as b:
        b.close(0)
        ended = await finish(b, asyncio.create_task(b.feed([b.stream(0)]).run()))
        assert (ended.state, ended.code) == ("failed", "ChainFailed")
        assert "empty" in ended.message


async def test_joined_prompt_waits_for_all_upstreams() -> None:
    messages = [RenderedMessage("user", [TextPart("x"), OutputPart(0), OutputPart(1)])]
    async with bench() as b:
        outputs = {0: b.upstreams[0].stream, 1: b.upstreams[1].stream}
        joined = JoinedPrompt(agent=Agent(name="a", prompt="x"), messages=messages, outputs=outputs)
        segments: list[HopSegment] = [literals(1), b.stream(0), b.stream(1)]
        task = asyncio.create_task(b.feed(segments, joined=joined, match=joined).run())
        await settle()
        b.write(1, list(b"B"))
        b.close(1)
        await settle()
        b.write(0, list(b"A"))
        assert b.engine.session.prompt == []
        b.close(0)
        ended = await finish(b, task)
        assert ended.state == "finished"
        assert b.engine.session.prompt == SimulatedPrompts().join(joined, {0: list(b"A"), 1: list(b"B")})


@pytest.mark.parametrize(("ids", "match"), [(b"plain", True), (b"caf\xc3", False)])
async def test_check_tells_whether_the_whole_text_gives_the_same_ids(ids: bytes, match: bool) -> None:
    prompts = SimulatedPrompts()
    messages = [RenderedMessage("user", [TextPart("read: "), OutputPart(0)])]
    async with bench() as b:
        joined = JoinedPrompt(agent=Agent(name="a", prompt="x"), messages=messages, outputs={0: b.upstreams[0].stream})
        whole = prompts.join(joined, {0: []})
        tail = len(prompts.encode_text("\nassistant\n")) + 2
        b.write(0, list(ids))
        b.close(0)
        segments: list[HopSegment] = [literals(*whole[:-tail]), b.stream(0), literals(*whole[-tail:])]
        feed = b.feed(segments, match=joined)
        await finish(b, asyncio.create_task(feed.run()))
        assert (await feed.check()).prompt_token_match is match


async def test_check_of_a_prompt_that_reads_an_output_twice() -> None:
    prompts = SimulatedPrompts()
    parts: list[TextPart | OutputPart] = [OutputPart(0), OutputPart(0)]
    async with bench() as b:
        stream = b.upstreams[0].stream
        joined = JoinedPrompt(
            agent=Agent(name="a", prompt="x"), messages=[RenderedMessage("user", parts)], outputs={0: stream}
        )
        whole = prompts.join(joined, {0: []})
        head = len(prompts.encode_text("user\n")) + 1
        segments: list[HopSegment] = [literals(*whole[:head]), b.stream(0), b.stream(0), literals(*whole[head:])]
        feed = b.feed(segments, match=joined)
        task = asyncio.create_task(feed.run())
        for ids in (b"once", b"more"):
            await settle()
            b.write(0, list(ids))
        b.close(0)
        await finish(b, task)
        assert b.engine.session.prompt == prompts.join(joined, {0: list(b"oncemore")})
        assert (await feed.check()).prompt_token_match is True


# ------------------------------------------------------------------------------------------------- any schedule at all

Step = tuple[str, int, int]
"""What happens next: ("write", upstream, tokens), ("close", upstream, 0), ("ack", 0, 0) or ("run", 0, turns)."""

steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 12)),
        st.tuples(st.just("close"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("ack"), st.just(0), st.just(0)),
        st.tuples(st.just("run"), st.just(0), st.integers(1, 12)),
    ),
    max_size=40,
)
layouts = st.lists(st.sampled_from(["none", "short", "long", "up0", "up1"]), min_size=1, max_size=6)


class Schedule:
    """Plays steps against a bench, and knows what the prompt must be in the end."""

    def __init__(self, b: Bench, layout: list[str], expected: int) -> None:
        self._bench = b
        self._outputs: list[list[int]] = [[], []]
        self._closed = [False, False]
        self._layout = layout
        sizes = {"none": 0, "short": 2, "long": 9}
        self.segments: list[HopSegment] = []
        self._literal: dict[int, list[int]] = {}
        for at, kind in enumerate(layout):
            if kind in sizes:
                self._literal[at] = [1000 * (at + 1) + index for index in range(sizes[kind])]
                self.segments.append(literals(*self._literal[at]))
            else:
                self.segments.append(b.stream(int(kind[-1]), expected))

    async def play(self, step: Step) -> None:
        kind, upstream, count = step
        if kind == "write" and not self._closed[upstream]:
            start = len(self._outputs[upstream])
            ids = [100 * (upstream + 1) + start + index for index in range(count)]
            self._outputs[upstream] += ids
            self._bench.write(upstream, ids)
        elif kind == "close" and not self._closed[upstream]:
            self._closed[upstream] = True
            self._bench.close(upstream)
        elif kind == "ack":
            self._bench.engine.session.acknowledge()
        elif kind == "run":
            for _ in range(count):
                await asyncio.sleep(0)

    async def close_all(self) -> None:
        for upstream in range(2):
            await self.play(("close", upstream, 0))

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = []
        for at, kind in enumerate(self._layout):
            ids += self._outputs[int(kind[-1])] if kind.startswith("up") else self._literal[at]
        return ids


@settings(deadline=None, max_examples=150)
@given(
    layout=layouts,
    before=steps,
    during=steps,
    expected=st.sampled_from([0, 5, 40, 400]),
    block_size=st.sampled_from([1, 4, 16]),
    cells=st.sampled_from([None, 1, 2]),
)
def test_any_schedule_gives_the_engine_exactly_the_prompt(
    layout: list[str], before: list[Step], during: list[Step], expected: int, block_size: int, cells: int | None
) -> None:
    async def run() -> None:
        async with bench(block_size=block_size) as b:
            grid = cells and cells * block_size
            schedule = Schedule(b, layout, expected)
            for step in before:
                await schedule.play(step)
            task = asyncio.create_task(b.feed(schedule.segments, grid=grid).run())
            for step in during:
                await schedule.play(step)
            await schedule.close_all()
            ended = await finish(b, task)
            session = b.engine.session
            if not schedule.prompt:
                assert ended.state == "failed"
                return
            assert ended.state == "finished"
            assert session.prompt == schedule.prompt
            assert len(session.finals) == 1
            assert session.finals[0] >= 1
            assert expected or all(tokens >= 4 for tokens in session.appends[1:])
            assert all(sent % (grid or block_size) == 0 for sent in itertools.accumulate(session.appends))
            assert b.log() == (list(b"Hello"), LogState.CLOSED)
            records = [message.append for message in b.messages if isinstance(message, HopAppended)]
            assert [record.tokens for record in records] == session.appends

    asyncio.run(run())


@settings(deadline=None, max_examples=150)
@given(layout=layouts, during=steps)
def test_a_cancelled_hop_leaves_an_ended_log_and_no_session(layout: list[str], during: list[Step]) -> None:
    async def run() -> None:
        async with bench() as b:
            schedule = Schedule(b, layout, 40)
            task = asyncio.create_task(b.feed(schedule.segments).run())
            for step in during:
                await schedule.play(step)
            asyncio.get_running_loop().call_soon(task.cancel)  # after its first step, as `Hops` does it
            async with asyncio.timeout(HANG_S):
                await asyncio.wait({task})
            session = b.engine.session
            await schedule.close_all()
            assert session.prompt == schedule.prompt[: len(session.prompt)]
            ids, state = b.log()
            if task.cancelled():
                assert ids == list(b"Hello")[: len(ids)]
                assert state is LogState.ABORTED
            else:
                assert state.over
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
