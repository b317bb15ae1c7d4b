"""Bars for a daemon's start: fetching the model, and each engine's way to service. On a terminal only."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from pingpong_bus.messages import Progress, WorkerState, WorkerStatus
from pingpong_client.table import clean

_BAR_CELLS = 20
_SPARE_LINES = 4
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_AT_REST: frozenset[WorkerState] = frozenset({"ready", "failed", "draining", "stopping"})
"""What they do is no part of a start."""


class StartBars:
    """A line for the daemon, and one for each of its groups; whatever else is printed on the console stands above.

    Nothing is drawn between calls, so that one thread alone writes.
    """

    def __init__(self, console: Console, *, redirect_stdout: bool = False, redirect_stderr: bool = False) -> None:
        """Args:
        console: of a terminal.
        redirect_stdout, redirect_stderr: have what is printed there stand above the bars, too.
        """
        self._console = console
        self._bars = RichProgress(
            TextColumn("[bold]{task.fields[name]}", markup=True, table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            BarColumn(bar_width=_BAR_CELLS),
            _Amount(),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=redirect_stdout,
            redirect_stderr=redirect_stderr,
            expand=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._shown = False

    def update(self, workers: Sequence[WorkerStatus], progress: Progress | None = None) -> None:
        """Draw where the start stands now.

        Args:
            progress: of what the daemon itself does.
        """
        wanted: dict[str, tuple[Progress, bool]] = {}
        if progress is not None:
            wanted["daemon"] = progress, False
        # Those that are done give way where the screen is too small: rich would scroll it at the end.
        room = max(1, self._console.height - _SPARE_LINES)
        shown = sorted(workers, key=lambda worker: worker.state in _AT_REST)[:room]
        for worker in shown:
            at_rest = worker.state in _AT_REST
            stage = worker.stage or worker.state
            wanted[f"group {worker.name}"] = (
                Progress(stage=stage) if at_rest or worker.progress is None else worker.progress,
                at_rest,
            )
        if left := len(workers) - len(shown):
            wanted["..."] = Progress(stage=f"and {left} more groups"), True
        for gone in self._tasks.keys() - wanted.keys():
            self._bars.remove_task(self._tasks.pop(gone))
        for key, (one, at_rest) in wanted.items():
            self._set(key, one, at_rest=at_rest)
        if not self._shown:
            self._shown = True
            self._bars.start()
        self._bars.refresh()

    def close(self) -> None:
        """Take the bars away; the next `update` draws them anew."""
        if self._shown:
            self._shown = False
            self._bars.stop()
            for task in self._tasks.values():
                self._bars.remove_task(task)
            self._tasks.clear()

    def _set(self, key: str, progress: Progress, *, at_rest: bool) -> None:
        stage = clean(progress.stage, lines=False)
        name = clean(key.removeprefix("group "), lines=False).replace("[", r"\[")
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(stage, name=name, unit="", total=None)
        number = self._tasks[key]
        task = next(task for task in self._bars.tasks if task.id == number)
        task.total = 1.0 if at_rest else progress.total or None  # `update` keeps an old one where the new one is None
        self._bars.update(
            number,
            description=stage,
            completed=1.0 if at_rest else progress.done,
            unit="at rest" if at_rest else progress.unit,
        )
        if at_rest:
            self._bars.stop_task(number)
        else:
            task.finished_time = None  # a stage that is complete is not the end: time goes on


def amount(progress: Progress) -> str:
    """How much is done, such as "120 of 269 MB", "12 of 30 shards" or "40 %"; empty where nothing can be said."""
    done, total, unit = progress.done, progress.total, progress.unit
    if unit == "bytes":
        size, name = next(((size, name) for size, name in _BYTES if max(done, total) >= size), (1.0, "bytes"))
        decimals = 1 if name == "GB" else 0
        of = f" of {total / size:,.{decimals}f}" if total else ""
        return f"{done / size:,.{decimals}f}{of} {name}" if done or total else ""
    if not unit:
        return f"{100 * min(done / total, 1):.0f} %" if total else ""
    if total:
        return f"{done:,.0f} of {total:,.0f} {unit}"
    return f"{done:,.0f} {unit}" if done else ""


class _Amount(ProgressColumn):
    """What `amount` says."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True, justify="right"))

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        if unit == "at rest":
            return Text("")
        return Text(amount(Progress(stage="", done=task.completed, total=task.total or 0.0, unit=unit)))
