"""What the catalogue of log events says of one: level, fields, and how often it may come. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

Level = Literal["debug", "info", "warning", "error"]


class Limit(NamedTuple):
    """How often an event may be written, for each value of its key."""

    burst: int
    """Lines that may come at once after a pause."""
    per_s: float
    """Lines a second in the long run."""
    key: tuple[str, ...] = ()
    """Fields whose values are limited apart; without, all lines of the event together."""


_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Event(NamedTuple):
    """One event."""

    levels: tuple[Level, ...]
    says: str
    """When it is written, a sentence without a full stop."""
    fields: tuple[str, ...]
    """In the order in which they are written."""
    means: Mapping[str, str] = _NOTHING
    """Fields whose meaning here is narrower than in `FIELDS`."""
    limit: Limit = Limit(200, 100.0)
    """As many as a busy daemon has reason for."""
