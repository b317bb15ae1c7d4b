"""Whether and when a worker that has ended is started again. Pure: ends in, a decision out.

The wait doubles from end to end, and is short again after a quiet time. A group whose workers end again and again is
given up, so that a fault that stays does not become a storm of starts; so is one whose start can never work.
"""

from __future__ import annotations

import msgspec

from pingpongd.config import RestartConfig


class End(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has ended that was not asked to."""

    at: float
    """In seconds."""
    why: str
    """As the second part of a sentence, without a full stop."""
    served: bool
    """Whether it had served."""
    permanent: bool = False
    """Another start cannot work either."""


class History(msgspec.Struct, frozen=True):
    """A group's past ends, as far as they matter."""

    ends: tuple[float, ...] = ()
    """When, in seconds; those of the last `within_s`."""
    failed_starts: int = 0
    """In a row; they count however long each has taken."""


class Again(msgspec.Struct, frozen=True):
    """Start another, after a while."""

    wait_s: float


class GiveUp(msgspec.Struct, frozen=True):
    """Start no other."""

    why: str
    """A clause for people."""
    permanent: bool


def ended(history: History, rules: RestartConfig, end: End) -> tuple[History, Again | GiveUp]:
    """Decide what follows from a worker's end."""
    recent = tuple(at for at in history.ends if end.at - at < rules.within_s)
    history = History((*recent, end.at), 0 if end.served else history.failed_starts + 1)
    if end.permanent:
        return history, GiveUp(end.why, permanent=True)
    if len(history.ends) >= rules.give_up_after:
        count, span = len(history.ends), f"within {rules.within_s:g} s"
    else:
        count, span = history.failed_starts, "in a row before it could serve"
    if count >= rules.give_up_after:
        times = "once" if count == 1 else f"{count} times"
        return history, GiveUp(f"crash loop: it ended {times} {span}, at last because {end.why}", permanent=False)
    number = max(len(history.ends), history.failed_starts)
    return history, Again(_wait_s(rules, number))


def _wait_s(rules: RestartConfig, number: int) -> float:
    """Before the start that follows the given end, counted from 1."""
    wait_s = rules.backoff_s
    for _ in range(number - 1):
        if wait_s >= rules.backoff_max_s:
            break
        wait_s *= 2
    return min(wait_s, rules.backoff_max_s)
