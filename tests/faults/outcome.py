"""What became of a cell, and the table of them all."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from faults.cell import EXTRA_CELLS, PHASES, SIGNALS, TARGETS, Cell


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a cell."""

    cell: str
    wrong: str = ""
    """What went wrong; empty where nothing did."""
    missed: bool = False
    """The signal came too late for its phase: the cell has to be run again."""
    stop_s: float | None = None
    """Of SIGSTOP, until SIGCONT."""
    exit_codes: list[int] = []
    """Of the daemon's lives."""
    resumed: int = 0
    """Workers that agents have outlived."""
    attempts: int = 1
    """The highest of any agent."""
    clean_s: float = 0.0
    """From the daemon's last unasked end until nothing of it was left."""
    seconds: float = 0.0
    log: list[str] = []
    """The daemon's last words, where something went wrong."""

    @property
    def brief(self) -> str:
        """For the table."""
        if self.missed:
            return "missed"
        if self.wrong:
            return "WRONG"
        marks = [f"r{self.resumed}"] * bool(self.resumed) + [f"a{self.attempts}"] * (self.attempts > 1)
        return " ".join(["ok", *marks])


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
                row.append(f"{mark} ({outcome.stop_s:g} s)" if outcome is not None and outcome.stop_s else mark)
            rows.append(row)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    lines += [f"{cell.name}: {briefs[cell.name].brief}" for cell in EXTRA_CELLS if cell.name in briefs]
    lines.append("ok: every accepted chain finished with the right tokens, each was read once, nothing was left behind")
    lines.append("rN: agents went on N times after their worker was lost; aN: an agent began anew, for the Nth time")
    return "\n".join(lines)
