"""How often log lines may come: by event and key, as the catalogue says. What is held back is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import structlog

from pingpongd.log_catalogue import limit_of

_MOST_KEYS = 1024
"""Of a RateLimit: keys come from strangers, such as a user id, and may not fill memory."""


class RateLimit:
    """Lets an event through so many times a second for each key, and counts what it holds back.

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
        self._dropped = 0
        """Held back of keys that were forgotten."""

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
            _, _, lost = self._buckets.pop(next(iter(self._buckets)))
            self._dropped += lost
        return held if passes else None

    def settle(self) -> int:
        """How many were held back of keys that could come again by now and have not; each is told once."""
        now, told = self._clock(), self._dropped
        self._dropped = 0
        for key, (tokens, then, held) in self._buckets.items():
            if held and tokens + (now - then) * self._per_s >= 1:
                told += held
                self._buckets[key] = (tokens, then, 0)  # no key comes or goes: the loop may go on
        return told


class EventLimits:
    """The limits of all events, as a processor of structlog. May be used by any thread.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits: dict[str, RateLimit] = {}
        self._lock = threading.Lock()

    def __call__(self, _: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Pass a line on, with the number of those `suppressed` before it where there were any.

        Raises:
            structlog.DropEvent: it is held back.
        """
        with self._lock:
            held = self._ask(line)
        if held is None:
            raise structlog.DropEvent
        if held:
            line["suppressed"] = held
        return line

    def settle(self) -> dict[str, int]:
        """Lines that were held back and that no later line of the event has told of; each is told once."""
        with self._lock:
            found = {event: limit.settle() for event, limit in self._limits.items()}
        return {event: count for event, count in found.items() if count}

    def _ask(self, line: Mapping[str, Any]) -> int | None:
        event = str(line["event"])
        burst, per_s, key = limit_of(event)
        limit = self._limits.get(event)
        if limit is None:
            limit = self._limits[event] = RateLimit(per_s, self._clock, burst=burst)
        return limit.pass_through(*(str(line.get(field)) for field in key))
