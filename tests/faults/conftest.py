"""Runs the chosen cells of the matrix side by side, once, and prints the table at the end."""

from __future__ import annotations

import asyncio
import os

import pytest

from faults.cell import Cell
from faults.matrix import run_matrix
from faults.outcome import Outcome, table

_OUTCOMES = pytest.StashKey[list[Outcome]]()
_ENGINE_OUTCOMES = pytest.StashKey[list[Outcome]]()
_SIDE_BY_SIDE = max(4, min(12, 3 * (os.cpu_count() or 1)))
"""Cells wait most of the time."""


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> dict[Cell, Outcome]:
    """What became of each cell whose test was chosen."""
    cells = [
        item.callspec.params["cell"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "outcomes" in item.fixturenames
    ]
    found = asyncio.run(run_matrix(cells, side_by_side=_SIDE_BY_SIDE, tell=lambda outcome: None))
    request.config.stash[_OUTCOMES] = found
    return dict(zip(cells, found, strict=True))


@pytest.fixture(scope="session")
def record_engine_outcomes(pytestconfig: pytest.Config) -> list[Outcome]:
    """Where the cells on real engines put what became of them, for the table."""
    return pytestconfig.stash.setdefault(_ENGINE_OUTCOMES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, key in (("simulated engine", _OUTCOMES), ("vLLM on CPUs", _ENGINE_OUTCOMES)):
        if found := config.stash.get(key, []):
            terminalreporter.section(f"fault matrix, {what}")
            terminalreporter.write_line(table(found))
