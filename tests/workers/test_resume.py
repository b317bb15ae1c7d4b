"""A hop that is interrupted and goes on elsewhere writes what it would have written without that."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from pingpong_bus.chain import Agent, OutputPart, RenderedMessage, TextPart
from pingpong_bus.errors import ChainFailed, EngineLost
from pingpong_bus.messages import (
    EngineLimits,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopSegment,
    HopSpec,
    HopText,
    JoinedPrompt,
    Literals,
    Resume,
    Sampling,
    SessionKind,
    StreamRef,
    StreamSegment,
    WorkerMessage,
)
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import LogView, TokenLogReader, TokenLogWriter
from pingpong_worker.config import SimulatedSettings, WorkerConfig
from pingpong_worker.engine import Engine, OutputTokens
from pingpong_worker.feed import Feed
from pingpong_worker.resuming import Replay, sampling_after
from pingpong_worker.simulated_engine import SimulatedEngine
from pingpong_worker.simulated_prompts import SimulatedPrompts
from pingpong_worker.surroundings import Surroundings

HANG_S = 30
END = 300
"""The rule's own end token."""
_names = itertools.count()


# ---------------------------------------------------------------------------------------------------- an engine by rule


def next_token(ids: Sequence[int]) -> int:
    """A pure function of all ids before it. Few different ones, so that stop strings come up and come near; some are
    halves of a character."""
    value = hashlib.sha256(repr(list(ids)).encode()).digest()
    if value[1] < 4:
        return END
    return [*b"aaab \n", 0xC3, 0xA9, 0xC3, 0x62][value[0] % 10]


class RuleSession:
    kind: SessionKind = "prefix-cache"

    def __init__(self, engine: RuleEngine) -> None:
        self._engine = engine
        self._prompt: list[int] = []

    async def append(self, ids: Sequence[int]) -> None:
        self._prompt += ids

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        whole = [*self._prompt, *ids]
        self._engine.asked.append((list(whole), sampling))
        start = len(whole)
        while True:
            # Several tokens in one output, as where an engine's outputs were merged.
            tokens: list[int] = []
            reason: str | None = None
            stop: int | None = None
            while not tokens or (reason is None and next_token([*whole, 7]) % 2):
                token = self._engine.rule(whole)
                if token == END:
                    reason, stop = "stop", END
                    break
                whole.append(token)
                tokens.append(token)
                if len(whole) - start == sampling.max_tokens:
                    reason = "length"
            if self._engine.outputs_left == 0:
                raise EngineLost("gone.")
            self._engine.outputs_left -= 1
            yield OutputTokens(tokens, reason, stop, cached_tokens=len(ids))
            if reason is not None:
                return

    async def abort(self) -> None: ...


class RuleEngine:
    limits = EngineLimits(
        engine="rule",
        model="",
        max_model_len=4096,
        vocabulary_size=512,
        block_size=1,
        kv_tokens=4096,
        max_num_seqs=8,
    )

    def __init__(self, outputs: int = -1, rule: Callable[[Sequence[int]], int] = next_token) -> None:
        self.outputs_left = outputs
        """Then it is gone; never where negative."""
        self.rule = rule
        self.asked: list[tuple[list[int], Sampling]] = []
        self.opened: list[dict[str, object]] = []

    def open(self, session_id: str, **how: object) -> RuleSession:
        self.opened.append(how)
        return RuleSession(self)

    async def start(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def check(self) -> None: ...

    async def shutdown(self) -> None: ...


# ------------------------------------------------------------------------------------------------------------ the bench


class Bench:
    def __init__(self, slab: Slab, publisher: Publisher, subscriber: Subscriber) -> None:
        self.slab = slab
        self.publisher = publisher
        self.subscriber = subscriber
        self.messages: list[WorkerMessage] = []
        self.rung: list[tuple[int, list[int]]] = []
        """Index and ids of every doorbell with ids."""
        ring = publisher.ring

        def record(stream: StreamRef, first: int, ids: Sequence[int], state: LogState) -> None:
            if ids:
                self.rung.append((first, list(ids)))
            ring(stream, first, ids, state)

        publisher.ring = record  # type: ignore[method-assign]

    def feed(self, engine: Engine, spec: HopSpec) -> Feed:
        report = self.messages.append
        return Feed(spec, Surroundings(engine, SimulatedPrompts(), self.slab, self.subscriber, self.publisher, report))

    async def run(self, engine: Engine, spec: HopSpec) -> HopEnded:
        self.messages.clear()
        async with asyncio.timeout(HANG_S):
            return await self.feed(engine, spec).run()

    def text(self) -> str:
        return "".join(message.text for message in self.messages if isinstance(message, HopText))

    def of(self, kind: type[WorkerMessage]) -> list[WorkerMessage]:
        return [message for message in self.messages if isinstance(message, kind)]

    def log(self, stream: StreamRef) -> LogView:
        return TokenLogReader(self.slab, stream).read()

    def upstream(self, ids: Sequence[int]) -> StreamRef:
        writer = TokenLogWriter(self.slab, self.slab.allocate())
        writer.close("length", ids=ids)
        return writer.stream


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    slab = Slab.create(8, 1024)
    publisher = Publisher(context, f"inproc://resume-{next(_names)}")
    subscriber = Subscriber(context, slab)
    publisher.local = subscriber
    try:
        yield Bench(slab, publisher, subscriber)
    finally:
        await subscriber.close()
        publisher.close()
        slab.close()
        context.term()


def spec_of(output: StreamRef, prompt: Sequence[int], **changes: object) -> HopSpec:
    values = {
        "hop": "c/a/1",
        "output": output,
        "segments": [Literals(ids=list(prompt))],
        "sampling": Sampling(max_tokens=40),
        **changes,
    }
    return HopSpec(**values)  # type: ignore[arg-type]


prompts = st.lists(st.integers(0, 255), min_size=1, max_size=5)
stop_strings = st.lists(
    st.sampled_from(["aab", "aaba", "ab a", "abé", "\n", "é", "aaaa", "b "]), max_size=3, unique=True
)
interruptions = st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1)), min_size=1, max_size=4)
"""After how many outputs, and how much of the text that was sent has reached the supervisor."""


async def interrupted(
    b: Bench, spec: HopSpec, at: Sequence[tuple[int, float]], engine: Engine | None = None
) -> tuple[HopEnded, str, LogView]:
    """Run a hop that loses its engine again and again; how it ended, its text put together, and its log."""
    text = ""
    for outputs, known in at:
        ended = await b.run(RuleEngine(outputs), spec)
        log = b.log(spec.output)
        if ended.state == "finished":
            return ended, text + b.text(), log
        assert (ended.state, ended.code, log.state) == ("lost", "EngineLost", LogState.OPEN)
        assert ended.output_tokens == log.count
        text += b.text()
        assert [message.upto <= log.count for message in b.of(HopText)].count(False) == 0  # type: ignore[attr-defined]
        text = text[: round(known * len(text))]
        if log.count:
            spec = msgspec.structs.replace(spec, resume=Resume(tokens=log.count, text_chars=len(text)))
        else:
            text = ""
    ended = await b.run(engine or RuleEngine(), spec)
    return ended, text + b.text(), b.log(spec.output)


@settings(max_examples=300)
@given(
    prompt=prompts,
    stops=stop_strings,
    at=interruptions,
    max_tokens=st.integers(1, 60),
    grid=st.sampled_from([None, 16]),
)
def test_interrupted_and_resumed_is_as_good_as_uninterrupted(
    prompt: list[int], stops: list[str], at: list[tuple[int, float]], max_tokens: int, grid: int | None
) -> None:
    async def run() -> None:
        async with bench() as b:
            sampling = Sampling(max_tokens=max_tokens, stop=stops)
            whole = spec_of(b.slab.allocate(), prompt, sampling=sampling, grid=grid, replay=grid is not None)
            expected = await b.run(RuleEngine(), whole)
            expected_text, expected_log = b.text(), b.log(whole.output)
            ended, text, log = await interrupted(b, msgspec.structs.replace(whole, output=b.slab.allocate()), at)
            assert (log.ids, log.state, log.finish_reason, log.stop_token) == (
                expected_log.ids,
                LogState.CLOSED,
                expected_log.finish_reason,
                expected_log.stop_token,
            )
            assert text == expected_text
            assert (ended.state, ended.output_tokens) == ("finished", expected.output_tokens)
            assert (ended.finish_reason, ended.stop_token) == (expected.finish_reason, expected.stop_token)
            # Its worker may have died before anyone heard of the end: the next one tells what stands in the log.
            known = len(expected_text) // 2 if log.count else 0
            resume = Resume(tokens=log.count, text_chars=known) if log.count else None
            told = await b.run(RuleEngine(0), msgspec.structs.replace(whole, resume=resume))
            assert b.text() == expected_text[known:]
            assert msgspec.structs.replace(told, at_ns=0) == msgspec.structs.replace(expected, at_ns=0)
            assert [type(message) for message in b.messages if not isinstance(message, HopText)] == [
                HopOpened,
                HopFinalized,
            ]

    asyncio.run(run())


async def test_a_resumed_hop_asks_for_what_is_left_and_tells_of_its_prompt_alone() -> None:
    async with bench() as b:
        upstream = b.upstream([5, 6, 7])
        segments: list[HopSegment] = [Literals(ids=[1, 2]), StreamSegment(stream=upstream), Literals(ids=[3])]
        spec = spec_of(b.slab.allocate(), [], segments=segments)
        await b.run(RuleEngine(4), spec)
        digest = [message.prompt_digest for message in b.messages if isinstance(message, HopFinalized)]
        committed = b.log(spec.output).ids
        assert committed
        engine = RuleEngine()
        await b.run(engine, msgspec.structs.replace(spec, resume=Resume(tokens=len(committed))))
        (asked,) = engine.asked
        assert asked == ([1, 2, 5, 6, 7, 3, *committed], Sampling(max_tokens=40 - len(committed)))
        assert [type(message) for message in b.messages if not isinstance(message, HopText)] == [
            HopOpened,
            HopFinalized,
            HopFirstToken,
        ]
        finalized = next(message for message in b.messages if isinstance(message, HopFinalized))
        assert (finalized.prompt_tokens, [finalized.prompt_digest]) == (6, digest)
        first = next(message for message in b.messages if isinstance(message, HopFirstToken))
        assert first.cached_tokens == 6, "of the prompt, not of the ids behind it"


async def test_a_joined_prompt_is_joined_again_and_checked() -> None:
    messages = [RenderedMessage("user", [TextPart("x"), OutputPart(0)])]
    async with bench() as b:
        joined = JoinedPrompt(
            agent=Agent(name="a", prompt="x"), messages=messages, outputs={0: b.upstream(list(b"upstream"))}
        )
        whole = spec_of(b.slab.allocate(), [1], joined=joined, match=joined)
        await b.run(RuleEngine(), whole)
        expected = b.log(whole.output)
        cut = msgspec.structs.replace(whole, output=b.slab.allocate())
        await b.run(RuleEngine(2), cut)
        resume = Resume(tokens=b.log(cut.output).count)
        feed = b.feed(RuleEngine(), msgspec.structs.replace(cut, resume=resume))
        assert (await feed.run()).state == "finished"
        assert b.log(cut.output) == expected
        assert (await feed.check()).prompt_token_match is True


@pytest.mark.parametrize("stops", [[], ["zz"]], ids=["no stops", "stops"])
async def test_where_only_the_end_is_missing_the_engine_is_not_asked(stops: list[str]) -> None:
    async with bench() as b:
        output = b.slab.allocate()
        TokenLogWriter(b.slab, output).append(list(b"hello"))
        engine = RuleEngine()
        sampling = Sampling(max_tokens=5, stop=stops)
        joined = JoinedPrompt(
            agent=Agent(name="a", raw_prompt="x"), messages=[RenderedMessage("", [TextPart("x")])], outputs={}
        )
        spec = spec_of(output, b"x", sampling=sampling, resume=Resume(tokens=5, text_chars=2), match=joined)
        feed = b.feed(engine, spec)
        ended = await feed.run()
        assert (ended.state, ended.finish_reason, ended.output_tokens) == ("finished", "length", 5)
        assert engine.asked == []
        assert b.text() == "llo"
        assert b.of(HopFirstToken) == []
        assert b.log(output).state is LogState.CLOSED
        assert (await feed.check()).prompt_token_match is True


@pytest.mark.parametrize("resume", [None, Resume(tokens=1), Resume(tokens=3)])
async def test_a_log_that_holds_something_else_is_not_written_to(resume: Resume | None) -> None:
    async with bench() as b:
        output = b.slab.allocate()
        TokenLogWriter(b.slab, output).append([1, 2])
        engine = RuleEngine()
        ended = await b.run(engine, spec_of(output, [1], resume=resume))
        assert (ended.state, ended.code) == ("failed", "BusError")
        assert "holds 2 tokens" in ended.message
        assert (b.log(output).ids, engine.asked) == ([1, 2], [])


@pytest.mark.parametrize(
    ("sampling", "grid", "replay", "replayed"),
    [
        (Sampling(max_tokens=40), 16, True, True),
        (Sampling(max_tokens=40), None, True, True),
        (Sampling(max_tokens=40), None, False, False),
        (Sampling(max_tokens=40, temperature=0.7, seed=3), 16, True, True),
        (Sampling(max_tokens=40, temperature=0.7), 16, True, False),
    ],
)
async def test_where_bits_are_promised_the_prompt_alone_is_answered_anew(
    sampling: Sampling, grid: int | None, replay: bool, replayed: bool
) -> None:
    async with bench() as b:
        spec = spec_of(b.slab.allocate(), [1, 2], sampling=sampling, grid=grid, replay=replay)
        await b.run(RuleEngine(4), spec)
        committed = b.log(spec.output).ids
        assert committed
        rung = len(b.rung)
        engine = RuleEngine()
        ended = await b.run(engine, msgspec.structs.replace(spec, resume=Resume(tokens=len(committed))))
        expected = [1, 2] if replayed else [1, 2, *committed]
        assert engine.asked == [(expected, sampling if replayed else sampling_after(sampling, len(committed)))]
        assert engine.opened[0]["grid"] == grid
        assert ended.state == "finished"
        log = b.log(spec.output).ids
        assert log[: len(committed)] == committed
        assert [index for index, _ in b.rung[rung:]] == sorted({index for index, _ in b.rung[rung:]})
        assert min(index for index, _ in b.rung[rung:]) == len(committed), "what is committed is not published again"
        assert [token for _, ids in b.rung for token in ids] == log


def test_a_replay_lets_through_what_goes_beyond() -> None:
    replay = Replay([5, 6, 7])
    assert replay.take(OutputTokens([5], cached_tokens=3)) is None
    assert replay.take(OutputTokens([])) is None
    assert replay.take(OutputTokens([6, 7, 8, 9])) == OutputTokens([8, 9])
    assert replay.take(OutputTokens([1], "stop", 2)) == OutputTokens([1], "stop", 2)
    assert Replay([5]).take(OutputTokens([5], "stop", 2)) == OutputTokens([], "stop", 2)
    assert Replay([]).take(OutputTokens([5])) == OutputTokens([5])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([OutputTokens([5]), OutputTokens([8, 7])], "at its token 1, where 6 had been written, token 8 came"),
        ([OutputTokens([5, 6, 9, 1])], "at its token 2, where 7 had been written, token 9 came"),
        ([OutputTokens([5, 6], "stop", 2)], "at its token 2, where 7 had been written, it ended"),
        ([OutputTokens([], "length")], "at its token 0, where 5 had been written, it ended"),
    ],
)
def test_a_replay_that_differs_names_the_place_and_both_tokens(given: list[OutputTokens], words: str) -> None:
    replay = Replay([5, 6, 7])
    for tokens in given[:-1]:
        replay.take(tokens)
    with pytest.raises(ChainFailed, match=words):
        replay.take(given[-1])


async def test_a_replay_that_differs_fails_the_hop_and_writes_nothing() -> None:
    async with bench() as b:
        output = b.slab.allocate()
        TokenLogWriter(b.slab, output).append([7, 8, 9])
        engine = RuleEngine(rule=lambda ids: {2: 7, 7: 8}.get(ids[-1], 10))
        ended = await b.run(engine, spec_of(output, [1, 2], replay=True, resume=Resume(tokens=3)))
        assert (ended.state, ended.code, ended.output_tokens) == ("failed", "ChainFailed", 3)
        assert "token 2, where 9 had been written, token 10 came" in ended.message
        log = b.log(output)
        assert (log.ids, log.state) == ([7, 8, 9], LogState.ABORTED)


def test_draws_are_not_repeated() -> None:
    drawn = Sampling(max_tokens=9, temperature=0.7, seed=4)
    assert sampling_after(drawn, 0) == drawn
    seeds = [sampling_after(drawn, tokens).seed for tokens in (1, 2, 3)]
    assert len({4, *seeds}) == 4
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert sampling_after(drawn, 2) == sampling_after(drawn, 2)
    assert sampling_after(Sampling(max_tokens=9, seed=4), 2) == Sampling(max_tokens=7, seed=4)
    assert sampling_after(Sampling(max_tokens=9, temperature=0.7), 2).seed is None


# ------------------------------------------------------------------------------------------------- the simulated engine


def simulated(**timing: float) -> SimulatedEngine:
    return SimulatedEngine(
        WorkerConfig(
            name="g0",
            devices=["cpu:0"],
            engine="simulated",
            simulated=SimulatedSettings(**{"step_ms": 0.0, "row_us": 0.0, **timing}),  # type: ignore[arg-type]
            slab_fd=-1,
            control="",
            bell="",
            supervisor_pid=os.getpid(),
        )
    )


@pytest.fixture(scope="module")
def simulation() -> Iterator[tuple[asyncio.Runner, SimulatedEngine]]:
    with asyncio.Runner() as runner:
        engine = simulated()
        runner.run(engine.start())
        yield runner, engine
        runner.run(engine.shutdown())


@settings(max_examples=40)
@given(
    prompt=prompts,
    stops=st.lists(st.sampled_from(["e", "th", " a", "nt"]), max_size=2, unique=True),
    cut=st.integers(1, 30),
    known=st.floats(0, 1),
    kind=st.sampled_from(["prefix-cache", "streaming-input"]),
)
def test_the_simulated_engine_goes_on_as_if_nothing_had_been(
    simulation: tuple[asyncio.Runner, SimulatedEngine],
    prompt: list[int],
    stops: list[str],
    cut: int,
    known: float,
    kind: SessionKind,
) -> None:
    runner, engine = simulation

    async def run() -> None:
        async with bench() as b:
            sampling = Sampling(max_tokens=40, stop=stops)
            whole = spec_of(b.slab.allocate(), prompt, sampling=sampling, session=kind)
            await b.run(engine, whole)
            expected, expected_text = b.log(whole.output), b.text()
            # As if the hop had been cut off after any of its tokens, and any part of its text had arrived.
            cut_off = spec_of(b.slab.allocate(), prompt, sampling=sampling, session=kind)
            committed = expected.ids[: min(cut, max(0, expected.count - 1))]
            if not committed:
                return
            TokenLogWriter(b.slab, cut_off.output).append(committed)
            chars = round(known * len(bytes(committed)))
            resumed = msgspec.structs.replace(cut_off, resume=Resume(tokens=len(committed), text_chars=chars))
            ended = await b.run(engine, resumed)
            assert (ended.state, ended.session) == ("finished", kind)
            assert b.log(cut_off.output) == expected
            assert b.text() == expected_text[chars:]

    runner.run(run())


async def test_a_killed_engine_loses_the_hop_and_none_of_its_tokens() -> None:
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    first, second = simulated(step_ms=2.0), simulated()
    await first.start()
    await second.start()
    try:
        async with bench() as b:
            whole = spec_of(b.slab.allocate(), b"prompt", sampling=sampling)
            await b.run(second, whole)
            expected, expected_text = b.log(whole.output), b.text()
            b.messages.clear()
            spec = spec_of(b.slab.allocate(), b"prompt", sampling=sampling)
            task = asyncio.create_task(b.feed(first, spec).run())
            async with asyncio.timeout(HANG_S):
                while b.log(spec.output).count < 10:
                    await asyncio.sleep(0.001)
                assert first.pid is not None
                os.kill(first.pid, 9)
                ended = await task
            log, text = b.log(spec.output), b.text()
            assert (ended.state, ended.code, log.state) == ("lost", "EngineLost", LogState.OPEN)
            assert 10 <= ended.output_tokens == log.count < 200
            assert text == bytes(log.ids).decode()
            with pytest.raises(EngineLost):
                await first.check()
            resume = Resume(tokens=log.count, text_chars=len(text))
            assert (await b.run(second, msgspec.structs.replace(spec, resume=resume))).state == "finished"
            assert b.log(spec.output) == expected
            assert text + b.text() == expected_text
    finally:
        await first.shutdown()
        await second.shutdown()
