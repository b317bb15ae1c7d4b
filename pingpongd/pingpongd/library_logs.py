"""What libraries say by Python's own logging and warnings, such as asyncio of a task that failed: lines of our log."""

from __future__ import annotations

import logging

import structlog

_log = structlog.get_logger()


class _LibraryLogs(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = record.getMessage()
        except (TypeError, ValueError):  # what is to be filled in does not fit
            line = str(record.msg)
        say = _log.error if record.levelno >= logging.ERROR else _log.warning
        try:
            say("library_said", library=record.name, line=line, exc_info=record.exc_info)
        except OSError:  # nobody reads the log any more; who logs does not expect to fail
            self.handleError(record)


def take_library_logs() -> None:
    """Write warnings and errors of libraries to our log from now on; otherwise they go to standard error as text."""
    logging.basicConfig(level=logging.WARNING, handlers=[_LibraryLogs()], force=True)
    logging.captureWarnings(capture=True)
