"""What the daemon costs: the same chain on bare vLLM and through pingpongd, in one run, taking turns.

    python benchmarks/overhead.py --config examples/cpu.toml --dtype float32 --runs 5 --out overhead.jsonl
    python benchmarks/overhead.py --report overhead.jsonl

Four engines are up at once (two of the daemon's, two bare ones, on the same devices), of which only the measured ones
may work: what the others' processes use meanwhile is measured too. On two CPU cores they take about 15 GB.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from bare_chain import BareEngines, BareMode, bare_agents, bare_engines
from commands import command
from connecting import changed_config
from local_daemon import local_daemon
from pingpong_bus.chain import Chain
from pingpong_bus.errors import EngineError, NotEqual
from pingpong_bus.messages import SubmitOptions
from pingpong_client import AsyncClient
from pingpongd.config import load_config
from profiles import PROFILES, ids_chain
from progress_bar import counted
from provenance import provenance
from runs import append_line, read_lines

System = Literal["bare", "daemon"]
SYSTEMS: tuple[System, System] = ("bare", "daemon")
MODES: tuple[BareMode, BareMode] = ("serial", "ping-pong")
_SETTLE_S = 0.5
_SETTLE_TRIES = 60
_IDLE_SHARE = 0.05
"""Of a core; the daemon's and the engines' own timers use about 0.02."""


class OverheadRun(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file."""

    system: System
    mode: BareMode
    profile: str
    index: int
    e2e_ms: float
    """First request handed over to last token."""
    ttft_ms: list[float]
    outputs: list[list[int]]
    idle_share: float
    """CPU time that the other system's processes used meanwhile, as a share of one core."""
    provenance: dict[str, Any]


def render(runs: Sequence[OverheadRun]) -> str:
    """Medians of both systems, their ratio, and whether all ids are the same; as Markdown."""
    lines = [
        "| E2E median, ms | runs | bare vLLM | pingpongd | ratio | of pairs, median | downstream TTFT, bare / daemon |"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for mode in MODES:
        bare, daemon = ([run for run in runs if run.mode == mode and run.system == system] for system in SYSTEMS)
        if not bare or not daemon:
            continue
        medians = [statistics.median(run.e2e_ms for run in some) for some in (bare, daemon)]
        pairs = statistics.median(mine.e2e_ms / theirs.e2e_ms for theirs, mine in zip(bare, daemon, strict=False))
        ttfts = [statistics.median(sum(run.ttft_ms[1:]) for run in some) for some in (bare, daemon)]
        lines.append(
            f"| {mode} | {len(daemon)} | {medians[0]:,.0f} | {medians[1]:,.0f} | {medians[1] / medians[0]:.3f} "
            f"| {pairs:.3f} | {ttfts[0]:,.0f} / {ttfts[1]:,.0f} |"
        )
    lines += ["", f"Outputs: {'all the same ids' if same_ids(runs) else 'NOT the same ids'}."]
    lines.append(
        f"The other system's processes used at most {100 * max(run.idle_share for run in runs):.1f} % of a core."
    )
    return "\n".join(lines)


def same_ids(runs: Sequence[OverheadRun]) -> bool:
    """Whether all runs gave the same output ids."""
    return all(run.outputs == runs[0].outputs for run in runs)


class CpuMeter:
    """CPU seconds used by some processes and what they have started by then."""

    def __init__(self, roots: Sequence[psutil.Process]) -> None:
        self._roots = roots

    def seconds(self) -> float:
        """User and system time up to now."""
        tree = [process for root in self._roots for process in (root, *root.children(recursive=True))]
        return sum(sum(process.cpu_times()[:2]) for process in tree)


async def settled(meter: CpuMeter) -> None:
    """Wait until the processes are idle: vLLM's workers spin for a second after their last message.

    Raises:
        EngineError: they do not become idle.
    """
    for _ in range(_SETTLE_TRIES):
        before = meter.seconds()
        await asyncio.sleep(_SETTLE_S)
        if meter.seconds() - before < _IDLE_SHARE * _SETTLE_S:
            return
    raise EngineError("engines that have nothing to do keep using the processor, so nothing can be compared.")


class Comparison:
    """Runs one chain on both systems."""

    def __init__(
        self, chain: Chain, client: AsyncClient, bare: BareEngines, meters: dict[System, CpuMeter], first_group: str
    ) -> None:
        self._chain = chain
        self._client = client
        self._bare = bare
        self._meters = meters
        self._first_group = first_group
        self._provenance = provenance()

    async def run(self, system: System, mode: BareMode, index: int) -> OverheadRun:
        """One run with empty prefix caches."""
        idle = self._meters["daemon" if system == "bare" else "bare"]
        await (self._bare if system == "bare" else self._client).reset_caches()
        await settled(idle)
        before = idle.seconds()
        if system == "bare":
            done = await self._bare.run(bare_agents(self._chain), mode)
            e2e_ms, ttft_ms, outputs = done.e2e_ms, done.ttft_ms, done.outputs
        else:
            group = self._first_group if mode == "serial" else None  # the bare serial chain runs on the first one too
            result = await self._client.run(self._chain, None, SubmitOptions(mode=mode, group=group, exactness="fast"))
            e2e_ms = result.e2e_ms or 0.0
            ttft_ms = [agent.ttft_ms or 0.0 for agent in result.agents]
            outputs = [agent.output_ids for agent in result.agents]
        return OverheadRun(
            system=system,
            mode=mode,
            profile=self._chain.name,
            index=index,
            e2e_ms=e2e_ms,
            ttft_ms=ttft_ms,
            outputs=outputs,
            idle_share=(idle.seconds() - before) / (e2e_ms / 1e3),
            provenance=self._provenance,
        )


async def measure(options: argparse.Namespace) -> list[OverheadRun]:
    """Start everything, run, and stop it."""
    with tempfile.TemporaryDirectory(prefix="pingpong-config-") as private:
        changes = {"dtype": options.dtype} if options.dtype else {}
        return await _measure(options, changed_config(options.config, Path(private), changes))


async def _measure(options: argparse.Namespace, path: Path) -> list[OverheadRun]:
    config = load_config(path)
    chain = ids_chain(PROFILES[options.profile])
    runs: list[OverheadRun] = []
    async with (
        local_daemon(path) as folder,
        AsyncClient(folder) as client,
        bare_engines(config) as bare,
    ):
        daemon = psutil.Process((await client.status()).pid)
        engines = [child for child in psutil.Process().children() if child.pid != daemon.pid]
        meters: dict[System, CpuMeter] = {"bare": CpuMeter(engines), "daemon": CpuMeter([daemon])}
        comparison = Comparison(chain, client, bare, meters, config.groups[0].name)
        for index in counted(range(-1, options.runs), "rounds"):
            order = [(system, mode) for mode in MODES for system in SYSTEMS]
            for system, mode in order[::-1] if index % 2 else order:
                run = await comparison.run(system, mode, index)
                print(f"{index + 1 or 'warm-up'} {system} {mode}: {run.e2e_ms:,.0f} ms", file=sys.stderr, flush=True)
                if index < 0:
                    continue
                runs.append(run)
                if options.out:
                    append_line(options.out, run)
    return runs


@command
def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Measure what the daemon costs over bare vLLM.")
    parser.add_argument("--config", type=Path, default=Path("examples/cpu.toml"))
    parser.add_argument("--dtype", help="over the configuration's; in bfloat16 the two may give other ids")
    parser.add_argument("--profile", default="cpu", choices=list(PROFILES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSONL file that the runs are added to")
    parser.add_argument("--report", type=Path, help="only report the runs of this file")
    options = parser.parse_args()
    runs = read_lines(options.report, OverheadRun) if options.report else asyncio.run(measure(options))
    print(render(runs))
    return 0 if same_ids(runs) else NotEqual.exit_code


if __name__ == "__main__":
    sys.exit(main())
