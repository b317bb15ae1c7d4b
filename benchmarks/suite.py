"""Runs many cells over several daemons that are up side by side, until its time is spent.

    python benchmarks/suite.py benchmarks/suite-cpu.toml --seconds 600 --out results
    python benchmarks/suite.py benchmarks/suite-h200.toml --seconds 900 --out results --cells '4k*,12k*'
    python benchmarks/suite.py --report results

Engines that are idle disturb nothing, so daemons of several kinds (ours, with vLLM's own scheduler, tensor parallel)
share the devices, and only one is busy at a time: ratios stand within one run. A cell is a chain's shape and state of
the caches, with rows of daemon and way; see `suite_plan.py`. Cells take turns, a round at a time, the most urgent
first; a round is started only if it fits the time. Each line of results is written as soon as it is there:
OUT/chains.jsonl (as by chain.py), OUT/load.jsonl (as by load.py), OUT/engines.jsonl, and logs of the daemons.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from commands import command
from load_rows import Round
from local_daemon import ended_by_signals
from pingpong_bus.errors import UsageError
from provenance import provenance
from runs import Run, append_line, read_lines, read_runs
from suite_cells import SuiteRun
from suite_daemons import Daemon, serving
from suite_plan import Cell, Suite, chosen_cells, load_suite, wanted_daemons
from suite_table import render

STOP_S = 25.0
"""Kept of the time to stop all engines."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure a suite of cells over several daemons.")
    parser.add_argument("suite", type=Path, nargs="?", help="the suite's TOML file")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of it, start and end included")
    parser.add_argument(
        "--start-seconds", type=float, default=400.0, help="daemons that are not up by then are left out"
    )
    parser.add_argument("--cells", help="comma-separated names; NAME* stands for all that begin so (default: all)")
    parser.add_argument("--runs", type=int, help="rounds of each cell at most, over the file's")
    parser.add_argument("--out", type=Path, default=Path("suite-results"), help="folder for results and logs")
    parser.add_argument("--report", type=Path, metavar="OUT", help="only report the results of this folder")
    return parser.parse_args(arguments)


async def measure(options: argparse.Namespace, suite: Suite, cells: list[Cell]) -> SuiteRun:
    """Start the daemons, run the cells and stop."""
    began = time.monotonic()
    out: Path = options.out

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f}] {text}", flush=True)

    def keep(row: Run | Round) -> None:
        append_line(out / ("chains.jsonl" if isinstance(row, Run) else "load.jsonl"), row)

    name = datetime.now(UTC).isoformat(timespec="seconds")
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="pp-") as private:
        names = wanted_daemons(suite, cells)
        start_s = min(options.start_seconds, options.seconds)
        async with serving(suite, options.suite, names, Path(private), out, start_s, say) as daemons:
            for daemon in daemons.values():
                _keep_engines(out / "engines.jsonl", name, daemon)
            run = SuiteRun(name, cells, suite.pace, daemons, keep, say)
            await run.run(options.seconds - STOP_S - (time.monotonic() - began))
            say("stops")
    say("ended")
    return run


class EngineLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon of the suite ran on, and what its engines were measured to take."""

    suite: str
    daemon: str
    configuration: dict[str, object]
    """The suite's changes."""
    groups: list[dict[str, object]]
    provenance: dict[str, object]


def _keep_engines(path: Path, suite: str, daemon: Daemon) -> None:
    groups = [
        {
            "group": worker.name,
            "devices": worker.devices,
            "limits": msgspec.to_builtins(worker.limits),
            "figures": msgspec.to_builtins(worker.figures),
        }
        for worker in daemon.status.workers
    ]
    append_line(
        path,
        EngineLine(
            suite=suite,
            daemon=daemon.name,
            configuration=daemon.origin["configuration"],
            groups=groups,
            provenance=provenance(),
        ),
    )


@command
def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    if options.report:
        load = options.report / "load.jsonl"
        print(
            render(
                read_runs([options.report / "chains.jsonl"]) if (options.report / "chains.jsonl").exists() else [],
                read_lines(load, Round) if load.exists() else [],
            )
        )
        return 0
    if options.suite is None:
        raise UsageError("there is no suite.", hint="Such as benchmarks/suite-cpu.toml.")
    suite = load_suite(options.suite)
    cells = chosen_cells(suite, options.cells)
    if options.runs:
        cells = [msgspec.structs.replace(cell, runs=options.runs) for cell in cells]
    options.out.mkdir(parents=True, exist_ok=True)
    run = asyncio.run(measure(options, suite, cells))
    print(render(run.runs, run.load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
