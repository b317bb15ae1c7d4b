"""Standard error as a person looks at it: the log's lines, and under them the bars of a start that goes on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from pingpong_bus.messages import Progress, StatusReply, WorkerState, WorkerStatus

_FRAME_S = 0.2
_IDLE_S = 1.0
_LOADING: frozenset[WorkerState] = frozenset({"starting", "loading"})


class LogTerminal:
    """A stream for the log that keeps bars below its lines; lines are never broken or cut."""

    def __init__(self, stream: TextIO) -> None:
        """Args:
        stream: a terminal.
        """
        from rich.console import Console

        from pingpong_client.start_bars import StartBars

        self._stream = stream
        self._console = Console(file=stream)
        self._bars = StartBars(self._console)
        self._drawn = False
        self._rest = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write; what is no whole line yet waits for its end while there are bars."""
        with self._lock:
            if not self._drawn:
                return self._stream.write(text)
            *lines, self._rest = (self._rest + text).split("\n")
            if lines:
                self._print("\n".join(lines))
            return len(text)

    def flush(self) -> None:
        """Flush the terminal."""
        self._stream.flush()

    def isatty(self) -> bool:
        """It is one."""
        return True

    def draw(self, workers: Sequence[WorkerStatus], progress: Progress | None) -> None:
        """Draw the bars anew: see `StartBars.update`."""
        with self._lock:
            self._drawn = True
            self._bars.update(workers, progress)

    def clear(self) -> None:
        """Take the bars away."""
        with self._lock:
            self._bars.close()
            rest, self._rest, self._drawn = self._rest, "", False
            self._stream.write(rest)
            self._stream.flush()

    def _print(self, lines: str) -> None:
        from rich.text import Text

        # Soft wrapping leaves the wrapping to the terminal: a line that is copied from it stays one line.
        self._console.print(Text.from_ansi(lines), soft_wrap=True)


def log_terminal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> LogTerminal | None:
    """A terminal that bars can be drawn on, or None where the stream is none."""
    if not stream.isatty() or environ.get("TERM", "dumb") == "dumb":
        return None
    return LogTerminal(stream)


async def show_start(terminal: LogTerminal, status: Callable[[], StatusReply]) -> None:
    """Draw bars whenever the daemon starts, or one of its groups does, until cancelled."""
    try:
        while True:
            now = status()
            loading = [worker for worker in now.workers if worker.state in _LOADING]
            if now.progress is not None or loading:
                shown = now.workers if now.state == "starting" else loading
                terminal.draw(shown, now.progress)
                await asyncio.sleep(_FRAME_S)
            else:
                terminal.clear()
                await asyncio.sleep(_IDLE_S if now.state != "starting" else _FRAME_S)
    finally:
        terminal.clear()
