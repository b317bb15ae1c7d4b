"""Runs a command, and hands over what it prints line by line while it runs."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil


def run_watched(
    command: Sequence[str], limit_s: float, on_line: Callable[[str], None] = lambda _: None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without input.

    Args:
        command: and its arguments.
        limit_s: it is killed after so many seconds, with all that it has started.
        on_line: called with each line of its standard output, as soon as that is there.

    Returns:
        Its exit code and all that it printed.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    lines: list[str] = []
    errors: list[str] = []
    late = threading.Event()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None  # noqa: S101  asked for above
        assert process.stderr is not None  # noqa: S101
        complaints = process.stderr

        def give_up() -> None:
            late.set()
            for one in _family(process.pid):  # they hold the pipes, too
                with suppress(psutil.NoSuchProcess):
                    one.kill()

        reading = threading.Thread(target=lambda: errors.extend(complaints), daemon=True)
        limit = threading.Timer(limit_s, give_up)
        reading.start()
        limit.start()
        try:
            for line in process.stdout:
                lines.append(line)
                on_line(line)
            process.wait()
            reading.join()
        finally:
            limit.cancel()
            process.kill()
    if late.is_set():
        raise subprocess.TimeoutExpired(command, limit_s)
    return subprocess.CompletedProcess(command, process.returncode, "".join(lines), "".join(errors))


def _family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; none where it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
