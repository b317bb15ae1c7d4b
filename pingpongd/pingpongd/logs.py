"""Logging: one JSON object a line on standard error, by structlog; on a terminal, lines for people.

`log_catalogue.py` has all events, with their limits; `redaction.py` says what may not stand in a line.

Where standard error is the journal's, each line begins with its priority (sd-daemon(3)), which the journal takes off:
`journalctl -p warning` then shows warnings and worse, and what is stored is the JSON alone.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal, TextIO, cast

import msgspec
import structlog

from pingpong_bus.log_records import Record, event_name
from pingpongd.library_logs import take_library_logs
from pingpongd.log_catalogue import EVENTS
from pingpongd.log_limits import EventLimits
from pingpongd.log_terminal import LogTerminal, log_terminal
from pingpongd.redaction import Redactor

_log = structlog.get_logger()

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_OURS = frozenset({"event", "level", "timestamp"})
_level = logging.INFO
_as_json = False
_terminal: LogTerminal | None = None
_limits = EventLimits()
_redactor = Redactor()


def set_up_logging(level: str, form: Literal["auto", "json", "console"] = "auto") -> None:
    """Configure structlog for the process.

    Args:
        level: the least severe level to print, such as "info".
        form: "json", "console", or "auto": console where standard error is a terminal.
    """
    global _as_json, _terminal
    set_level(level)
    _as_json = as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        _drop_below_level,
        structlog.contextvars.merge_contextvars,
        _limits,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _redact,
    ]
    render: structlog.typing.Processor = structlog.dev.ConsoleRenderer()
    if as_json:
        render = structlog.processors.JSONRenderer()
        if to_journal(sys.stderr, os.environ):
            render = _with_priority(render)
    _terminal = None if as_json else log_terminal(sys.stderr)
    structlog.configure(
        processors=[*processors, render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.PrintLoggerFactory(file=cast("TextIO", _terminal or sys.stderr)),
        cache_logger_on_first_use=True,
    )
    take_library_logs()


def logs_json() -> bool:
    """Whether standard error is a log of JSON lines, in which nothing else should stand."""
    return _as_json


def shown_on() -> LogTerminal | None:
    """The terminal that a person reads the log on; None where nobody does."""
    return _terminal


def set_level(level: str) -> None:
    """Change the least severe level that is printed, of loggers that are in use, too."""
    global _level
    _level = logging.getLevelNamesMapping()[level.upper()]


def set_redactor(redactor: Redactor) -> None:
    """Change what may not stand in the log, for loggers that are in use, too."""
    global _redactor
    _redactor = redactor


def redacted(text: str) -> str:
    """A text as it may stand in a log."""
    return _redactor.text(text)


def log_record(record: Record) -> None:
    """Write a line that reports are made from, at its level."""
    event = event_name(record)
    getattr(_log, EVENTS[event].levels[0])(event, **msgspec.structs.asdict(record))


def tell_suppressed() -> None:
    """Write how many lines were held back that no later line of their event has told of; to be called now and then."""
    for event, count in _limits.settle().items():
        _log.info("lines_suppressed", of=event, count=count)


def _redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: value if name in _OURS else _redactor.value(value) for name, value in event.items()}


def _drop_below_level(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Not structlog's own filter, which is part of a logger's class: loggers in use keep theirs."""
    if logging.getLevelNamesMapping()[event["level"].upper()] < _level:
        raise structlog.DropEvent
    return event


def to_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether a stream is the journal's: $JOURNAL_STREAM has its device and inode; systemd.exec(5).

    The variable alone is not enough: whoever redirects a service's output hands it on all the same.
    """
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # no descriptor, or a closed one
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def _with_priority(render: structlog.typing.Processor) -> structlog.typing.Processor:
    def prefixed(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        priority = _PRIORITIES.get(str(event.get("level")), 6)
        return f"<{priority}>{render(logger, name, event)!s}"

    return prefixed
