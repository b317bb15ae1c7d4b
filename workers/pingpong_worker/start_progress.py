"""How far an engine's start has come, from its processes to the worker while that waits for them.

The engine's processes append lines of JSON to a file, each a `Progress`; several may, for a line is written at once.
The worker's main thread is blocked meanwhile: an engine's processes die with the thread that has started them, so that
it has to be this one. So another thread reads the file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from pingpong_bus.messages import Progress

START_PROGRESS: Final = "PINGPONG_START_PROGRESS"
"""Environment variable: the file's path. It is gone once the engine has started."""
_LOOK_S = 0.25
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Progress)


def tell(path: Path, progress: Progress) -> None:
    """Append a line; without effect where the file is not there (any more)."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(file, _encoder.encode(progress) + b"\n")
    except OSError:  # no room for it: an engine can start all the same
        return
    finally:
        os.close(file)


class StartProgress:
    """Reads the file for as long as this is entered.

    Args:
        path: where the file is made.
        on_progress: called in a thread of its own with what was told last, where that is news.
    """

    def __init__(self, path: Path, on_progress: Callable[[Progress], object]) -> None:
        self._path = path
        self._on_progress = on_progress
        self._last: Progress | None = None
        self._read = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="start progress", daemon=True)

    def __enter__(self) -> StartProgress:
        self._path.touch(mode=0o600)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return
        self._read += len(whole) + 1
        try:
            progress = _decoder.decode(whole.rpartition(b"\n")[2])
        except msgspec.MsgspecError:  # of a process that was killed in the middle of it
            return
        if progress != self._last:
            self._last = progress
            self._on_progress(progress)
