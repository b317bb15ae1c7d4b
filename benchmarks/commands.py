"""How a benchmark ends at the command line: its exit code, and one line for what it cannot do."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from pingpong_bus.errors import PingpongError

INTERRUPTED = 130
"""As shells have it: 128 + SIGINT."""


def command(main: Callable[[], int]) -> Callable[[], int]:
    """Make a benchmark's `main` return an exit code whatever happens to it: an error's own, after a line that names the
    script, and `INTERRUPTED` where it was interrupted."""
    script = Path(inspect.getfile(main)).name

    @functools.wraps(main)
    def run() -> int:
        try:
            return main()
        except PingpongError as error:
            print(f"{script}: {error}", file=sys.stderr)
            return error.exit_code
        except (KeyboardInterrupt, asyncio.CancelledError):
            return INTERRUPTED

    return run
