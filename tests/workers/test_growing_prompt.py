"""How fast upstreams write, as a prompt sees it that grows by what they write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import zmq.asyncio

from pingpong_bus.messages import Literals, StreamSegment
from pingpong_bus.slab import Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import TokenLogWriter
from pingpong_worker import growing_prompt
from pingpong_worker.growing_prompt import GrowingPrompt


async def test_the_time_of_a_token_is_that_of_the_upstream_that_writes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(growing_prompt, "time", clock)
    with Slab.create(2, 64) as slab, zmq.asyncio.Context() as context:
        first, second = slab.allocate(), slab.allocate()
        segments = [StreamSegment(stream=first), Literals(ids=[7]), StreamSegment(stream=second)]
        subscriber = Subscriber(context, slab)
        prompt = GrowingPrompt(segments, slab, subscriber)
        writers = TokenLogWriter(slab, first), TokenLogWriter(slab, second)

        def write(writer: TokenLogWriter, tokens: int, after_ms: float) -> float | None:
            clock.now += after_ms / 1e3
            writer.append([1] * tokens)
            prompt.take_known()
            return prompt.token_ms

        assert write(writers[0], 5, 30.0) is None  # who knows when they were written
        assert write(writers[0], 1, 8.0) is None  # the other one still writes
        writers[1].close("stop")
        assert prompt.token_ms == pytest.approx(8.0)
        assert write(writers[0], 2, 24.0) == pytest.approx(8.0 + 0.25 * (12.0 - 8.0))
        writers[0].close("stop")
        prompt.take_known()
        assert (prompt.complete, prompt.token_ms) == (True, None)
        await subscriber.close()
