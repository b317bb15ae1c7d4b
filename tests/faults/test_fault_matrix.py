"""Every signal on every process in every phase: accepted chains finish, tokens come once, nothing stays."""

from __future__ import annotations

import pytest

from faults.cell import CELLS, EXTRA_CELLS, Cell
from faults.outcome import Outcome


@pytest.mark.parametrize("cell", [*CELLS, *EXTRA_CELLS], ids=lambda cell: cell.name)
def test_fault(cell: Cell, outcomes: dict[Cell, Outcome]) -> None:
    outcome = outcomes[cell]
    assert not outcome.missed, "the signal came too late for the phase, each time"
    assert not outcome.wrong, "\n".join([outcome.wrong, *outcome.log])
