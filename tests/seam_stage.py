"""A feed whose prompt joins outputs as text, between a real bus and an engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import zmq

from pingpong_bus.chain import Agent, OutputPart, RenderedMessage, TextPart
from pingpong_bus.messages import (
    ChunkSettings,
    EngineLimits,
    HopEnded,
    HopSpec,
    JoinedPrompt,
    Sampling,
    SessionKind,
    StreamSegment,
    WorkerMessage,
)
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import TokenLogWriter
from pingpong_worker.engine import OutputTokens
from pingpong_worker.feed import Feed
from pingpong_worker.prompt import PromptCodec
from pingpong_worker.simulated_prompts import SimulatedPrompts, simulated_prompts
from pingpong_worker.surroundings import Surroundings
from pingpong_worker.text import TextCodec
from pingpong_worker.text_source import TokenizerShelf

HANG_S = 20
ANSWER = [OutputTokens([72, 101], cached_tokens=7), OutputTokens([108, 108, 111], "length")]
_names = itertools.count()


class Session:
    """Computes what it is given at once, and records it."""

    kind: SessionKind = "prefix-cache"

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.appends: list[int] = []
        self.rollbacks: list[int] = []
        self.answered: list[list[int]] = []

    async def append(self, ids: Sequence[int]) -> int | None:
        self.prompt.extend(ids)
        self.appends.append(len(ids))
        await asyncio.sleep(0)
        return len(ids)

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        self.prompt.extend(ids)
        self.answered.append(list(self.prompt))
        for tokens in ANSWER:
            await asyncio.sleep(0)
            yield tokens

    def roll_back(self, tokens: int) -> None:
        self.rollbacks.append(tokens)
        del self.prompt[tokens:]

    async def abort(self) -> None: ...


class Engine:
    limits = EngineLimits(
        engine="fake", model="", max_model_len=4096, vocabulary_size=2**16, block_size=1, kv_tokens=8192, max_num_seqs=8
    )

    def __init__(self) -> None:
        self.session = Session()
        self.kinds: list[object] = []

    def open(self, session_id: str, **how: object) -> Session:
        self.kinds.append(how["kind"])
        return self.session

    async def start(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def check(self) -> None: ...

    async def shutdown(self) -> None: ...


class Stage:
    """A bus with two upstreams, and a feed that reads them."""

    def __init__(self, slab: Slab, publisher: Publisher, subscriber: Subscriber, engine: Any = None) -> None:
        self.slab = slab
        self.engine = engine or Engine()
        self.messages: list[WorkerMessage] = []
        self.prompts: PromptCodec = SimulatedPrompts()
        self.load: Callable[[str], TextCodec] = simulated_prompts
        self.upstreams = [TokenLogWriter(slab, slab.allocate()) for _ in range(2)]
        self.output = slab.allocate()
        self._publisher = publisher
        self.subscriber = subscriber

    def joined(self, parts: list[TextPart | OutputPart], **more: object) -> JoinedPrompt:
        reads = sorted({part.agent for part in parts if isinstance(part, OutputPart)})
        return JoinedPrompt(
            agent=Agent(name="a", prompt="x"),
            messages=[RenderedMessage("user", parts)],
            outputs={agent: self.upstreams[agent].stream for agent in reads},
            expected=dict.fromkeys(reads, 64),
            **{"ahead": True, **more},  # type: ignore[arg-type]
        )

    def feed(self, joined: JoinedPrompt, **more: object) -> Feed:
        surroundings = Surroundings(
            self.engine,
            self.prompts,
            self.slab,
            self.subscriber,
            self._publisher,
            self.messages.append,
            tokenizers=TokenizerShelf(lambda source: self.load(source.model)),
        )
        spec = {
            "hop": "c/a/0",
            "output": self.output,
            "segments": [StreamSegment(stream=stream) for stream in joined.outputs.values()],
            "sampling": Sampling(max_tokens=5),
            "chunks": ChunkSettings(append_tokens=4),
            "joined": joined,
            "match": joined,
            **more,
        }
        return Feed(HopSpec(**spec), surroundings)  # type: ignore[arg-type]

    def write(self, upstream: int, ids: Sequence[int]) -> None:
        writer = self.upstreams[upstream]
        first = writer.append(ids)
        self._publisher.ring(writer.stream, first, ids, LogState.OPEN)

    def close(self, upstream: int) -> None:
        writer = self.upstreams[upstream]
        writer.close("stop", 2)
        self._publisher.ring(writer.stream, writer.count, [], LogState.CLOSED)

    def abort(self, upstream: int) -> None:
        writer = self.upstreams[upstream]
        writer.abort()
        self._publisher.ring(writer.stream, writer.count, [], LogState.ABORTED)

    async def sent(self, count: int) -> list[int]:
        """What the session has once it has so many ids."""
        async with asyncio.timeout(HANG_S):
            while len(self.engine.session.prompt) < count:
                await asyncio.sleep(0.001)
        return list(self.engine.session.prompt)

    def of(self, kind: type[WorkerMessage]) -> list[WorkerMessage]:
        return [message for message in self.messages if isinstance(message, kind)]


@asynccontextmanager
async def seam_stage(engine: Any = None) -> AsyncGenerator[Stage, None]:
    """A stage with an engine of its own, or this one."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    slab = Slab.create(3, 1024)
    publisher = Publisher(context, f"inproc://seam-{next(_names)}")
    subscriber = Subscriber(context, slab)
    publisher.local = subscriber
    try:
        yield Stage(slab, publisher, subscriber, engine)
    finally:
        await subscriber.close()
        publisher.close()
        slab.close()
        context.term()


async def ended(task: asyncio.Task[HopEnded]) -> HopEnded:
    async with asyncio.timeout(HANG_S):
        return await task


def parts(*texts: str | int) -> list[TextPart | OutputPart]:
    return [OutputPart(text) if isinstance(text, int) else TextPart(text) for text in texts]
