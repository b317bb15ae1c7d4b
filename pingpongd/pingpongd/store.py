"""The chain store: what was accepted is kept until it has ended, been fetched and expired, or been forgotten.

A Store belongs to one event loop. The files are `store_dir` (the folder and its lock), `store_schema` (the database),
`store_writer` (the thread that talks to it) and `store_queries` (what it says).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from pingpong_bus.errors import ConfigError, StoreError
from pingpong_bus.messages import ChainResult, StoreStatus
from pingpongd import store_queries as queries
from pingpongd.config import StoreConfig
from pingpongd.store_body import content
from pingpongd.store_dir import StateDir, default_state_dir
from pingpongd.store_schema import open_database, opening_error
from pingpongd.store_writer import Writer
from pingpongd.stored import AgentOutcome, EndedChain, Job, LiveChain, StoredResult

__all__ = ["KeyTaken", "Store", "default_state_dir"]

_log = structlog.get_logger()
_CLOSE_S = 3.0
"""How long `close` tries to write what could not be written before."""

_Kind = TypeVar("_Kind")
_Value = TypeVar("_Value")
_LiveChains = list[LiveChain]
_EndedChains = list[EndedChain]
_Ids = list[str]
_encode = msgspec.msgpack.Encoder().encode


class KeyTaken(ValueError):
    """Another chain has this key; ask `find_key` in the same step of the loop as `add`."""

    def __init__(self, chain_id: str) -> None:
        super().__init__(f"the chain {chain_id} has this key")
        self.chain_id = chain_id


@dataclass(frozen=True)
class _Live:
    number: int
    submitted_at: float


@dataclass(frozen=True)
class _Pending:
    """An ended chain that the disk does not know as ended yet."""

    chain: EndedChain
    result: bytes


class Store:
    """Chains on disk; see `open`."""

    next_number: int
    """One more than the highest number of a chain that was ever added."""

    def __init__(
        self, folder: StateDir, settings: StoreConfig, connection: sqlite3.Connection, contents: queries.Contents
    ) -> None:
        self._dir = folder
        self._settings = settings
        self._live = {chain_id: _Live(*of) for chain_id, of in contents.live.items()}
        # Of a hundred thousand chains that are kept, numbers are half as large as strings.
        self._ended = {int(chain_id, 16) for chain_id in contents.ended}
        self._keys = contents.keys
        self._adding: dict[str, asyncio.Future[None]] = {}
        self._pending: dict[str, _Pending] = {}
        self.next_number = contents.next_number
        self._told_missing = False
        self._writer = Writer(connection, folder.database)

    @classmethod
    def open(cls, folder: Path, settings: StoreConfig) -> Store:
        """Make, or check and bring up to date, the store in a folder, and lock it.

        Raises:
            ConfigError: the folder or the database cannot be used: written, understood, or had for ourselves. Nothing
                was changed then.
            StoreError: the disk is full or fails.
        """
        place = StateDir(folder)
        try:
            connection = open_database(place.database)
            try:
                contents = queries.contents(connection)
            except sqlite3.Error as error:
                connection.close()
                raise opening_error(error, place.database) from None
        except (ConfigError, StoreError):
            place.close()
            raise
        if place.found == "empty":
            _log.warning(
                "store_was_empty", path=str(place.database), reason="the file had 0 bytes; it is a new store now"
            )
        elif place.found == "none":
            _log.info("store_created", path=str(place.database))
        place.note_files()
        return cls(place, settings, connection, contents)

    def configure(self, settings: StoreConfig) -> None:
        """Keep chains by other settings from now on."""
        self._settings = settings

    def live(self) -> _LiveChains:
        """The chains that have not ended, by number; asked once, at the daemon's start.

        Raises their attempt, durably.

        Raises:
            ConfigError: a chain cannot be understood; no attempt was raised.
            StoreError: the database cannot be read or written.
        """
        rows: list[queries.LiveRow] = self._writer.call(queries.live).result()
        try:
            chains = [
                LiveChain(
                    id=chain_id,
                    job=self._unpack(job, Job, chain_id),
                    started=started,
                    attempt=attempt + 1,
                    outcomes={agent: self._unpack(body, AgentOutcome, chain_id) for agent, body in outcomes.items()},
                )
                for chain_id, job, started, attempt, outcomes in rows
            ]
        except StoreError as error:
            raise ConfigError(
                error.message, field="state_dir", hint="Start the pingpongd that has written it, or use another folder."
            ) from None
        self._writer.call(queries.begin_attempt).result()
        return chains

    def knows(self, chain_id: str) -> bool:
        """Whether a chain of this id is kept, or is just being added."""
        return chain_id in self._live or _as_int(chain_id) in self._ended

    def find_key(self, key: str) -> str | None:
        """The id of the chain that was submitted with this key; it may be on its way to the disk, see `added`."""
        return self._keys.get(_digest(key)) if key else None

    async def add(self, chain_id: str, job: Job) -> None:
        """Keep an accepted chain; it is on the disk when this returns.

        A cancelled `add` keeps nothing.

        Args:
            chain_id: 8 hex digits.

        Raises:
            KeyTaken: by another chain.
            ValueError: the id is taken or is none.
            StoreError: it could not be written, or the database's files are gone; nothing of it is kept.
        """
        if self.knows(chain_id) or _as_int(chain_id) is None:
            raise ValueError(f"{chain_id} is not the id of a new chain")
        if (missing := self._missing()) is not None:
            raise missing
        holder = self.find_key(job.key)
        if holder is not None:
            raise KeyTaken(holder)
        key = _digest(job.key) if job.key else None
        change = queries.added(job.number, chain_id, key, job.submitted_at, _encode(job))
        self._writer.write(change)
        self._live[chain_id] = _Live(job.number, job.submitted_at)
        if key is not None:
            self._keys[key] = chain_id
        self.next_number = max(self.next_number, job.number + 1)
        written = self._adding[chain_id] = asyncio.wrap_future(change.written)
        kept = False
        try:
            await asyncio.shield(written)
            kept = True
        except asyncio.CancelledError:
            with contextlib.suppress(StoreError):  # closed: if it was written, the next start of the daemon runs it
                self._writer.write(queries.dropped(job.number))
            raise
        finally:
            del self._adding[chain_id]
            if not kept:
                self._live.pop(chain_id, None)
                if key is not None:
                    self._keys.pop(key, None)

    async def added(self, chain_id: str) -> None:
        """Wait until the `add` of a chain that `find_key` has named is through.

        Raises:
            StoreError: it was not; the chain is not kept.
        """
        adding = self._adding.get(chain_id)
        if adding is not None:
            await asyncio.shield(adding)
        if not self.knows(chain_id):
            raise StoreError(f"the chain {chain_id} was not kept.", hint="Submit it again.")

    def started(self, chain_id: str) -> None:
        """Say, in the background, that some agent may run from now on."""
        self._writer.write(queries.started(self._live_one(chain_id).number))

    def attempt(self, chain_id: str, attempt: int) -> None:
        """Keep, in the background, that an agent has begun anew: no later start gives this attempt again."""
        self._writer.write(queries.raised(self._live_one(chain_id).number, attempt))

    def agent_finished(self, chain_id: str, index: int, outcome: AgentOutcome) -> Future[None]:
        """Keep, in the background, what an agent has written.

        Returns:
            Done when it is on the disk; or its StoreError says why it could not be written for now: it is tried again.
        """
        change = queries.agent_finished(self._live_one(chain_id).number, index, _encode(outcome))
        self._writer.write(change)
        return change.tried

    def ended(self, chain_id: str, result: ChainResult, ended_at: float) -> Awaitable[None]:
        """Keep a result in the place of the job and the outcomes: `result` has it at once.

        Args:
            ended_at: seconds since the epoch.

        Returns:
            Done when it is on the disk; or raises a StoreError where it could not be written for now: it is tried
            again.

        Raises:
            StoreError: the store is closed.
        """
        live = self._live_one(chain_id)
        chain = EndedChain(
            id=chain_id,
            name=result.name,
            state=result.state,
            placement=result.placement,
            agents=len(result.agents),
            finished_agents=sum(agent.state == "finished" for agent in result.agents),
            submitted_at=live.submitted_at,
            ended_at=ended_at,
            e2e_ms=result.e2e_ms,
            exactness=result.exactness,
        )
        body = _encode(StoredResult(result=result))
        change = queries.ended(live.number, ended_at, _encode(chain), body)
        self._writer.write(change)
        del self._live[chain_id]
        self._ended.add(int(chain_id, 16))
        self._pending[chain_id] = _Pending(chain, body)
        asyncio.wrap_future(change.written).add_done_callback(partial(self._ended_written, chain_id))
        return asyncio.shield(asyncio.wrap_future(change.tried))

    async def result(self, chain_id: str, *, fetched: bool) -> ChainResult | None:
        """The result of an ended chain; None where there is no such.

        Args:
            fetched: it goes to somebody who asked for it, and may expire sooner.

        Raises:
            StoreError: it cannot be read.
        """
        pending = self._pending.get(chain_id)
        if pending is not None:
            found, noted = msgspec.msgpack.decode(pending.result, type=StoredResult), False
        else:
            row = await self._call(partial(queries.result, chain_id))
            if row is None:
                return None
            found, noted = self._unpack(row[0], StoredResult, chain_id), row[1]
        if fetched and not noted:
            self._writer.write(queries.fetched(chain_id))
        return found.result

    async def list(self, limit: int) -> _EndedChains:
        """The chains that ended last, the very last one last.

        Raises:
            StoreError: they cannot be read.
        """
        pending = [item.chain for item in self._pending.values()]
        heads = await self._call(partial(queries.latest, limit))
        try:
            stored = [msgspec.msgpack.decode(head, type=EndedChain) for head in heads]
        except msgspec.MsgspecError as error:
            raise StoreError(f"an ended chain in {self._dir.database} cannot be read: {error}.") from None
        known = {chain.id for chain in stored}
        chains = stored + [chain for chain in pending if chain.id not in known]
        return chains[max(0, len(chains) - limit) :]

    async def forget(self, chain_id: str) -> bool:
        """Erase an ended chain, also from the bytes of the files; returns whether there was one.

        Raises:
            StoreError: it could not be erased, or not from all files yet; the latter is tried again.
        """
        if _as_int(chain_id) not in self._ended:
            return False
        erasing = self._erase(partial(queries.forget, chain_id))
        emptied = self._writer.empty_log()  # queued at once: who is cancelled from here on has erased all the same
        erased = await asyncio.shield(erasing)
        if not erased and chain_id in self._pending:
            raise StoreError(
                f"the chain {chain_id} cannot be erased for now: its end could not be written yet.",
                hint="Try again when the disk has room.",
            )
        await asyncio.shield(asyncio.wrap_future(emptied))
        return bool(erased)

    async def expire(self, now: float) -> _Ids:
        """Erase what StoreConfig does not want to be kept any longer; returns the ids.

        Args:
            now: seconds since the epoch; a chain that ended later than that is new.

        Raises:
            StoreError: nothing could be erased.
        """
        self._missing()  # somebody should hear of it, also where nobody submits
        ids: list[str] = []
        while True:
            try:
                erased = await asyncio.shield(self._erase(partial(queries.expire, self._settings, now)))
            except StoreError:
                if not ids:
                    raise
                break  # the rest at the next time
            if not erased:
                break
            ids += [chain_id for chain_id, _ in erased]
        if ids:
            self._writer.empty_log()
        return ids

    def status(self) -> StoreStatus:
        """How much is kept, and whether all of it is on the disk."""
        database = self._dir.database
        size = 0
        for path in (database, self._dir.log):
            try:
                size += path.stat().st_size
            except FileNotFoundError:
                continue
        error = self._missing() or self._writer.error
        return StoreStatus(
            path=str(database),
            chains=len(self._live) + len(self._ended),
            bytes=size,
            pending=self._writer.pending,
            error="" if error is None else error.message,
        )

    async def close(self) -> None:
        """Write what is pending, which may take seconds where the disk is full, and let go of the folder.

        Raises:
            StoreError: some changes could not be written, and are lost.
        """
        self._dir.forget_files()
        lost = await asyncio.shield(asyncio.wrap_future(self._writer.close(_CLOSE_S)))
        self._writer.join()
        self._dir.close()
        if lost:
            error = self._writer.error
            why = "" if error is None else f" {error.message}"
            raise StoreError(f"{lost} changes to the chain store are lost.{why}", hint="Their chains run again.")

    def _missing(self) -> StoreError | None:
        """What is wrong where the open database is no longer at its place; logged once."""
        path = self._dir.missing()
        if path is None:
            return None
        error = StoreError(
            f"{path} was removed or replaced while the daemon runs: what is kept would be lost at its end.",
            hint="Drain the daemon, so that what runs can finish, and start it again.",
        )
        if not self._told_missing:
            self._told_missing = True
            _log.warning("store_removed", path=str(path), error=str(error))
        return error

    def _live_one(self, chain_id: str) -> _Live:
        live = self._live.get(chain_id)
        if live is None:
            raise ValueError(f"the chain {chain_id} is not live")
        return live

    def _ended_written(self, chain_id: str, written: asyncio.Future[None]) -> None:
        if written.exception() is None:  # else the store was closed before
            del self._pending[chain_id]

    def _call(self, function: Callable[[sqlite3.Connection], _Value]) -> asyncio.Future[_Value]:
        future: Future[_Value] = self._writer.call(function)
        return asyncio.wrap_future(future)

    def _erase(self, function: Callable[[sqlite3.Connection], queries.Erased]) -> asyncio.Future[queries.Erased]:
        erasing = self._call(function)
        erasing.add_done_callback(self._erased)  # also where nobody waits any more
        return erasing

    def _erased(self, erasing: asyncio.Future[queries.Erased]) -> None:
        if erasing.exception() is not None:
            return
        for chain_id, key in erasing.result():
            self._ended.discard(int(chain_id, 16))
            if key is not None:
                self._keys.pop(key, None)

    def _unpack(self, body: bytes, kind: type[_Kind], chain_id: str) -> _Kind:
        try:
            return msgspec.msgpack.decode(content(body), type=kind)
        except (msgspec.MsgspecError, sqlite3.DataError) as error:
            raise StoreError(f"the chain {chain_id} in {self._dir.database} cannot be read: {error}.") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()[:16]


def _as_int(chain_id: str) -> int | None:
    """A chain's id as a number; None for what is no id."""
    return int(chain_id, 16) if re.fullmatch("[0-9a-f]{8}", chain_id) else None
