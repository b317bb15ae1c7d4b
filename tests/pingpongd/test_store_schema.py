"""Migrations of the chain store: each in a transaction, each once, and none that fails half."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from pingpong_bus.errors import ConfigError, StoreError
from pingpongd.store_schema import MIGRATIONS, Migration, open_database


def add_colour(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE chain ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'")


def paint(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE chain SET colour = 'blue'")


def fail_half_way(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE chain SET colour = 'green'")
    connection.execute("INSERT INTO there_is_no_such_table VALUES (1)")


def version_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return int(version)


def rows_after(path: Path, migrations: tuple[Migration, ...]) -> list[tuple[object, ...]]:
    connection = open_database(path, migrations)
    rows = connection.execute("SELECT * FROM chain").fetchall()
    connection.close()
    return rows


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database of version 1 with a chain."""
    path = tmp_path / "chains.db"
    path.touch()
    connection = open_database(path, MIGRATIONS[:1])
    connection.execute("INSERT INTO chain (number, id, submitted_at) VALUES (1, '0000000a', 5.0)")
    connection.close()
    assert version_of(path) == 1
    return path


def test_an_empty_file_gets_the_whole_schema(tmp_path: Path) -> None:
    path = tmp_path / "chains.db"
    path.touch()
    open_database(path).close()
    assert version_of(path) == len(MIGRATIONS)


def test_an_older_database_goes_through_what_it_has_not_had(old: Path) -> None:
    row = (1, "0000000a", None, 5.0, 0, 1)
    assert rows_after(old, (*MIGRATIONS[:1], add_colour)) == [(*row, "red")]
    assert version_of(old) == 2
    assert rows_after(old, (*MIGRATIONS[:1], add_colour, paint)) == [(*row, "blue")]
    assert rows_after(old, (*MIGRATIONS[:1], add_colour, paint)) == [(*row, "blue")]
    assert version_of(old) == 3
    with pytest.raises(ConfigError, match=r"newer pingpongd \(schema 3, this one knows 1\)"):
        open_database(old, MIGRATIONS[:1])


def test_a_migration_that_fails_leaves_the_version_before_it(old: Path) -> None:
    with pytest.raises(StoreError, match="there_is_no_such_table"):
        open_database(old, (*MIGRATIONS[:1], add_colour, fail_half_way))
    assert version_of(old) == 2
    assert [row[-1] for row in rows_after(old, (*MIGRATIONS[:1], add_colour))] == ["red"]


def test_the_connection_is_set_up_to_keep_and_to_erase(old: Path) -> None:
    connection = open_database(old)
    pragmas = ("journal_mode", "synchronous", "foreign_keys", "secure_delete", "auto_vacuum", "locking_mode")
    values = [connection.execute(f"PRAGMA {pragma}").fetchone()[0] for pragma in pragmas]
    connection.close()
    assert values == ["wal", 2, 1, 1, 2, "exclusive"]
