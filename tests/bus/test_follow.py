"""follow() against a transport that drops, doubles, delays and reorders: every token once, in order, whatever rings."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from pingpong_bus import subscriber as subscriber_module
from pingpong_bus.codec import MAX_BELL_BYTES, bell_topic, encode_bell
from pingpong_bus.errors import BusError, StreamGone
from pingpong_bus.messages import PROTOCOL_VERSION, BusState, StreamRef, TokenChunk
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import LogView, TokenLogWriter

HANG_SECONDS = 30
numbers = itertools.count()


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(slots=4, capacity=1000) as made:
        yield made


@asynccontextmanager
async def listening(context: zmq.Context[Any], slab: Slab) -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(context, slab)
    try:
        yield subscriber
    finally:
        await subscriber.close()


@pytest.fixture
async def subscriber(context: zmq.Context[Any], slab: Slab) -> AsyncIterator[Subscriber]:
    async with listening(context, slab) as made:
        yield made


@pytest.fixture
def transport(context: zmq.Context[Any]) -> Iterator[Faulty]:
    with closing(Faulty(context)) as made:
        yield made


class Faulty:
    """A transport under the test's control: frames are kept, and go out when and as often as the test says.

    It is an XPUB, which reports each subscription, so that a frame is never sent before somebody hears.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.endpoint = f"inproc://faulty-{next(numbers)}"
        self.frames: list[bytes] = []
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)

    def keep(self, stream: StreamRef, first: int, ids: list[int], state: LogState) -> None:
        self.frames.append(
            encode_bell(TokenChunk(PROTOCOL_VERSION, stream.slot, stream.generation, first, ids, int(state)))
        )

    def deliver(self, frame: bytes) -> None:
        self._socket.send(frame)

    async def subscribed(self) -> bytes:
        return await heard(self._socket)

    def close(self) -> None:
        self._socket.close()


async def heard(socket: zmq.Socket[bytes]) -> bytes:
    """The next frame of a plain socket."""
    await until(lambda: bool(socket.poll(0)))
    return socket.recv()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def gather(subscriber: Subscriber, stream: StreamRef, start: int = 0) -> tuple[list[int], LogView]:
    """All tokens of a log, and its last view; views must join without gap or overlap."""
    seen: list[int] = []
    last = None
    async with asyncio.timeout(HANG_SECONDS), aclosing(subscriber.follow(stream, start)) as views:
        async for view in views:
            assert view.first_index == start + len(seen)
            assert view.ids or view.state.over
            seen += view.ids
            last = view
    assert last is not None
    return seen, last


actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 3)),
        st.tuples(st.just("deliver"), st.integers(0, 30)),
        st.tuples(st.just("garbage"), st.binary(max_size=12)),
        st.tuples(st.just("loop"), st.integers(1, 3)),
        st.tuples(st.just("follow"), st.integers(0, 4)),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(actions=actions, closed=st.booleans(), late=st.integers(0, 4))
def test_every_token_once_and_in_order_whatever_the_transport_does(
    context: zmq.Context[Any], actions: list[tuple[str, Any]], closed: bool, late: int
) -> None:
    async def play() -> None:
        stream = slab.allocate()
        writer = TokenLogWriter(slab, stream)
        written: list[int] = []
        followers: list[tuple[int, asyncio.Task[tuple[list[int], LogView]]]] = []
        async with listening(context, slab) as subscriber:
            subscriber.connect(transport.endpoint)

            async def follow(start: int) -> None:
                followers.append((start, asyncio.create_task(gather(subscriber, stream, start))))
                if len(followers) == 1:
                    await transport.subscribed()

            for what, value in actions:
                if what == "append":
                    ids = [len(written) + offset for offset in range(value)]
                    transport.keep(stream, writer.append(ids), ids, LogState.OPEN)
                    written += ids
                elif what == "deliver" and transport.frames:
                    transport.deliver(transport.frames[value % len(transport.frames)])
                elif what == "garbage":
                    transport.deliver(bell_topic(stream.slot, stream.generation) + value)
                elif what == "loop":
                    for _ in range(value):
                        await asyncio.sleep(0)
                elif what == "follow":
                    await follow(value)
            if closed:
                writer.close("stop", 7)
            else:
                writer.abort()
            await follow(late)
            for start, task in followers:
                seen, last = await task
                assert seen == written[start:]
                assert last.state is (LogState.CLOSED if closed else LogState.ABORTED)
                assert last.stop_token == (7 if closed else None)

    with Slab.create(slots=1, capacity=200) as slab, closing(Faulty(context)) as transport:
        asyncio.run(play())


async def test_without_any_doorbell_the_sweep_finds_every_token(slab: Slab, subscriber: Subscriber) -> None:
    streams = [slab.allocate() for _ in range(4)]
    tasks = [asyncio.create_task(gather(subscriber, stream)) for stream in streams]
    writers = [TokenLogWriter(slab, stream) for stream in streams]
    for token in range(50):
        for writer in writers:
            writer.append([token])
        await asyncio.sleep(0)
    for writer in writers:
        writer.close("length")
    for task in tasks:
        seen, last = await task
        assert seen == list(range(50))
        assert last.finish_reason == "length"


async def test_doorbells_are_counted_and_so_is_how_late_they_ring(
    transport: Faulty, slab: Slab, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "SWEEP_SECONDS", 3600)
    subscriber.connect(transport.endpoint)
    stream = slab.allocate()
    writer = TokenLogWriter(slab, stream)
    task = asyncio.create_task(gather(subscriber, stream))
    await transport.subscribed()
    assert subscriber.state() == BusState()
    now = time.monotonic_ns()
    for index, at_ns in enumerate((now - 5_000_000, now + 3600 * 10**9, 0)):
        writer.append([index])
        transport.deliver(
            encode_bell(TokenChunk(PROTOCOL_VERSION, stream.slot, stream.generation, index, [index], 1, at_ns))
        )
        await until(lambda count=index + 1: subscriber.state().chunks == count)  # type: ignore[misc]
    writer.close("length")
    subscriber.ring(stream.slot, stream.generation)
    await task
    state = subscriber.state()
    assert (state.chunks, state.repairs) == (3, 0), "what a log of this very process rings is none of the bus's"
    assert 5 <= state.lag_ms < HANG_SECONDS * 1e3, "a clock that is ahead, and a frame without a time, add nothing"


async def test_what_is_found_without_its_doorbell_is_a_repair_unless_that_was_on_its_way(
    transport: Faulty, slab: Slab, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "SWEEP_SECONDS", 3600)
    subscriber.connect(transport.endpoint)
    stream = slab.allocate()
    writer = TokenLogWriter(slab, stream)
    task = asyncio.create_task(gather(subscriber, stream))
    await transport.subscribed()
    transport.keep(stream, writer.append([0]), [0], LogState.OPEN)
    subscriber._sweep()
    transport.deliver(transport.frames[0])
    await until(lambda: subscriber.state().chunks == 1)
    subscriber._sweep()
    assert subscriber.state().repairs == 0, "it was slower than the look, by less than a sweep"
    await asyncio.sleep(0)
    writer.append([1])
    subscriber._sweep()
    await asyncio.sleep(0)
    assert subscriber.state().repairs == 0, "its doorbell may still ring"
    subscriber._sweep()
    assert subscriber.state().repairs == 1
    writer.close("length")
    subscriber._sweep()
    await task
    subscriber._sweep()
    assert subscriber.state() == BusState(chunks=1, repairs=2)


async def test_a_doorbell_alone_is_enough(
    transport: Faulty, slab: Slab, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "SWEEP_SECONDS", 3600)
    subscriber.connect(transport.endpoint)
    stream = slab.allocate()
    writer = TokenLogWriter(slab, stream)
    async with asyncio.timeout(HANG_SECONDS), aclosing(subscriber.follow(stream)) as views:
        for token in range(100):
            step = asyncio.ensure_future(anext(views))
            await asyncio.sleep(0)  # the follower sleeps now
            if token == 0:
                assert await transport.subscribed() == b"\x01" + bell_topic(stream.slot, stream.generation)
            writer.append([token])
            transport.keep(stream, token, [token], LogState.OPEN)
            transport.deliver(transport.frames[-1])
            assert (await step).ids == [token]
    assert await transport.subscribed() == b"\x00" + bell_topic(stream.slot, stream.generation)


async def test_a_storm_of_doorbells_loses_none(
    transport: Faulty, slab: Slab, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More frames than one callback takes: the rest must be taken although the descriptor reports no new edge."""
    monkeypatch.setattr(subscriber_module, "SWEEP_SECONDS", 3600)
    subscriber.connect(transport.endpoint)
    stream = slab.allocate()
    writer = TokenLogWriter(slab, stream)
    step = asyncio.create_task(gather(subscriber, stream))
    await asyncio.sleep(0)
    await transport.subscribed()
    stale = bell_topic(stream.slot, stream.generation) + b"stale"
    for _ in range(3 * subscriber_module._DRAIN_FRAMES - 100):
        transport.deliver(stale)
    writer.append([1])
    writer.close("stop")
    transport.keep(stream, 0, [1], LogState.CLOSED)
    transport.deliver(transport.frames[-1])
    seen, _ = await step
    assert seen == [1]


async def test_garbage_is_counted_and_harms_nobody(transport: Faulty, slab: Slab, subscriber: Subscriber) -> None:
    subscriber.connect(transport.endpoint)
    stream = slab.allocate()
    task = asyncio.create_task(gather(subscriber, stream))
    await asyncio.sleep(0)
    await transport.subscribed()
    topic = bell_topic(stream.slot, stream.generation)
    other = encode_bell(TokenChunk(PROTOCOL_VERSION, 1, 1, 0, [1], 1))[8:]
    newer = encode_bell(TokenChunk(PROTOCOL_VERSION + 1, stream.slot, stream.generation, 0, [1], 1))
    for frame in (topic, topic + b"\xff", topic + other, newer, topic + b"\x00" * (MAX_BELL_BYTES - 8)):
        transport.deliver(frame)
    await until(lambda: subscriber.garbage_frames == 5)
    assert not task.done()
    TokenLogWriter(slab, stream).close("stop")
    assert (await task)[0] == []


# ------------------------------------------------------------------------------------------------------------ reuse


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_slot_reused_under_a_sleeping_follower_is_gone(context: zmq.Context[Any], reuse: bool) -> None:
    with Slab.create(slots=1, capacity=10) as slab:
        stream = slab.allocate()
        TokenLogWriter(slab, stream).append([1, 2])
        async with (
            asyncio.timeout(HANG_SECONDS),
            listening(context, slab) as subscriber,
            aclosing(subscriber.follow(stream)) as views,
        ):
            assert (await anext(views)).ids == [1, 2]
            step = asyncio.ensure_future(anext(views))
            await asyncio.sleep(0)
            slab.free(stream)
            if reuse:
                # As long as the old one, and of the same state: only the generation tells them apart.
                TokenLogWriter(slab, slab.allocate()).append([3, 4])
            with pytest.raises(StreamGone):
                await step


async def test_a_stream_that_is_gone_already_is_refused(slab: Slab, subscriber: Subscriber) -> None:
    stream = slab.allocate()
    slab.free(stream)
    with pytest.raises(StreamGone):
        await gather(subscriber, stream)


# --------------------------------------------------------------------------------------------- the publisher's side


async def test_publisher_and_follower_meet_whatever_kind_of_context_they_have(slab: Slab, tmp_path: Path) -> None:
    with (
        zmq.asyncio.Context() as ours,
        zmq.Context() as theirs,
        closing(Publisher(ours, f"ipc://{tmp_path}/bell.sock", high_water_mark=1)) as publisher,
    ):
        async with listening(theirs, slab) as subscriber:
            for _ in range(2):
                subscriber.connect(publisher.endpoint)
            stream = slab.allocate()
            writer = TokenLogWriter(slab, stream)
            task = asyncio.create_task(gather(subscriber, stream))
            for token in range(500):
                publisher.ring(stream, writer.append([token]), [token], LogState.OPEN)
                if token % 50 == 0:
                    await asyncio.sleep(0)
            writer.close("stop", 3)
            publisher.ring(stream, writer.count, [], LogState.CLOSED)
            seen, last = await task
            assert seen == list(range(500))
            assert (last.finish_reason, last.stop_token) == ("stop", 3)
            assert subscriber.garbage_frames == 0


async def test_the_own_subscriber_is_rung_without_a_socket(
    context: zmq.Context[Any], slab: Slab, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "SWEEP_SECONDS", 3600)
    stream = slab.allocate()
    writer = TokenLogWriter(slab, stream)
    with closing(Publisher(context, f"inproc://own-{next(numbers)}")) as publisher:
        publisher.local = subscriber
        task = asyncio.create_task(gather(subscriber, stream))
        for token in range(5):
            await asyncio.sleep(0)
            publisher.ring(stream, writer.append([token]), [token], LogState.OPEN)
        await asyncio.sleep(0)
        writer.close("stop")
        publisher.ring(stream, 5, [], LogState.CLOSED)
        assert (await task)[0] == [0, 1, 2, 3, 4]


async def test_a_doorbell_that_rings_while_the_consumer_is_busy_is_not_lost(
    slab: Slab, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "SWEEP_SECONDS", 3600)
    stream = slab.allocate()
    writer = TokenLogWriter(slab, stream)
    writer.append([1])
    async with asyncio.timeout(HANG_SECONDS), aclosing(subscriber.follow(stream)) as views:
        assert (await anext(views)).ids == [1]
        writer.append([2])
        subscriber.ring(stream.slot, stream.generation)
        assert (await anext(views)).ids == [2]


async def test_a_writer_that_is_always_ahead_does_not_starve_the_loop(slab: Slab, subscriber: Subscriber) -> None:
    stream = slab.allocate()
    writer = TokenLogWriter(slab, stream)
    writer.append([0])
    others_turn = asyncio.create_task(asyncio.sleep(0))
    async with aclosing(subscriber.follow(stream)) as views:
        async for view in views:
            if others_turn.done() or view.count == 100:
                break
            writer.append([view.count])
    assert others_turn.done()


async def test_an_append_too_long_for_a_frame_still_rings(context: zmq.Context[Any]) -> None:
    ids = [2**32 - 1] * (MAX_BELL_BYTES // 5 + 1)
    with (
        Slab.create(slots=1, capacity=len(ids)) as slab,
        closing(Publisher(context, f"inproc://long-{next(numbers)}")) as publisher,
    ):
        stream = slab.allocate()
        writer = TokenLogWriter(slab, stream)
        async with listening(context, slab) as subscriber:
            subscriber.connect(publisher.endpoint)
            task = asyncio.create_task(gather(subscriber, stream))
            publisher.ring(stream, writer.append(ids), ids, LogState.OPEN)
            writer.close("length")
            assert (await task)[0] == ids
            assert subscriber.garbage_frames == 0


@pytest.mark.parametrize("endpoint", ["ipc:///nowhere/at/all.sock", "nonsense", "tcp://127.0.0.1:notaport"])
def test_an_endpoint_that_cannot_be_bound_is_one_sentence(context: zmq.Context[Any], endpoint: str) -> None:
    with pytest.raises(BusError, match="cannot be bound to") as caught:
        Publisher(context, endpoint)
    assert endpoint in str(caught.value)


async def test_an_endpoint_that_is_none_is_one_sentence(subscriber: Subscriber) -> None:
    with pytest.raises(BusError, match="'nonsense' cannot be reached"):
        subscriber.connect("nonsense")


# ---------------------------------------------------------------------------------------------------------- leaving


async def test_nothing_runs_while_nobody_follows(slab: Slab, subscriber: Subscriber) -> None:
    assert subscriber._sweep_timer is None
    stream = slab.allocate()
    async with aclosing(subscriber.follow(stream)) as views:
        step = asyncio.ensure_future(anext(views))
        await asyncio.sleep(0)
        assert subscriber._sweep_timer is not None
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
    await until(lambda: subscriber._sweep_timer is None)
    assert not subscriber._watches
    TokenLogWriter(slab, stream).close("stop")
    assert (await gather(subscriber, stream))[0] == []


async def test_closing_ends_those_who_follow(slab: Slab, subscriber: Subscriber) -> None:
    streams = [slab.allocate() for _ in range(2)]
    tasks = [asyncio.create_task(gather(subscriber, stream)) for stream in (*streams, *streams)]
    await asyncio.sleep(0)
    await subscriber.close()
    await subscriber.close()
    for task in tasks:
        with pytest.raises(BusError, match="closed"):
            await task
    with pytest.raises(BusError, match="closed"):
        await gather(subscriber, streams[0])


async def test_closing_while_a_follower_is_busy_ends_it_at_its_next_wait(slab: Slab, subscriber: Subscriber) -> None:
    stream = slab.allocate()
    TokenLogWriter(slab, stream).append([1])
    async with aclosing(subscriber.follow(stream)) as views:
        assert (await anext(views)).ids == [1]
        await subscriber.close()
        with pytest.raises(BusError, match="closed"):
            await anext(views)
