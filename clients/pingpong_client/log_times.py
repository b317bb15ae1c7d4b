"""Times of the log: as people give them, and as reports show them. Pure; all are UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pingpong_client.table import duration

_BEFORE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|min|m|h|d|w)(?: ago)?")
_UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_time(text: str, now: float) -> float:
    """A time as an argument: ISO 8601 (UTC where it does not say), "14:30" of today, "6h" before now, or "now".

    Returns:
        Seconds since 1970.

    Raises:
        ValueError: it is none of these.
    """
    text = text.strip()
    if text == "now":
        return now
    if found := _BEFORE.fullmatch(text):
        return now - float(found[1]) * _UNITS[found[2]]
    if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
        text = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d}T{text.zfill(len(text) + (text.index(':') == 1))}"
    found_time = datetime.fromisoformat(text)
    return (found_time if found_time.tzinfo is not None else found_time.replace(tzinfo=UTC)).timestamp()


def iso(at: float) -> str:
    """2026-11-30T12:00:05Z"""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def date_and_time(at: float) -> str:
    """2026-11-30 12:00:05"""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def time_of_day(at: float) -> str:
    """12:00:05"""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}"


def long(seconds: float) -> str:
    """0.4 s, 12 s, 3 min 05 s, 2 h 07 min, or 3 d 04 h: rounded to what is shown."""
    return f"{seconds:.1f} s" if seconds < 9.95 else duration(round(seconds))
