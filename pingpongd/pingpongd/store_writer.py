"""The chain store's thread: it alone talks to the database, so that the event loop never waits for the disk.

It takes everything that is queued and commits it at once: under load, many changes share one fsync. Changes are made
in the order in which they were asked for. A change that `lasts` is tried until it is written; of others the failure
is final.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pingpong_bus.errors import StoreError
from pingpongd.store_schema import store_error, transaction

_RETRY_S = 1.0
"""Between tries of changes that could not be written."""
_CLOSING_RETRY_S = 0.2

Statement = tuple[str, tuple[object, ...]]


def _promise() -> Future[Any]:
    """A future that whoever waits for it cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True, eq=False)
class Change:
    """Statements that are carried out together or not at all."""

    statements: tuple[Statement, ...]
    lasts: bool
    """Tried until it is written: nothing but the disk may make it fail."""
    tried: Future[None] = field(default_factory=_promise)
    """Done after the first try; its StoreError says why that failed."""
    written: Future[None] = field(default_factory=_promise)
    """Done once the change is on the disk; its StoreError says why it never will be."""


@dataclass(frozen=True, eq=False)
class _Call:
    function: Callable[[sqlite3.Connection], Any]
    done: Future[Any] = field(default_factory=_promise)


class Writer:
    """The thread; it takes the connection over and closes it at its end."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._wake = threading.Condition()
        self._queue: list[Change | _Call] = []
        self._backlog: list[Change] = []
        self._calls: list[_Call] = []
        self._log_holds_erased = False
        self._retry_at = 0.0
        self._error: StoreError | None = None
        self._close_by: float | None = None
        self._closed: Future[int] = _promise()
        self._thread = threading.Thread(target=self._run, name="chain-store", daemon=True)
        self._thread.start()

    @property
    def error(self) -> StoreError | None:
        """Why the latest change could not be written; None where it was."""
        return self._error

    @property
    def pending(self) -> int:
        """Changes that are not on the disk yet."""
        with self._wake:
            items = [*self._backlog, *self._queue]
        return sum(isinstance(item, Change) and not item.written.done() for item in items)

    def write(self, change: Change) -> None:
        """Queue a change.

        Raises:
            StoreError: the writer is closed.
        """
        self._put(change)

    def call(self, function: Callable[[sqlite3.Connection], Any]) -> Future[Any]:
        """Queue a call that reads, or writes in a transaction of its own; an sqlite3.Error in it becomes a StoreError.

        It comes after every change queued before it, save those that cannot be written for now.

        Raises:
            StoreError: the writer is closed.
        """
        call = _Call(function)
        self._put(call)
        return call.done

    def empty_log(self) -> Future[Any]:
        """Move the log into the database and cut it to nothing, so that what was deleted is in no file.

        Where that fails it is tried again, like a change.
        """
        return self.call(self._empty_log)

    def join(self) -> None:
        """Wait for the end of the thread, which is near once the future of `close` is done."""
        self._thread.join()

    def close(self, limit_s: float) -> Future[int]:
        """Write what is pending, trying for this long at most, and end the thread.

        Returns:
            How many changes could not be written.
        """
        with self._wake:
            if self._close_by is None:
                self._close_by = time.monotonic() + limit_s
                self._wake.notify()
        return self._closed

    def _put(self, item: Change | _Call) -> None:
        with self._wake:
            if self._close_by is not None or self._closed.done():
                raise StoreError("the chain store is closed.")
            self._queue.append(item)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._turn()
        finally:
            self._connection.close()  # with it SQLite moves the log into the database
            self._end()

    def _wait(self) -> bool:
        """Wait for work, or until it is time to try the backlog again; returns whether to go on."""
        with self._wake:
            if self._owes() and not self._queue:
                pause = self._retry_at - time.monotonic()
                self._wake.wait_for(lambda: self._queue, timeout=pause if self._close_by is None else _CLOSING_RETRY_S)
            else:
                self._wake.wait_for(lambda: self._queue or self._close_by is not None)
            if self._queue or self._close_by is None:
                return True
            return self._owes() and time.monotonic() < self._close_by

    def _owes(self) -> bool:
        return bool(self._backlog) or self._log_holds_erased

    def _turn(self) -> None:
        with self._wake:
            changes = [item for item in self._queue if isinstance(item, Change)]
            self._calls = [item for item in self._queue if isinstance(item, _Call)]
            self._queue = []
            if changes or time.monotonic() >= self._retry_at or self._close_by is not None:
                changes = self._backlog + changes
                self._backlog = changes  # they count as pending until they are written
        if changes:
            left = self._commit(changes)
            with self._wake:
                self._backlog = left
        if self._log_holds_erased and not self._backlog:
            try:
                self._empty_log(self._connection)
            except sqlite3.Error as error:
                self._error = self._explained(error, lasts=True)
        self._retry_at = time.monotonic() + _RETRY_S
        for call in self._calls:
            self._answer(call)
        self._calls = []

    def _commit(self, changes: list[Change]) -> list[Change]:
        """Write changes, at once if that goes, else those that can be; returns those to be tried again."""
        hindrance = self._try(changes)
        if hindrance is None:
            self._error = None
            _settle(changes)
            return []
        left: list[Change] = []
        failed = False
        for change in changes:
            held_up = change.lasts and left  # none overtakes one before it
            error = hindrance if held_up or len(changes) == 1 else self._try([change])
            if error is None:
                _settle([change])
                continue
            # A change that does not fit is a fault of ours, and no retry helps: it must not hold up those behind it.
            again = change.lasts and not isinstance(error, sqlite3.IntegrityError)
            self._error = self._explained(error, lasts=again)
            if not change.tried.done():
                change.tried.set_exception(self._error)
            if again:
                hindrance = error
                left.append(change)
            else:
                change.written.set_exception(self._error)
                failed = True
        if failed and not left:
            # A commit whose fsync failed may stand whole at the log's end, and would come to life after a crash:
            # the next frames written overwrite it.
            left.append(Change((("UPDATE upkeep SET failed_writes = failed_writes + 1", ()),), lasts=True))
        return left

    def _try(self, changes: list[Change]) -> sqlite3.Error | None:
        try:
            with transaction(self._connection):
                for change in changes:
                    for sql, values in change.statements:
                        self._connection.execute(sql, values)
        except sqlite3.Error as error:
            return error
        return None

    def _explained(self, error: sqlite3.Error, *, lasts: bool) -> StoreError:
        """For people; what does not last was a submission."""
        if isinstance(error, sqlite3.IntegrityError):
            return StoreError(f"a change does not fit what is stored: {error}.")
        return store_error(error, self._path, then="; it is tried again" if lasts else " and submit again")

    def _answer(self, call: _Call) -> None:
        try:
            call.done.set_result(call.function(self._connection))
        except sqlite3.Error as error:
            call.done.set_exception(store_error(error, self._path, then=" and try again"))

    def _empty_log(self, connection: sqlite3.Connection) -> None:
        self._log_holds_erased = True
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._log_holds_erased = False

    def _end(self) -> None:
        """Tell everybody who still waits; after a fault in this thread too."""
        closed = StoreError("the chain store is closed.")
        with self._wake:
            left = [*self._backlog, *self._calls, *self._queue]
            lost = 0
            for item in left:
                futures = (item.done,) if isinstance(item, _Call) else (item.tried, item.written)
                lost += isinstance(item, Change) and not item.written.done()
                for future in futures:
                    if not future.done():
                        future.set_exception(closed)
            self._closed.set_result(lost)


def _settle(changes: list[Change]) -> None:
    for change in changes:
        change.written.set_result(None)
        if not change.tried.done():
            change.tried.set_result(None)
