"""The whole matrix: cells side by side, and the table of what became of them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from faults.cell import PHASES, SIGNALS, TARGETS, Cell
from faults.run import CellRun, Outcome, prepare
from faults.service import Service

_TRIES = 3
"""A cell whose signal came too late for its phase says nothing, and is run again."""


async def run_matrix(cells: Sequence[Cell], *, side_by_side: int, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Run cells, so many at a time; returns their outcomes in the cells' order.

    Cells that follow one another in a lane share their folders: what one leaves behind, the next one's start meets.
    """
    found: dict[Cell, Outcome] = {}
    # Cells of one phase take about the same time; dealt out like this, lanes mix them.
    waiting = list(reversed(cells))
    with tempfile.TemporaryDirectory(prefix="pp-faults-") as name:  # short: paths of sockets have at most 107 bytes
        folder = Path(name)
        reference, kept = await prepare(folder)

        async def lane(number: int) -> None:
            while waiting:
                cell = waiting.pop()
                for attempt in range(_TRIES):
                    service = Service(folder / f"{number}")
                    service.log_path.unlink(missing_ok=True)
                    outcome = await CellRun(cell, service, reference, kept).run()
                    if not outcome.missed or attempt + 1 == _TRIES:
                        break
                found[cell] = outcome
                tell(outcome)

        async with asyncio.TaskGroup() as lanes:
            for number in range(side_by_side):
                lanes.create_task(lane(number), name=f"lane {number}")
    return [found[cell] for cell in cells]


def table(outcomes: Iterable[Outcome]) -> str:
    """The matrix as text; cells that were not run are empty."""
    briefs = {outcome.cell: outcome for outcome in outcomes}
    rows = [["", "", *PHASES]]
    for signal in SIGNALS:
        for target in TARGETS:
            row = [signal if target == TARGETS[0] else "", target]
            for phase in PHASES:
                cell = Cell(signal, target, phase)
                outcome = briefs.get(cell.name)
                mark = "" if outcome is None else outcome.brief
                row.append(f"{mark} ({cell.stop_s:g} s)" if outcome is not None and cell.stop_s else mark)
            rows.append(row)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    lines.append("ok: every accepted chain finished with the right tokens, each was read once, nothing was left behind")
    lines.append("rN: agents went on N times after their worker was lost; aN: an agent began anew, for the Nth time")
    return "\n".join(lines)
