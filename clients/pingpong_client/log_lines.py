"""Lines of the daemon's log as they come from files, journals and container engines, and the records in them. Pure."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Final, cast, get_args

import msgspec

from pingpong_bus.log_records import EVENTS, Record
from pingpong_bus.messages import JitterCause

LONGEST: Final = 1 << 20
"""Bytes: a longer line is not the daemon's."""
_CAUSES: Final = frozenset(get_args(JitterCause))


class LogLine(msgspec.Struct, frozen=True):
    """One line of the daemon's log."""

    at: float
    """When it was written: seconds since 1970, UTC."""
    event: str
    data: bytes
    """The JSON object."""


class _Head(msgspec.Struct):
    """What all lines have: the daemon's own, systemd's journal's (`-o json`) and Docker's `json-file`'s."""

    event: str | None = None
    timestamp: datetime | None = None
    message: str | list[int] | None = msgspec.field(default=None, name="MESSAGE")
    """Bytes where it is not UTF-8, or has control characters; systemd.journal-fields(7)."""
    log: str | None = None


_HEAD: Final = msgspec.json.Decoder(_Head)
_RECORDS: Final = {name: msgspec.json.Decoder(kind) for name, kind in EVENTS.items()}


class Lines:
    """Cuts a stream into lines; one that is too long is dropped, and counted as one."""

    def __init__(self) -> None:
        self._rest = b""
        self._overlong = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes; an empty one stands for one that was too long."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if self._overlong and whole:
            whole[0], self._overlong = b"", False
        if len(self._rest) > LONGEST:
            self._rest, self._overlong = b"", True
        return whole

    def end(self) -> list[bytes]:
        """What stands behind the last line break: a line that was cut, or one without a break."""
        rest, self._rest = self._rest, b""
        overlong, self._overlong = self._overlong, False
        return [b""] if overlong else [rest] if rest else []


def parse_line(line: bytes) -> LogLine | None:
    """The daemon's line in a line, whatever stands around it; None where there is none."""
    # In front there may be a priority ("<6>"), journalctl's "short" form, or a container engine's time and stream.
    start = line.find(b"{")
    if start < 0:
        return None
    data = line[start:]
    for _ in range(3):  # Docker within a journal is the deepest that there is
        try:
            head = _HEAD.decode(data)
        except msgspec.DecodeError:  # of another program, or cut
            return None
        if head.event is not None and head.timestamp is not None and head.timestamp.tzinfo is not None:
            return LogLine(head.timestamp.timestamp(), head.event, data)
        inner = head.message if head.message is not None else head.log
        if inner is None:
            return None
        data = inner.encode() if isinstance(inner, str) else bytes(one & 255 for one in inner)
        start = data.find(b"{")
        if start < 0:
            return None
        data = data[start:]
    return None


def parse_record(line: LogLine) -> Record | None:
    """The record in a line that reports are made from; None for other lines, and for what makes no sense."""
    decoder = _RECORDS.get(line.event)
    if decoder is None:
        return None
    try:
        return cast("Record", decoder.decode(line.data))
    except msgspec.ValidationError:
        return _newer(line)
    except msgspec.DecodeError:
        return None


def _newer(line: LogLine) -> Record | None:
    """A record of a newer daemon, which may know causes that this client does not."""
    fields: dict[str, Any] = msgspec.json.decode(line.data)
    for name in ("cause", "was"):
        if line.event != "group_health" or name == "cause":
            value = fields.get(name)
            if isinstance(value, str) and value not in _CAUSES and re.fullmatch(r"\w{1,64}", value):
                fields[name] = "unknown"
    try:
        return cast("Record", msgspec.convert(fields, EVENTS[line.event]))
    except msgspec.ValidationError:
        return None
