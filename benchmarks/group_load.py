"""Load for a daemon with many groups: chains that arrive at random, and what becomes of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import ChainResult, Mode, SubmitOptions
from pingpong_client import AsyncClient

_PING_S = 0.5
_TIMEOUT_S = 120.0
_POOL_TOKENS = 1 << 17


class ChainSize(msgspec.Struct, frozen=True, kw_only=True):
    """Every chain's shape: agents in a row, each of which reads the one before."""

    agents: int = 5
    prefix: int = 4096
    """Tokens of each agent's own text; no two chains share any."""
    output: int = 256
    """Tokens that each writes, the last one a quarter."""
    suffix: int = 16

    @property
    def outputs(self) -> list[int]:
        """Tokens that each agent writes."""
        return [self.output] * (self.agents - 1) + [max(1, self.output // 4)]


class ChainMaker:
    """Makes chains of one size and different tokens, cheaply: their prompts are stretches of a pool of random ids."""

    def __init__(self, size: ChainSize, vocabulary: int, seed: int = 0) -> None:
        self._size = size
        self._draw = random.Random(seed)
        pool = [self._draw.randrange(100, vocabulary) for _ in range(_POOL_TOKENS)]
        self._pool = pool + pool[: size.prefix + size.suffix]

    def chain(self, number: int) -> Chain:
        """The next chain."""
        size, agents = self._size, []
        for index, output in enumerate(size.outputs):
            upstream = [f"{{{{agent{index - 1}}}}}"] if index else []
            prompt: list[int | str] = [*self._stretch(size.prefix), *upstream, *self._stretch(size.suffix)]
            agents.append(Agent(name=f"agent{index}", prompt_ids=prompt, max_tokens=output, ignore_eos=True))
        return Chain(name=f"chain {number}", agents=agents)

    def _stretch(self, count: int) -> list[int]:
        start = self._draw.randrange(_POOL_TOKENS)
        return self._pool[start : start + count]


class Finished(msgspec.Struct, frozen=True):
    """A chain that has run, as its client saw it."""

    accepted_ms: float
    """From the submission until the daemon's answer."""
    queued_ms: float
    """From the submission, as the daemon received it, until it was started: tokenized, kept, in its turn."""
    result: ChainResult


class Load:
    """Submits chains and follows them.

    Attributes:
        finished: chains that have run.
        events: that came, by kind; each but "ended" stands for a message of a worker.
        failures: of chains, as sentences.
    """

    def __init__(self, clients: Sequence[AsyncClient], maker: ChainMaker, mode: Mode) -> None:
        self.finished: list[Finished] = []
        self.events: Counter[str] = Counter()
        self.failures: list[str] = []
        self._clients = clients
        self._maker = maker
        self._mode = mode

    async def poisson(self, per_s: float, seconds: float, seed: int = 0) -> None:
        """Submit chains at random times, one at least and `per_s` in the mean, and wait until all have ended."""
        draw = random.Random(seed)
        begun = time.monotonic()
        at, number = 0.0, 0
        async with asyncio.TaskGroup() as group:
            while (at := at + draw.expovariate(per_s)) < seconds or number == 0:
                chain = self._maker.chain(number)
                await asyncio.sleep(begun + at - time.monotonic())
                group.create_task(self._run(chain, self._clients[number % len(self._clients)]))
                number += 1

    async def _run(self, chain: Chain, client: AsyncClient) -> None:
        begun = time.monotonic()
        queued_ms = 0.0
        try:
            number = await client.submit(chain, None, SubmitOptions(mode=self._mode), follow=True)
            accepted_ms = (time.monotonic() - begun) * 1e3
            async with aclosing(client.follow(number)) as events:
                async for event in events:
                    self.events[event.kind] += 1
                    if event.kind == "started":
                        queued_ms = event.at_ms
            result = await client.result(number)
        except PingpongError as error:
            self.failures.append(str(error))
            return
        if result.state == "finished":
            self.finished.append(Finished(accepted_ms, queued_ms, result))
        else:
            self.failures.append(f"{result.id} {result.state}: {result.error}")


async def _ping(folder: Path, stop: asyncio.Event) -> list[float]:
    found = []
    async with AsyncClient(folder, timeout_s=_TIMEOUT_S) as client:
        while not stop.is_set():
            begun = time.monotonic()
            await client.status()
            found.append((time.monotonic() - begun) * 1e3)
            await asyncio.sleep(_PING_S)
    return found


async def status_times(folder: Path, seconds: float) -> list[float]:
    """Ms that `status` takes, asked twice a second: the supervisor's event loop answers it in turn with its work."""
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    return await _ping(folder, stop)
