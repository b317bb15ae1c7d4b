"""How far a benchmark has come, for whoever looks on: bars on standard error, and nothing where that is no terminal.

What is printed meanwhile stands above them, as it was.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import StatusReply
from pingpong_client import AsyncClient
from pingpong_client.start_bars import StartBars

_POLL_S = 0.25
_BAR_CELLS = 24
_FRAMES_PER_S = 1
"""Few: what draws takes time from what is measured."""

T = TypeVar("T")


class Count(Protocol):
    """Counts what has been done."""

    def __call__(self, done: int = 1) -> None: ...


def watched() -> bool:
    """Whether somebody looks at standard error."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def tell_stage(event: dict[str, Any]) -> None:
    """A line for a stage of a daemon's start, by an event of its log; where bars show the start there is none."""
    if event.get("event") in ("model_stage", "worker_loading") and not watched():
        print(f"{event.get('worker') or event.get('model')}: {event['stage']}", file=sys.stderr)


def counted(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, under a bar that counts them.

    Args:
        what: they are, such as "rounds".
        total: how many; None: `items` knows its length.
    """
    known = total if total is not None else len(items)  # type: ignore[arg-type]
    with counting(what, known) as done:
        for item in items:
            yield item
            done()


def _nobody_looks(done: int = 1) -> None:
    del done


@contextmanager
def counting(what: str, total: int) -> Iterator[Count]:
    """A bar for so many of something; calls of what it yields count them. One inside another stands below it."""
    if not watched():
        yield _nobody_looks
        return
    bars = _Counts.shared()
    task = bars.add_task(what, total=total)
    try:
        yield lambda done=1: bars.advance(task, done)
    finally:
        _Counts.drop(bars, task)


class _Counts:
    """The one live display of a process: rich has no two."""

    _bars: Progress | None = None
    _users = 0

    @classmethod
    def shared(cls) -> Progress:
        if cls._bars is None:
            cls._bars = Progress(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=_BAR_CELLS),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left:"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                refresh_per_second=_FRAMES_PER_S,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            cls._bars.start()
            atexit.register(cls._bars.stop)  # an error on its way out keeps a loop's bar alive
        cls._users += 1
        return cls._bars

    @classmethod
    def drop(cls, bars: Progress, task: Any) -> None:
        bars.remove_task(task)
        cls._users -= 1
        if not cls._users:
            bars.stop()
            cls._bars = None


class _Starts:
    """Daemons that start, of which there may be several at once, under one display."""

    def __init__(self) -> None:
        self._bars: StartBars | None = None
        self._known: dict[Path, StatusReply] = {}

    def show(self, folder: Path, status: StatusReply) -> None:
        """Where one of them stands."""
        if self._bars is None:
            self._bars = StartBars(Console(stderr=True), redirect_stderr=True, redirect_stdout=sys.stdout.isatty())
        self._known[folder] = status
        several = len(self._known) > 1
        workers = [
            msgspec.structs.replace(worker, name=f"{at.parent.name}/{worker.name}") if several else worker
            for at, known in self._known.items()
            for worker in known.workers
        ]
        progress = next((known.progress for known in self._known.values() if known.progress is not None), None)
        self._bars.update(workers, progress)

    def over(self, folder: Path) -> None:
        """One of them has started, or ended."""
        self._known.pop(folder, None)
        if not self._known and self._bars is not None:
            self._bars.close()
            self._bars = None


_starts = _Starts()


@asynccontextmanager
async def start_shown(folder: Path) -> AsyncIterator[None]:
    """While the body waits for a daemon's start, bars show how far that has come.

    Args:
        folder: of its sockets, which need not be there yet.
    """
    if not watched():
        yield
        return
    showing = asyncio.create_task(_show(folder))
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.wait({showing})
        _starts.over(folder)


async def _show(folder: Path) -> None:
    while True:
        try:
            async with AsyncClient(folder) as client:
                while True:
                    _starts.show(folder, await client.status())
                    await asyncio.sleep(_POLL_S)
        except PingpongError:  # it does not listen yet, or no more
            await asyncio.sleep(_POLL_S)
