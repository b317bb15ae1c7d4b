"""Logging: one JSON object a line on standard error, by structlog; on a terminal, lines for people.

Where standard error is the journal's, each line begins with its priority (sd-daemon(3)), which the journal takes off:
`journalctl -p warning` then shows warnings and worse, and what is stored is the JSON alone.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal, TextIO, cast

import structlog

from pingpongd.log_terminal import LogTerminal, log_terminal

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_level = logging.INFO
_as_json = False
_terminal: LogTerminal | None = None
_MOST_KEYS = 1024
"""Of a RateLimit: keys come from strangers, such as a user id, and may not fill memory."""


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
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
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


class RateLimit:
    """Lets an event through so many times a second for each key, and counts what it holds back.

    ::

        held = limit.pass_through("bad_frame", peer)
        if held is not None:
            _log.warning("bad_frame", peer=peer, suppressed=held)

    Args:
        per_s: events a second and key, in the long run; up to `burst` come at once.
        clock: seconds that only grow, such as `time.monotonic`.
        burst: events that a key has saved up after a pause.
    """

    def __init__(self, per_s: float, clock: Callable[[], float], *, burst: int = 5) -> None:
        self._per_s = per_s
        self._clock = clock
        self._burst = burst
        self._buckets: dict[tuple[object, ...], tuple[float, float, int]] = {}
        """By key, the one that was used last at the end: tokens left, when that was, and events held back since."""

    def pass_through(self, *key: object) -> int | None:
        """Ask for one event.

        Returns:
            How many of this key were held back since the last that passed; None: hold this one back.
        """
        now = self._clock()
        tokens, then, held = self._buckets.pop(key, (float(self._burst), now, 0))
        tokens = min(self._burst, tokens + (now - then) * self._per_s)
        passes = tokens >= 1
        self._buckets[key] = (tokens - 1, now, 0) if passes else (tokens, now, held + 1)
        if len(self._buckets) > _MOST_KEYS:
            del self._buckets[next(iter(self._buckets))]
        return held if passes else None
