"""The chain store's database: its schema and migrations, and how it is checked, opened and set up.

::

    chain     a row for every chain that is kept, by number; gone with it: all of the following
    job       what was accepted; only of a live chain
    outcome   finished agents; only of a live chain
    ended     the ended chains, in the order in which they ended
    result    of an ended chain: its result, and its EndedChain as the body's head

Bodies are msgpack of the structs in `stored.py`, packed by `store_body.py`; only in them is there text of users. Of
a submission's key there is a digest. Fields may be added to those with defaults; any other change of them
needs a migration, like a change of the tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from pingpong_bus.errors import ConfigError, StoreError
from pingpongd.store_body import PAGE_BYTES

Migration = Callable[[sqlite3.Connection], None]

_BUSY_MS = 2000
_WAL_BYTES = 16 * 1024 * 1024
"""The log is cut back to this after a transaction that was larger."""


def _first_schema(connection: sqlite3.Connection) -> None:
    for statement in (
        """CREATE TABLE chain (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            key BLOB UNIQUE,
            submitted_at REAL NOT NULL,
            started INTEGER NOT NULL DEFAULT 0,
            attempt INTEGER NOT NULL DEFAULT 1
        ) STRICT""",
        """CREATE TABLE job (
            number INTEGER PRIMARY KEY REFERENCES chain ON DELETE CASCADE,
            body BLOB NOT NULL
        ) STRICT""",
        """CREATE TABLE outcome (
            number INTEGER NOT NULL REFERENCES chain ON DELETE CASCADE,
            agent INTEGER NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (number, agent)
        ) STRICT""",
        """CREATE TABLE ended (
            place INTEGER PRIMARY KEY AUTOINCREMENT,
            number INTEGER NOT NULL UNIQUE REFERENCES chain ON DELETE CASCADE,
            ended_at REAL NOT NULL,
            fetched INTEGER NOT NULL DEFAULT 0,
            bytes INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX ended_in_order ON ended (fetched DESC, place)",
        """CREATE TABLE result (
            number INTEGER PRIMARY KEY REFERENCES chain ON DELETE CASCADE,
            body BLOB NOT NULL
        ) STRICT""",
        "CREATE TABLE upkeep (failed_writes INTEGER NOT NULL) STRICT",
        "INSERT INTO upkeep VALUES (0)",
    ):
        connection.execute(statement)


MIGRATIONS: tuple[Migration, ...] = (_first_schema,)
"""The one at index n leads from version n to n + 1; version 0 is an empty file."""


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit what is done inside, or, where an exception leaves it, nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk may have rolled it back already
            connection.execute("ROLLBACK")
        raise


def open_database(path: Path, migrations: Sequence[Migration] = MIGRATIONS) -> sqlite3.Connection:
    """Check a database, open it, and bring its schema up to date.

    The connection locks the file for itself for as long as it lives: so nobody's reading keeps erased text in the
    log, and no memory is shared through a -shm file. It may be used from any thread, by one at a time.

    Raises:
        ConfigError: the file is damaged, foreign, or of a newer schema; it was not changed then.
        StoreError: it cannot be read or written for now.
    """
    try:
        check_database(path, len(migrations))
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise opening_error(error, path) from None
    try:
        _set_up(connection)
        for version in range(_version(connection), len(migrations)):
            with transaction(connection):
                migrations[version](connection)
                connection.execute(f"PRAGMA user_version = {version + 1}")
    except sqlite3.Error as error:
        connection.close()
        raise opening_error(error, path) from None
    return connection


def store_error(error: sqlite3.Error, path: Path, *, then: str) -> StoreError:
    """What a failed read or write of the open store means, and the way out.

    Args:
        error: SQLite's.
        path: of the database.
        then: how the hint goes on, such as " and submit again".
    """
    name = str(getattr(error, "sqlite_errorname", ""))
    if name == "SQLITE_FULL":
        return StoreError(f"{path} cannot be written: the disk is full.", hint=f"Free some space{then}.")
    return StoreError(
        f"{path} cannot be read or written: {error}{f' ({name})' if name else ''}.",
        hint=f"Look at the disk and the file's permissions{then}.",
    )


def opening_error(error: sqlite3.Error, path: Path) -> ConfigError | StoreError:
    """The same at the daemon's start."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damaged(path, str(error))
    if code == sqlite3.SQLITE_BUSY:
        return StoreError(
            f"{path} is in use by another program.", hint="Close what has it open, such as a sqlite3 shell."
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return ConfigError(
            f"{path} cannot be opened for writing: {error}.",
            field="state_dir",
            hint="Make it writable for this user, or set state_dir to another folder.",
        )
    return store_error(error, path, then=" and start again")


def check_database(path: Path, known: int) -> int | None:
    """Refuse what is not ours to open, through a connection that cannot write: a refused file is not changed.

    Args:
        path: of the database.
        known: the newest schema that this version knows.

    Returns:
        The schema's version; None where there is none yet.

    Raises:
        ConfigError: the file is damaged, foreign, or of a newer schema.
        sqlite3.Error: it cannot be read.
    """
    if path.stat().st_size == 0:
        return None
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=_BUSY_MS / 1000)
    try:
        version = _version(connection)
        if version < 0:
            raise ConfigError(
                f"{path} has the schema {version}, which no pingpongd gives: something else has changed it.",
                field="state_dir",
                hint="Put a copy of it in its place, or set state_dir to another folder; nothing was changed.",
            )
        if version > known:
            raise ConfigError(
                f"{path} was made by a newer pingpongd (schema {version}, this one knows {known}).",
                field="state_dir",
                hint="Start that version, or set state_dir to another folder; nothing was changed.",
            )
        if version == 0 and connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() != (0,):
            raise ConfigError(
                f"{path} is a database of another program.", field="state_dir", hint="Set state_dir to another folder."
            )
        problems = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
        if problems != ["ok"]:
            raise _damaged(path, "; ".join(problems))
        return version
    finally:
        connection.close()


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged: {' '.join(problem.split())}.",
        field="state_dir",
        hint=f"Nothing was changed. `sqlite3 {path} .recover | sqlite3 saved.db` saves what can be saved; with the "
        "folder's chains.db files moved away the daemon starts with an empty store.",
    )


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _set_up(connection: sqlite3.Connection) -> None:
    for pragma in (
        f"busy_timeout = {_BUSY_MS}",
        "locking_mode = EXCLUSIVE",  # before the log is first touched, or it uses shared memory
        f"page_size = {PAGE_BYTES}",
        "auto_vacuum = INCREMENTAL",  # before the first table; the file shrinks when chains are erased
        "journal_mode = WAL",
        f"journal_size_limit = {_WAL_BYTES}",
        "synchronous = FULL",  # a commit is on the disk when it returns
        "foreign_keys = ON",
        "secure_delete = ON",  # prompts are private: what is deleted is overwritten
        "temp_store = MEMORY",  # and is not written elsewhere either
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()
