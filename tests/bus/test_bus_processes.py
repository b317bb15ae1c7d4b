"""The bus between real processes: killed writers, concurrent readers, lagging and late subscribers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pingpong_bus.messages import StreamRef
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import TokenLogReader, TokenLogWriter

HANG_SECONDS = 60
CHILD = Path(__file__).with_name("bus_process.py")
BATCHES = [[10], [11, 12, 13], [14, 15], [16]]
WHOLE = [token for batch in BATCHES for token in batch]
STORES = 1 + len(WHOLE) + len(BATCHES) + 2
"""Of a writer's life: its pid, each id, a commit word a batch, the close record, the last word."""


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(slots=2, capacity=20_000) as made:
        yield made


@pytest.fixture
async def subscriber(slab: Slab) -> AsyncIterator[Subscriber]:
    with zmq.Context() as context:
        made = Subscriber(context, slab)
        yield made
        await made.close()


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `bus_process.py`; whatever a failed test leaves of it ends with the test."""
    children: list[subprocess.Popen[str]] = []

    def start_one(role: str, slab: Slab, stream: StreamRef, *arguments: str) -> subprocess.Popen[str]:
        children.append(
            subprocess.Popen(
                [sys.executable, str(CHILD), role, str(slab.fd), str(stream.slot), str(stream.generation), *arguments],
                pass_fds=[slab.fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return children[-1]

    yield start_one
    for child in children:
        child.kill()
        child.communicate()


def target_of(pid: int, fd: int) -> str:
    return str(Path(f"/proc/{pid}/fd/{fd}").readlink())


async def finish(child: subprocess.Popen[str]) -> int:
    """Wait for a child without stopping the loop; its exit status."""
    return await asyncio.to_thread(child.wait, HANG_SECONDS)


async def gather(subscriber: Subscriber, stream: StreamRef) -> list[int]:
    seen: list[int] = []
    async with asyncio.timeout(HANG_SECONDS):
        async for view in subscriber.follow(stream):
            assert view.first_index == len(seen)
            seen += view.ids
    return seen


@pytest.mark.parametrize("stores", range(STORES + 1))
async def test_a_writer_killed_between_any_two_stores_loses_nothing_and_doubles_nothing(
    slab: Slab, subscriber: Subscriber, start: Start, stores: int
) -> None:
    stream = slab.allocate()
    follower = asyncio.create_task(gather(subscriber, stream))
    status = await finish(start("kill", slab, stream, str(stores)))
    assert status == (0 if stores == STORES else -signal.SIGKILL)

    left = TokenLogReader(slab, stream).read()
    assert left.ids == WHOLE[: left.count]
    assert left.count in {sum(map(len, BATCHES[:whole])) for whole in range(len(BATCHES) + 1)}
    assert left.state is (LogState.CLOSED if stores == STORES else LogState.OPEN)
    assert left.stop_token == (17 if stores == STORES else None)
    if left.state is LogState.OPEN:
        successor = TokenLogWriter(slab, stream)
        assert successor.count == left.count
        # Another engine may go on in other words; the log is then what was committed, and its.
        rest = [100 + token for token in WHOLE[left.count :]]
        successor.append(rest)
        successor.close("length")
        assert await follower == WHOLE[: left.count] + rest
        last = TokenLogReader(slab, stream).read()
        assert (last.finish_reason, last.stop_token) == ("length", None)
    else:
        assert await follower == WHOLE


async def test_a_reader_beside_the_writer_sees_no_torn_log(slab: Slab, start: Start) -> None:
    """One slot, written and reused as fast as can be: each id says which generation and place it belongs to."""
    slab.allocate()
    stream = slab.allocate()
    reader = start("hammer", slab, stream)
    assert reader.stdout is not None
    assert await asyncio.to_thread(reader.stdout.readline) == "ready\n"
    enough = asyncio.create_task(asyncio.to_thread(reader.stdout.readline))
    async with asyncio.timeout(HANG_SECONDS):
        while not enough.done():
            for _ in range(100):
                writer = TokenLogWriter(slab, stream)
                own = stream.generation * 1000
                for size in (1, 3, 30, 100):
                    writer.append(range(own + writer.count, own + writer.count + size))
                writer.close("stop", stream.generation)
                slab.free(stream)
                stream = slab.allocate()
            await asyncio.sleep(0)
    TokenLogWriter(slab, stream).abort()
    whole, gone, torn = map(int, (await asyncio.to_thread(reader.stdout.readline)).split())
    assert await finish(reader) == 0
    assert torn == 0
    assert whole > 10_000
    assert gone > 10


async def test_a_high_water_mark_of_one_loses_no_token(
    slab: Slab, subscriber: Subscriber, start: Start, tmp_path: Path
) -> None:
    stream, endpoint = slab.allocate(), f"ipc://{tmp_path}/bell.sock"
    subscriber.connect(endpoint)  # before it is bound
    follower = asyncio.create_task(gather(subscriber, stream))
    status, seen = await asyncio.gather(finish(start("publish", slab, stream, endpoint, "20000")), follower)
    assert status == 0
    assert seen == list(range(20_000))
    assert subscriber.garbage_frames == 0


async def test_who_comes_late_reads_from_the_start(
    slab: Slab, subscriber: Subscriber, start: Start, tmp_path: Path
) -> None:
    stream, endpoint = slab.allocate(), f"ipc://{tmp_path}/bell.sock"
    assert await finish(start("publish", slab, stream, endpoint, "100")) == 0
    subscriber.connect(endpoint)  # nobody is there any more
    assert await gather(subscriber, stream) == list(range(100))


async def test_a_killed_process_leaves_its_tokens_and_nothing_else(start: Start) -> None:
    with Slab.create(slots=1, capacity=10) as slab:
        stream = slab.allocate()
        child = start("hold", slab, stream)
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == "ready\n"
        assert slab.writer_pid(stream) == child.pid
        # Without a name it cannot outlive its holders.
        assert target_of(child.pid, slab.fd) == "/memfd:pingpong-slab (deleted)"
        child.kill()
        assert await finish(child) == -signal.SIGKILL
        assert TokenLogReader(slab, stream).read().ids == [1, 2, 3]
