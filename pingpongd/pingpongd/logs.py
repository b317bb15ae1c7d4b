"""Logging: one JSON object a line on standard error, by structlog; on a terminal, lines for people."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def set_up_logging(level: str, form: Literal["auto", "json", "console"] = "auto") -> None:
    """Configure structlog for the process.

    Args:
        level: the least severe level to print, such as "info".
        form: "json", "console", or "auto": console where standard error is a terminal.
    """
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    processors.append(structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer())
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
