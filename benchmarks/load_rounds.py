"""Runs the rounds of a load test: the same chains at the same moments on every side, turn about."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from typing import Literal

import msgspec

from connecting import made_with
from harness import in_order
from load_rows import ChainRow, Gaps, Load, Round, Shape
from load_sides import Side
from other_work import OtherWork
from pingpong_bus.chain import Chain, Exactness
from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import ChainResult, SubmitOptions
from profiles import Profile, filling_chain, ids_chain
from progress_bar import counted

_WARM_SHARE = 0.7
"""Of a KV cache that prefixes may take before a round; the rest is for what runs."""
_ALONE = 1_000_000
"""Seeds from here on are of chains that run alone."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all sides have in common."""

    load: Load
    shape: Shape
    cache: Literal["cold", "warm"]
    exactness: Exactness
    """Of all sides."""
    seed: int
    patience_s: float
    """A chain that takes longer has failed."""


class LoadTest:
    """Runs rounds of one load on the sides.

    Args:
        keep: is given each line of results as soon as it is there.
    """

    def __init__(self, sides: Sequence[Side], settings: Settings, keep: Callable[[Round], None]) -> None:
        self.sides = sides
        self.settings = settings
        self._keep = keep
        limits = [worker.limits for side in sides for worker in side.status.workers if worker.limits]
        self._vocabulary = min(limit.vocabulary_size for limit in limits)
        self._kv_tokens = min(limit.kv_tokens for limit in limits)
        self._made_with = {side.spec.name: made_with(side.status) for side in sides}

    async def warm_up(self) -> None:
        """Have each side run a chain its way."""
        settings = self.settings
        for number, side in enumerate(self.sides):
            await side.client.run(
                self._chain(_ALONE + number), None, side.options(0, settings.exactness, settings.patience_s)
            )

    async def alone_ms(self) -> float:
        """What one such chain takes in series, alone, on the first side's daemon."""
        settings = self.settings
        first = self.sides[0].client
        await first.reset_caches()
        options = SubmitOptions(mode="serial", exactness=settings.exactness)
        alone = await first.run(self._chain(_ALONE - 1), None, options)
        print(f"one chain alone in series: {alone.e2e_ms or 0.0:,.0f} ms", file=sys.stderr)
        return round(alone.e2e_ms or 0.0, 1)

    def _chain(self, seed: int) -> Chain:
        shape = self.settings.shape
        profile = Profile(
            name=str(shape),
            prefix=shape.prefix,
            output=shape.output,
            last_output=shape.last_output,
            agents=shape.agents,
        )
        return ids_chain(profile, seed=self.settings.seed * 10 * _ALONE + seed, vocabulary=self._vocabulary)

    async def round(self, side: Side, index: int, unloaded_ms: float) -> Round:
        """Run one round on one side, and keep it.

        Args:
            unloaded_ms: what one such chain takes in series, alone.
        """
        settings = self.settings
        due_ms = settings.load.arrivals_ms(f"{settings.seed}:{index}")
        chains = [self._chain(index * 10_000 + number) for number in range(len(due_ms))]
        await side.client.reset_caches()
        warm_chains = await self._fill(side, chains) if settings.cache == "warm" else 0
        await side.times.take()
        others = OtherWork(one.status.pid for one in self.sides)
        zero = time.monotonic()
        rows = await asyncio.gather(
            *(
                self._run_chain(side, number, chain, due, zero)
                for number, (chain, due) in enumerate(zip(chains, due_ms, strict=True))
            )
        )
        makespan_ms = (time.monotonic() - zero) * 1e3 - due_ms[0]
        others_cores, cpu_s = others.cores(), others.own_s()
        logs = await side.times.take()
        gaps = {group: Gaps() for group in side.groups}
        for log in logs:
            gaps[log.group].add(log.gaps_ms)
        row = Round(
            side=side.spec.name,
            how=side.spec.how,
            decode_first=side.decode_first,
            groups=side.groups,
            index=index,
            load=settings.load,
            shape=settings.shape,
            cache=settings.cache,
            warm_chains=warm_chains,
            exactness=settings.exactness,
            seed=settings.seed,
            unloaded_ms=unloaded_ms,
            makespan_ms=round(makespan_ms, 1),
            chains=list(rows),
            gaps=gaps,
            missed_tokens=sum(log.missed for log in logs),
            others_cores=round(others_cores, 2),
            cpu_s=round(cpu_s, 2),
            provenance=self._made_with[side.spec.name],
        )
        self._keep(row)
        _tell(row)
        return row

    async def _fill(self, side: Side, chains: Sequence[Chain]) -> int:
        """Fill every group's prefix cache with prefixes of the chains; returns of how many, for they have to fit."""
        each = self.settings.shape.prefix * self.settings.shape.agents
        fitting = chains[: int(self._kv_tokens * _WARM_SHARE) // each]

        async def fill(group: str) -> None:
            for chain in fitting:
                options = SubmitOptions(mode="serial", group=group, exactness=self.settings.exactness)
                await side.client.run(filling_chain(chain), None, options)

        await asyncio.gather(*map(fill, side.groups))
        return len(fitting)

    async def _run_chain(self, side: Side, number: int, chain: Chain, due_ms: float, zero: float) -> ChainRow:
        """Submit a chain when it is due and follow it to its end; a failure is a row, too.

        One that is given up is cancelled: the daemon may be there for others.
        """
        await asyncio.sleep(max(0.0, zero + due_ms / 1e3 - time.monotonic()))
        submitted_ms = (time.monotonic() - zero) * 1e3
        settings = self.settings
        chain_id = ""
        try:
            options = side.options(number, settings.exactness, settings.patience_s)
            chain_id = await side.client.submit(chain, None, options, follow=True)
            ended_ms: float | None = None
            async with aclosing(side.client.follow(chain_id)) as events:
                async for event in events:
                    if event.kind == "ended":
                        ended_ms = (time.monotonic() - zero) * 1e3
            if ended_ms is None:  # its last events were lost with a connection
                ended_ms = (time.monotonic() - zero) * 1e3
            result = await side.client.result(chain_id)
        except asyncio.CancelledError:
            with suppress(PingpongError):
                if chain_id:
                    await side.client.cancel(chain_id)
            raise
        except PingpongError as error:
            return ChainRow(due_ms=round(due_ms, 1), submitted_ms=round(submitted_ms, 1), error=str(error))
        return _chain_row(result, due_ms, submitted_ms, ended_ms)


async def run_tests(tests: Sequence[LoadTest], rounds: int, budget_s: float | None) -> list[Round]:
    """Warm all sides up, then run rounds of all tests, which take turns.

    Args:
        tests: of the same sides and shape of chains under several loads.
        rounds: of each.
        budget_s: no round starts that would not end within it, going by the longest of its test so far. The very first
            one does. None: all are run.
    """
    began = time.monotonic()
    await tests[0].warm_up()
    unloaded_ms = await tests[0].alone_ms()
    found: list[Round] = []
    longest_s = [0.0] * len(tests)
    for index in counted(range(rounds), "rounds"):
        for number, test in enumerate(tests):
            started = time.monotonic()
            if found and budget_s is not None and started - began + longest_s[number] > budget_s:
                print(f"{test.settings.load}: round {index + 1} would not fit the budget", file=sys.stderr)
                continue
            found += [await test.round(side, index, unloaded_ms) for side in in_order(test.sides, index, "alternate")]
            longest_s[number] = max(longest_s[number], time.monotonic() - started)
    return found


def _tell(row: Round) -> None:
    mean = sum(chain.e2e_ms or 0.0 for chain in row.finished) / max(1, len(row.finished))
    print(
        f"{row.load}, round {row.index + 1}, {row.side}: {len(row.finished)} of {len(row.chains)} chains, "
        f"mean {mean:,.0f} ms, all within {row.makespan_ms:,.0f} ms",
        file=sys.stderr,
    )


def _chain_row(result: ChainResult, due_ms: float, submitted_ms: float, ended_ms: float) -> ChainRow:
    finished = result.state == "finished"
    return ChainRow(
        due_ms=round(due_ms, 1),
        submitted_ms=round(submitted_ms, 1),
        e2e_ms=round(ended_ms - due_ms, 1) if finished else None,
        daemon_ms=_rounded(result.e2e_ms),
        placement=result.placement,
        workers=[agent.worker for agent in result.agents],
        ttft_ms=[_rounded(agent.ttft_ms) for agent in result.agents],
        output_tokens=sum(agent.output_tokens for agent in result.agents),
        cached_tokens=sum(agent.cached_tokens for agent in result.agents),
        predicted_ms=_rounded(result.predicted_ms),
        error="" if finished else result.error or result.state,
    )


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 1)
