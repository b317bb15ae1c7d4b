"""Which cell exactness "grid" should have on a device: what each costs in series and read ahead, measured on an engine.

    python benchmarks/grid_size.py --config examples/cpu.toml --dtype bfloat16 --lengths 1000,2000 --out cells.jsonl
    python benchmarks/grid_size.py --config benchmarks/h200.toml --lengths 4096,12288 --cells 256,512,1024,2048 \\
        --output 256
    python benchmarks/grid_size.py --report cells.jsonl

No daemon: one engine, that of the configuration's first group, in this process. A small cell costs serial prefill (a
step for each cell); a large one costs the downstream's time to first token: only whole cells are computed ahead, and
what is left, half a cell on average and the suffix, is prefilled when the upstream has ended. Both are measured and
put into the expected time of a chain, and so is what the engine does without a grid. Recommended is the cell whose
greater loss, in series or read ahead, at any length, is the least.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from commands import command
from pingpong_bus.errors import UsageError
from pingpong_bus.messages import Sampling
from pingpong_worker.config import WorkerConfig
from pingpong_worker.main import simulated_parts, vllm_parts
from pingpongd.config import DaemonConfig, load_config
from progress_bar import counted
from provenance import command_line, provenance
from runs import append_line, read_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pingpong_worker.engine import Engine

DEFAULT_CELLS = "64,128,192,256,384,512,1024"
SUFFIX_TOKENS = 16
"""Of a prompt, after the upstream's output."""
APPEND_TOKENS = 32
"""Without a grid, what is left when the upstream ends is up to this many tokens and the suffix."""
SHARES = (0.125, 0.375, 0.625, 0.875)
"""Of a cell that may be left: where the upstream ends is as likely anywhere in it."""


class CellRun(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file: one way to cut prompts, at one length, in one round."""

    cell: int | None
    """None: no grid."""
    length: int
    """Tokens of the prompt."""
    index: int
    """Of the round: runs of one round stand side by side."""
    serial_ms: float
    """Time to first token of the whole prompt, with an empty cache."""
    left_ms: list[float]
    """Time to first token where what can be read ahead is in the cache, for each of `SHARES`."""
    step_ms: float
    """A decode step behind a prompt of this length."""
    agents: int
    output: int
    """Of the chain that is reckoned with."""
    provenance: dict[str, Any]


class CellTimes(msgspec.Struct, frozen=True):
    """What the runs of one cell at one length say, in ms."""

    serial: float
    """Median time to first token in series."""
    left: float
    """Mean over `SHARES` of the median time to first token read ahead."""
    serial_chain: float
    """A chain in series: every agent's prompt is prefilled, and then it decodes."""
    ahead_chain: float
    """A chain read ahead: of all but the first agent, only what is left is prefilled after the upstream's end."""

    @classmethod
    def of(cls, runs: Sequence[CellRun]) -> CellTimes:
        agents, decode = runs[0].agents, (runs[0].output - 1) * runs[0].step_ms
        serial = statistics.median(run.serial_ms for run in runs)
        left = statistics.fmean(map(statistics.median, zip(*(run.left_ms for run in runs), strict=True)))
        return cls(serial, left, agents * (serial + decode), serial + (agents - 1) * left + agents * decode)


class Loss(msgspec.Struct, frozen=True):
    """What a cell costs a chain over no grid, as a share of its time."""

    serial: float
    ahead: float


def cell_times(runs: Sequence[CellRun]) -> dict[tuple[int | None, int], CellTimes]:
    """By cell and length, in the order of the runs."""
    grouped: dict[tuple[int | None, int], list[CellRun]] = {}
    for run in runs:
        grouped.setdefault((run.cell, run.length), []).append(run)
    return {key: CellTimes.of(some) for key, some in grouped.items()}


def losses(runs: Sequence[CellRun]) -> dict[int, dict[int, Loss]]:
    """By cell, and then by length."""
    times = cell_times(runs)
    found: dict[int, dict[int, Loss]] = {}
    for (cell, length), some in times.items():
        free = times.get((None, length))
        if cell is not None and free is not None:
            loss = Loss(some.serial_chain / free.serial_chain - 1, some.ahead_chain / free.ahead_chain - 1)
            found.setdefault(cell, {})[length] = loss
    return found


def recommended(runs: Sequence[CellRun]) -> int | None:
    """The cell whose greatest loss is the least; None where nothing was measured with a grid and without."""
    greatest = {
        cell: max(max(loss.serial, loss.ahead) for loss in by_length.values())
        for cell, by_length in losses(runs).items()
    }
    return min(greatest, key=lambda cell: greatest[cell]) if greatest else None


def remainders(cell: int | None) -> list[int]:
    """Prompt tokens that may be left when the upstream ends, the suffix included."""
    return [round(share * (cell or APPEND_TOKENS)) + SUFFIX_TOKENS for share in SHARES]


class Cells:
    """Measures an engine."""

    def __init__(self, engine: Engine, *, seed: int = 0) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._sessions = 0

    async def times_ms(self, length: int, cell: int | None) -> tuple[float, list[float]]:
        """Times to first token behind a prompt of about `length` tokens: all of it to prefill, then what is left."""
        await self._engine.reset_prefix_cache()
        ids = self._ids(length)
        serial_ms = await self._first_token_ms(ids, cell)
        left_ms = []
        for more in remainders(cell):
            known = max(0, length - more) // (cell or 1) * (cell or 1)
            left_ms.append(await self._first_token_ms([*ids[:known], *self._ids(more)], cell))
        return serial_ms, left_ms

    async def _first_token_ms(self, ids: Sequence[int], cell: int | None) -> float:
        sampling = Sampling(max_tokens=1, ignore_eos=True)
        session = self._engine.open(self._name(), cache_salt=None, sampling=sampling, grid=cell)
        started = time.perf_counter()
        async for _ in session.finalize(ids, sampling):
            break
        return (time.perf_counter() - started) * 1e3

    async def step_ms(self, length: int, count: int = 65) -> float:
        """The median time between two tokens behind a prompt of `length` tokens."""
        sampling = Sampling(max_tokens=count, ignore_eos=True)
        session = self._engine.open(self._name(), cache_salt=None, sampling=sampling)
        times = [time.perf_counter() async for _ in session.finalize(self._ids(length), sampling)]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(times)) * 1e3

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._engine.limits.vocabulary_size) for _ in range(count)]

    def _name(self) -> str:
        self._sessions += 1
        return f"cell-{self._sessions}"


async def measure(options: argparse.Namespace) -> list[CellRun]:
    """Start the engine, measure every cell at every length, turn about, and shut it down."""
    lengths = _numbers(options.lengths, "--lengths")
    cells: list[int | None] = [None, *_numbers(options.cells, "--cells")]
    config = load_config(options.config, {"dtype": options.dtype} if options.dtype else {})
    runs: list[CellRun] = []
    async with engine_of(config) as engine:
        measuring = Cells(engine, seed=options.seed)
        made_with = {**provenance(), "engine": msgspec.to_builtins(engine.limits), "arguments": command_line()}
        steps = {length: await measuring.step_ms(length) for length in lengths}
        for index in counted(range(-1, options.rounds), "rounds"):
            for cell, length in itertools.product(cells[::-1] if index % 2 else cells, lengths):
                serial_ms, left_ms = await measuring.times_ms(length, cell)
                if index < 0:  # warms up
                    continue
                run = CellRun(
                    cell=cell,
                    length=length,
                    index=index,
                    serial_ms=serial_ms,
                    left_ms=left_ms,
                    step_ms=steps[length],
                    agents=options.agents,
                    output=options.output,
                    provenance=made_with,
                )
                runs.append(run)
                if options.out:
                    append_line(options.out, run)
            print(f"round {index + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return runs


@asynccontextmanager
async def engine_of(config: DaemonConfig) -> AsyncIterator[Engine]:
    """The engine of a configuration's first group, in this process."""
    group = config.groups[0]
    worker = WorkerConfig(
        name=group.name,
        devices=group.devices,
        engine=config.engine,
        model=config.model,
        dtype=config.dtype,
        engine_args=config.vllm | group.vllm,
        simulated=group.simulated or config.simulated,
        slab_fd=-1,
        control="",
        bell="",
        supervisor_pid=os.getpid(),
    )
    os.environ.update(config.environment | group.environment)
    parts: Any = simulated_parts(worker) if config.engine == "simulated" else vllm_parts(worker)
    parts.pin()
    engine: Engine = parts.make_engine(lambda _: None)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


def render(runs: Sequence[CellRun]) -> str:
    """What every cell takes and loses, and which one is recommended; as Markdown."""
    found, times = losses(runs), cell_times(runs)
    lines = []
    for run in {run.length: run for run in runs}.values():
        lines += [
            f"## Prompts of {run.length} tokens, {run.agents} agents that write {run.output}",
            "",
            f"A decode step takes {run.step_ms:.1f} ms.",
            "",
            "| cell | serial TTFT, ms | left TTFT, ms | chain in series, ms | read ahead, ms | loss, series | ahead |",
            "|--:|--:|--:|--:|--:|--:|--:|",
        ]
        cells = [(cell, some) for (cell, length), some in times.items() if length == run.length]
        for cell, some in sorted(cells, key=lambda pair: pair[0] or 0):
            loss = found.get(cell, {}).get(run.length) if cell is not None else None
            lost = "- | -" if loss is None else f"{100 * loss.serial:+.1f} % | {100 * loss.ahead:+.1f} %"
            figures = (some.serial, some.left, some.serial_chain, some.ahead_chain)
            lines.append(f"| {cell or 'none'} | {' | '.join(f'{ms:,.0f}' for ms in figures)} | {lost} |")
        lines.append("")
    lines.append(f"Recommended: {recommended(runs) or 'nothing; measure with and without a grid'}")
    return "\n".join(lines)


def _numbers(text: str, flag: str) -> list[int]:
    def read() -> Iterator[int]:
        for part in text.split(","):
            if not part.strip().isdigit() or int(part) < 1:
                raise UsageError(f"{flag}: {part!r} is no number of tokens.")
            yield int(part)

    return list(read())


@command
def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Choose the cell of exactness grid by measurement.")
    parser.add_argument("--config", type=Path, default=Path("examples/cpu.toml"))
    parser.add_argument("--dtype", help="over the file's")
    parser.add_argument("--lengths", default="1000,2000", help="prompt tokens, comma-separated")
    parser.add_argument("--cells", default=DEFAULT_CELLS, help="tokens, comma-separated; no grid is always measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--agents", type=int, default=5, help="of the chain that is reckoned with")
    parser.add_argument("--output", type=int, default=64, help="tokens that each of its agents writes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSONL file that the cells are added to")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="only report the cells of these files")
    options = parser.parse_args()
    if options.report:
        runs = [run for path in options.report for run in read_lines(path, CellRun)]
    else:
        runs = asyncio.run(measure(options))
    print(render(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
