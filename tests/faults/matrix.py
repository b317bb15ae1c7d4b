"""The whole matrix: cells side by side."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from faults.cell import Cell
from faults.outcome import Outcome
from faults.run import CellRun
from faults.scene import KEPT_KEY, OPTIONS, chain, config
from faults.service import Service
from pingpong_bus.messages import ChainResult
from pingpong_client import AsyncClient

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


@asynccontextmanager
async def running(service: Service, text: str) -> AsyncIterator[AsyncClient]:
    """The service, for the time of the context."""
    service.start(text)
    await service.ready()
    async with service.client() as client:
        yield client
    await service.stop()


async def prepare(folder: Path) -> tuple[ChainResult, Path]:
    """Run the chain undisturbed, and let a daemon die that has accepted it.

    Returns:
        The result in series, and a state directory that is called after the chain accepted.
    """
    service = Service(folder / "prepare")
    try:
        async with running(service, config("decoding")) as client:
            serial = msgspec.structs.replace(OPTIONS, mode="serial")
            reference = await client.run(chain(), options=serial)
        service.start(config("decoding"))
        await service.ready()
        async with service.client() as client:
            accepted = await client.submit(chain(), options=OPTIONS, key=KEPT_KEY)
            os.kill(service.pid, signal.SIGKILL)
            await service.ended()
    finally:
        service.kill()
    kept = folder / accepted
    shutil.copytree(service.state_dir, kept)
    return reference, kept
