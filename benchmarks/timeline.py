"""Draws two runs of a benchmark as a timeline, series above reading ahead: those nearest to the median.

    python benchmarks/timeline.py --runs cold.jsonl --out docs/images/timeline.png

Of two results, `pingpong-client timeline serial.json ahead.json -o timeline.png` draws the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from commands import command
from pingpong_bus.errors import DataError
from pingpong_bus.messages import ChainResult
from pingpong_client import plotting
from pingpong_client.timeline_picture import figure
from runs import RunMode, read_runs


def draw(serial: ChainResult, ahead: ChainResult, path: Path) -> None:
    """Write the picture, in the form of the path's suffix.

    Raises:
        UsageError: matplotlib is not installed.
    """
    titles = [f"In series: {_seconds(serial)}", f"Read ahead ({ahead.placement or 'ahead'}): {_seconds(ahead)}"]
    plotting.save(figure([serial, ahead], titles), path)


def typical(path: Path, mode: RunMode) -> ChainResult:
    """The run of a mode that is nearest to the median.

    Raises:
        DataError: the file cannot be read, or holds no such run.
    """
    runs = [run for run in read_runs([path]) if run.mode == mode and not run.warmup]
    if not runs:
        raise DataError(f"{path} has no {mode} run.")
    middle = statistics.median(run.e2e_ms for run in runs)
    return min(runs, key=lambda run: abs(run.e2e_ms - middle)).result


def _seconds(result: ChainResult) -> str:
    return f"{(result.e2e_ms or 0.0) / 1e3:.1f} s"


@command
def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Draw a serial run and one that read ahead as a timeline.")
    parser.add_argument("--runs", type=Path, required=True, help="a results file of chain.py")
    parser.add_argument("--ahead", choices=("ping-pong", "overlap", "auto"), default="ping-pong")
    parser.add_argument("--out", type=Path, default=Path("timeline.png"))
    options = parser.parse_args()
    draw(typical(options.runs, "serial"), typical(options.runs, options.ahead), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
