"""Runs the cells of a suite, a round at a time, on daemons that are up side by side; one is busy at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from chain_runner import RunSettings
from harness import in_order
from load_rounds import LoadTest, Settings
from load_rows import Round, Shape
from load_sides import Side
from pingpong_bus.errors import PingpongError
from pingpong_client import AsyncClient
from profiles import Profile, ids_chain
from progress_bar import Count, counting
from runs import Run, row_name
from suite_daemons import Daemon, Say
from suite_plan import Cell, Pace, Row, estimated_s, next_cell, rows_of, sides_of
from ways import Way

PATIENCE = 4.0
"""A row that takes so many times its estimate, and half a minute, is given up."""
MOST_FAILURES = 2
"""A row of a cell that failed so often is not run again."""
WARM_UP_OUTPUT = 64
"""Tokens of the chain of two agents that each way runs once before its first run on prompts of a length: kernels load,
and prices are learnt."""
CANCEL_S = 20.0


class SuiteRun:
    """Runs cells until the time is spent.

    Args:
        name: of this run of the suite, for its results.
        cells: cells without a daemon that serves are left out.
        pace: for the first round of each cell; later ones are expected to take what the last one took.
        daemons: that serve.
        keep: is given each line of results as soon as it is there.
        say: is given lines to show.

    Attributes:
        runs, load: the lines so far.
    """

    def __init__(
        self,
        name: str,
        cells: Sequence[Cell],
        pace: Pace,
        daemons: Mapping[str, Daemon],
        keep: Callable[[Run | Round], None],
        say: Say,
    ) -> None:
        self._name = name
        self._up = list(daemons)
        self._cells = [cell for cell in cells if (sides_of if cell.at_once else rows_of)(cell, self._up)]
        self._daemons = daemons
        self._keep = keep
        self._say = say
        limits = [worker.limits for daemon in daemons.values() for worker in daemon.status.workers if worker.limits]
        self._vocabulary = min(limit.vocabulary_size for limit in limits)
        self._costs_s = {cell.name: estimated_s(cell, pace) for cell in self._cells}
        self._rounds: dict[str, int] = {}
        self._warm: set[tuple[str, int]] = set()
        self._failures: dict[tuple[str, str], int] = {}
        self._alone_ms: dict[Profile, float] = {}
        self.runs: list[Run] = []
        self.load: list[Round] = []

    async def run(self, seconds: float) -> None:
        """Run rounds of cells, the most urgent first, as long as one fits `seconds`."""
        with counting("rounds", sum(cell.runs for cell in self._cells)) as done:
            await self._run_rounds(time.monotonic() + seconds, done)
        for cell in self._cells:
            if (had := self._rounds.get(cell.name, 0)) < cell.runs:
                self._say(f"{cell.name}: {had} of {cell.runs} rounds fitted the time")

    async def _run_rounds(self, ends: float, done: Count) -> None:
        while cell := next_cell(self._cells, self._rounds, self._costs_s, ends - time.monotonic()):
            index = self._rounds.get(cell.name, 0)
            began = time.monotonic()
            self._say(
                f"{cell.name}, round {index + 1} of {cell.runs}; {ends - began:.0f} s left, "
                f"it should take {self._costs_s[cell.name]:.0f}"
            )
            await (self._load_round(cell, index) if cell.at_once else self._chain_round(cell, index))
            self._rounds[cell.name] = index + 1
            self._costs_s[cell.name] = time.monotonic() - began
            done()

    async def _warm_up(self, daemon: str, way: Way, profile: Profile) -> None:
        """Run a short chain of these prompts that way, where that was not done before."""
        key = (row_name(daemon, way.mode, way.group), profile.prefix)
        if key in self._warm:
            return
        short = msgspec.structs.replace(
            profile, output=min(profile.output, WARM_UP_OUTPUT), last_output=min(profile.last_output, 8), agents=2
        )
        chain = ids_chain(short, seed=1, vocabulary=self._vocabulary)
        await self._daemons[daemon].runner.run(chain, way, -1, RunSettings())
        self._warm.add(key)

    # ---------------------------------------------------------------------------------------- one chain at a time

    async def _chain_round(self, cell: Cell, index: int) -> None:
        for row in in_order(rows_of(cell, self._up), index, "alternate"):
            await self._guarded(cell, row.name, row.daemon, partial(self._chain_run, cell, row, index))

    async def _chain_run(self, cell: Cell, row: Row, index: int) -> None:
        profile = cell.chain_profile()
        settings = RunSettings(cache=cell.cache, seed=0, suite=self._name, cell=cell.name)
        runner = self._daemons[row.daemon].runner
        await self._warm_up(row.daemon, row.way, profile)
        chain = ids_chain(profile, vocabulary=self._vocabulary)
        run = await runner.run(chain, row.way, index, settings, exactness=cell.exactness, baseline=row.baseline)
        self._keep(run)
        self.runs.append(run)
        if row.way.mode == "serial" and cell.cache == "cold":
            self._alone_ms.setdefault(profile, run.e2e_ms)
        ttft = ", ".join(f"{agent.ttft_ms or 0:.0f}" for agent in run.result.agents)
        placed = f", {run.result.placement}" if row.way.mode == "auto" else ""
        self._say(f"  {run.row}: {run.e2e_ms:,.0f} ms; TTFT {ttft}{placed}")

    # -------------------------------------------------------------------------------------- many chains at once

    async def _load_round(self, cell: Cell, index: int) -> None:
        sides = [self._daemons[daemon].side(how) for daemon, how in sides_of(cell, self._up)]
        profile = cell.chain_profile()
        settings = Settings(
            load=cell.load,
            shape=Shape.of(profile),
            cache=cell.cache,
            exactness=cell.exactness or "fast",
            seed=0,
            patience_s=self._patience_s(cell),
        )
        test = LoadTest(sides, settings, partial(self._keep_load, cell))
        if profile not in self._alone_ms:
            self._alone_ms[profile] = await test.alone_ms()
        for side in in_order(sides, index, "alternate"):
            name = side.spec.name
            await self._guarded(cell, name, name.partition(" ")[0], partial(self._load_run, test, side, index, profile))

    async def _load_run(self, test: LoadTest, side: Side, index: int, profile: Profile) -> None:
        daemon = side.spec.name.partition(" ")[0]
        how = side.spec.how
        for way in [Way("serial", group) for group in side.groups] if how == "round-robin" else [Way(how)]:
            await self._warm_up(daemon, way, profile)
        await test.round(side, index, self._alone_ms[profile])

    def _keep_load(self, cell: Cell, row: Round) -> None:
        daemon = self._daemons[row.side.partition(" ")[0]]
        origin = daemon.origin | {"suite": self._name, "cell": cell.name}
        kept = msgspec.structs.replace(row, provenance=row.provenance | origin)
        self._keep(kept)
        self.load.append(kept)

    # --------------------------------------------------------------------------------------------------------- failures

    def _patience_s(self, cell: Cell) -> float:
        return 30.0 + PATIENCE * self._costs_s[cell.name] / len(cell.rows)

    async def _guarded(self, cell: Cell, row: str, daemon: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do it within the patience for it; a failure is told of, and what runs is cancelled, so that others go on."""
        failures = self._failures.get((cell.name, row), 0)
        if failures >= MOST_FAILURES:
            return
        try:
            async with asyncio.timeout(self._patience_s(cell)):
                await work()
        except (PingpongError, TimeoutError) as error:
            self._failures[cell.name, row] = failures + 1
            self._say(f"  {row} of {cell.name} failed: {str(error) or 'it took too long'}")
            try:
                async with asyncio.timeout(CANCEL_S):
                    await _cancel_all(self._daemons[daemon].client)
            except (PingpongError, TimeoutError) as left:
                self._say(f"  what runs on {daemon} could not be cancelled: {str(left) or 'it took too long'}")


async def _cancel_all(client: AsyncClient) -> None:
    """Cancel all live chains and wait for their end."""
    live = [chain.id for chain in await client.list() if chain.state in ("queued", "running")]
    for chain in live:
        await client.cancel(chain)
    for chain in live:
        await client.wait(chain)
