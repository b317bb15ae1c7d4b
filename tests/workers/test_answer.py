"""An answer on its way out, where there is no tokenizer: ids are told of all the same."""

from __future__ import annotations

import asyncio

import zmq

from pingpong_bus.messages import HopText, Sampling, WorkerMessage
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import Slab
from pingpong_bus.token_log import TokenLogWriter
from pingpong_worker.answer import Answer
from pingpong_worker.engine import OutputTokens


async def test_ids_without_text_are_told_of_while_they_come() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    slab = Slab.create(1, 64)
    publisher = Publisher(context, "inproc://answer")
    told: asyncio.Queue[WorkerMessage] = asyncio.Queue()
    try:
        answer = Answer("c/0/0", TokenLogWriter(slab, slab.allocate()), publisher, told.put_nowait)
        answer.decode_with(None, Sampling(max_tokens=9))
        async with asyncio.timeout(30):
            answer.take(OutputTokens([1, 2]))
            assert await told.get() == HopText(hop="c/0/0", upto=2, text="")
            answer.take(OutputTokens([3]))
            assert await told.get() == HopText(hop="c/0/0", upto=3, text="")
        answer.take(OutputTokens([4], "length"))
        assert told.empty(), "the hop's end tells of the last ids"
    finally:
        publisher.close()
        slab.close()
        context.term()
