"""Eight cells of the fault matrix on real engines."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from faults.cell import Cell
from faults.engine_story import ENGINE_CELLS, EngineStory
from faults.outcome import Outcome
from faults.service import CellFault

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine_outcomes(record_engine_outcomes: list[Outcome]) -> dict[str, Outcome]:
    """What became of each; where one goes wrong those after it are missing."""
    with tempfile.TemporaryDirectory(prefix="pp-") as folder:
        story = EngineStory(Path(folder) / "s", record_engine_outcomes.append)
        try:
            asyncio.run(story.run())
        except CellFault as error:
            if not story.outcomes or not story.outcomes[-1].wrong:
                pytest.fail(str(error))
    return {outcome.cell: outcome for outcome in story.outcomes}


@pytest.mark.parametrize("cell", ENGINE_CELLS, ids=lambda cell: cell.name)
def test_fault_on_engines(cell: Cell, engine_outcomes: dict[str, Outcome]) -> None:
    assert cell.name in engine_outcomes, f"not run: {list(engine_outcomes)[-1]} went wrong"
    outcome = engine_outcomes[cell.name]
    assert not outcome.wrong, "\n".join([outcome.wrong, *outcome.log])
