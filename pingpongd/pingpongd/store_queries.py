"""What the chain store asks of its database, and the changes that it makes: SQL and nothing else.

Functions that take a connection run in the store's thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from pingpongd.config import StoreConfig
from pingpongd.store_body import pack, read_head
from pingpongd.store_schema import transaction
from pingpongd.store_writer import Change

_DAY_S = 86400.0
_MIB = 1024 * 1024
_CHAINS_AT_ONCE = 256
"""Erased in one transaction, and about so many bytes: erasing writes zeros, and other work has to come between."""
_BYTES_AT_ONCE = 16 * _MIB
_PAGES_AT_ONCE = 8192
"""Given back to the file system in the same transaction."""

# --------------------------------------------------------------------------------------------------------- changes


def added(number: int, chain_id: str, key: bytes | None, submitted_at: float, job: bytes) -> Change:
    """A chain was accepted."""
    return Change(
        (
            (
                "INSERT INTO chain (number, id, key, submitted_at) VALUES (?, ?, ?, ?)",
                (number, chain_id, key, submitted_at),
            ),
            ("INSERT INTO job (number, body) VALUES (?, ?)", (number, pack(job))),
        ),
        lasts=False,
    )


def dropped(number: int) -> Change:
    """A chain shall be as if it never had been."""
    return Change((("DELETE FROM chain WHERE number = ?", (number,)),), lasts=True)


def raised(number: int, attempt: int) -> Change:
    """An agent has begun anew, in this attempt."""
    return Change((("UPDATE chain SET attempt = max(attempt, ?) WHERE number = ?", (attempt, number)),), lasts=True)


def started(number: int) -> Change:
    """Some agent may run from now on."""
    return Change((("UPDATE chain SET started = 1 WHERE number = ?", (number,)),), lasts=True)


def agent_finished(number: int, agent: int, outcome: bytes) -> Change:
    """An agent has finished."""
    return Change(
        (("INSERT OR REPLACE INTO outcome (number, agent, body) VALUES (?, ?, ?)", (number, agent, pack(outcome))),),
        lasts=True,
    )


def ended(number: int, ended_at: float, summary: bytes, result: bytes) -> Change:
    """A chain has ended: the result takes the place of the job and the outcomes."""
    body = pack(result, head=summary)
    return Change(
        (
            ("INSERT INTO ended (number, ended_at, bytes) VALUES (?, ?, ?)", (number, ended_at, len(body))),
            ("INSERT INTO result (number, body) VALUES (?, ?)", (number, body)),
            ("DELETE FROM outcome WHERE number = ?", (number,)),
            ("DELETE FROM job WHERE number = ?", (number,)),
        ),
        lasts=True,
    )


def fetched(chain_id: str) -> Change:
    """Somebody has the result."""
    return Change(
        (("UPDATE ended SET fetched = 1 WHERE number = (SELECT number FROM chain WHERE id = ?)", (chain_id,)),),
        lasts=True,
    )


# --------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Contents:
    """What is kept, without its bodies."""

    live: dict[str, tuple[int, float]]
    """Number and time of submission, by id."""
    ended: list[str]
    """Ids."""
    keys: dict[bytes, str]
    """Ids by key, as the database has it."""
    next_number: int
    """One more than the highest number that ever was."""


def contents(connection: sqlite3.Connection) -> Contents:
    """Everything that is kept, without its bodies."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'chain'").fetchone()
    found = Contents({}, [], {}, 1 if row is None else row[0] + 1)
    rows = connection.execute(
        "SELECT id, number, submitted_at, key, EXISTS (SELECT 1 FROM job WHERE job.number = chain.number) FROM chain"
    )
    for chain_id, number, submitted_at, key, is_live in rows:
        if is_live:
            found.live[chain_id] = (number, submitted_at)
        else:
            found.ended.append(chain_id)
        if key is not None:
            found.keys[key] = chain_id
    return found


def begin_attempt(connection: sqlite3.Connection) -> None:
    """The daemon has been started: what has not finished is begun anew."""
    with transaction(connection):
        connection.execute("UPDATE chain SET attempt = attempt + 1 WHERE number IN (SELECT number FROM job)")


LiveRow = tuple[str, bytes, bool, int, dict[int, bytes]]
"""Id, job, started, attempt, outcomes by index; bodies as they are stored."""


def live(connection: sqlite3.Connection) -> list[LiveRow]:
    """The live chains in the order of their numbers."""
    outcomes: dict[int, dict[int, bytes]] = {}
    for number, agent, body in connection.execute("SELECT number, agent, body FROM outcome"):
        outcomes.setdefault(number, {})[agent] = body
    rows = connection.execute(
        "SELECT number, id, body, started, attempt FROM chain JOIN job USING (number) ORDER BY number"
    )
    return [
        (chain_id, body, bool(has_started), attempt, outcomes.get(number, {}))
        for number, chain_id, body, has_started, attempt in rows
    ]


def result(chain_id: str, connection: sqlite3.Connection) -> tuple[bytes, bool] | None:
    """The body of an ended chain's result, and whether it has been fetched."""
    row = connection.execute(
        "SELECT body, fetched FROM chain JOIN ended USING (number) JOIN result USING (number) WHERE id = ?", (chain_id,)
    ).fetchone()
    return None if row is None else (row[0], bool(row[1]))


def latest(limit: int, connection: sqlite3.Connection) -> list[bytes]:
    """The summaries of the chains that ended last, the very last one last."""
    rows = connection.execute("SELECT number FROM ended ORDER BY place DESC LIMIT ?", (limit,)).fetchall()
    return [read_head(connection, "result", number) for (number,) in reversed(rows)]


# --------------------------------------------------------------------------------------------------------- erasing

Erased = list[tuple[str, bytes | None]]
"""Ids and keys."""


def forget(chain_id: str, connection: sqlite3.Connection) -> Erased:
    """Erase an ended chain."""
    row = connection.execute("SELECT number FROM ended JOIN chain USING (number) WHERE id = ?", (chain_id,)).fetchone()
    return [] if row is None else _erase(connection, [row[0]])


def expire(settings: StoreConfig, now: float, connection: sqlite3.Connection) -> Erased:
    """Erase some of the chains whose time is over, or that are too many; none is left when it returns none."""
    numbers = _outdated(settings, now, connection) or _excess(settings.keep_mib * _MIB, connection)
    return _erase(connection, numbers) if numbers else []


def _outdated(settings: StoreConfig, now: float, connection: sqlite3.Connection) -> list[int]:
    # Where the clock was set back an age is negative, and no limit is below 0.
    rows = connection.execute(
        "SELECT number, bytes FROM ended WHERE ? - ended_at > CASE WHEN fetched THEN ? ELSE ? END ORDER BY place",
        (now, settings.keep_days * _DAY_S, settings.keep_unfetched_days * _DAY_S),
    )
    return _first(rows, _BYTES_AT_ONCE)


def _excess(limit: int, connection: sqlite3.Connection) -> list[int]:
    (total,) = connection.execute("SELECT coalesce(sum(bytes), 0) FROM ended").fetchone()
    if total <= limit:
        return []
    rows = connection.execute("SELECT number, bytes FROM ended ORDER BY fetched DESC, place")
    return _first(rows, min(total - limit, _BYTES_AT_ONCE))


def _first(rows: Iterable[tuple[int, int]], enough: int) -> list[int]:
    """Numbers until their bytes are enough."""
    numbers: list[int] = []
    for number, size in rows:
        numbers.append(number)
        enough -= size
        if enough <= 0 or len(numbers) == _CHAINS_AT_ONCE:
            break
    return numbers


def _erase(connection: sqlite3.Connection, numbers: list[int]) -> Erased:
    erased: Erased = []
    with transaction(connection):
        for number in numbers:
            erased += connection.execute("DELETE FROM chain WHERE number = ? RETURNING id, key", (number,)).fetchall()
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        for _ in range(min(free, _PAGES_AT_ONCE)):
            connection.execute("PRAGMA incremental_vacuum(1)")  # one step, and so one page, is all that execute makes
    return erased
