"""Run the fault matrix by hand: signals on every process in every phase.

    python benchmarks/fault_matrix.py                     all 96 cells
    python benchmarks/fault_matrix.py SIGKILL-worker      the cells whose names hold this
    python benchmarks/fault_matrix.py --real              the eight cells on real engines
    python benchmarks/fault_matrix.py --out FILE          keep each outcome as a line of JSON

The cells are those of `tests/faults`, which `make test` runs, too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from faults.cell import CELLS, EXTRA_CELLS
from faults.engine_story import EngineStory
from faults.matrix import run_matrix
from faults.outcome import Outcome, table
from faults.service import CellFault
from progress_bar import Count, counting


def real_engines(tell: Callable[[Outcome], None]) -> list[Outcome]:
    """The cells on real engines; those after one that goes wrong are not run."""
    with tempfile.TemporaryDirectory(prefix="pp-") as folder:
        story = EngineStory(Path(folder) / "s", tell)
        try:
            asyncio.run(story.run())
        except CellFault as error:
            print(error, file=sys.stderr)
    return story.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*", help="parts of cells' names; default: all cells")
    parser.add_argument("--real", action="store_true", help="the cells on real engines instead")
    parser.add_argument("--side-by-side", type=int, default=4, metavar="N", help="cells at a time (default: 4)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="run them so many times (default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append what it is made with, and each outcome")
    options = parser.parse_args()
    chosen = [
        cell for cell in [*CELLS, *EXTRA_CELLS] if not options.cells or any(part in cell.name for part in options.cells)
    ]

    def keep(row: dict[str, Any]) -> None:
        if options.out is not None:
            with options.out.open("ab") as out:
                out.write(msgspec.json.encode(row) + b"\n")

    keep({"provenance": provenance(), "engine": "vllm" if options.real else "simulated"})

    def tell(outcome: Outcome) -> None:
        print(f"{outcome.cell}: {outcome.brief} {outcome.wrong} ({outcome.seconds:g} s)", file=sys.stderr)
        for line in outcome.log:
            print(f"    {line}", file=sys.stderr)
        keep(msgspec.to_builtins(outcome))

    bad = 0
    for _ in range(options.rounds):
        if options.real:
            outcomes = real_engines(tell)
        else:
            with counting("cells", len(chosen)) as done:

                def count(outcome: Outcome, done: Count = done) -> None:
                    tell(outcome)
                    done()

                outcomes = asyncio.run(run_matrix(chosen, side_by_side=options.side_by_side, tell=count))
        print(table(outcomes))
        bad += sum(bool(outcome.wrong or outcome.missed) for outcome in outcomes)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
