"""One agent's output: the writer and the reader of one slot.

A log only grows. Its writer stores, in this order (each line is one store or one copy; see `slab` for the layout)::

    append   ids[count … count+n]     not yet visible
             commit word              generation | OPEN   | count+n
    close    ids[count … count+n]     the last ones, if any came with the end
             close record             bits 47…40 finish reason   bit 32 has a stop token   31…0 stop token
             commit word              generation | CLOSED | count+n
    abort    commit word              generation | ABORTED | count

A writer that dies between any two of them leaves a log that is valid up to its commit word, and the next writer goes
on from there. There is one writer at a time: a new one may be opened only when the old one's process was reaped or has
said that it is done, for a stopped process can wake up between its check and its store.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from pingpong_bus.errors import BusError, LogClosed, LogFull, StreamGone
from pingpong_bus.messages import FinishReason, StreamRef
from pingpong_bus.slab import LogState, Slab, pack_word, unpack_word

_REASON_CODES: Final[dict[FinishReason, int]] = {"stop": 1, "length": 2}
_REASONS: Final[dict[int, FinishReason]] = {code: reason for reason, code in _REASON_CODES.items()}
_HAS_STOP = 1 << 32


class LogView(msgspec.Struct, frozen=True):
    """What a reader saw in one look at a log."""

    ids: list[int]
    """Tokens `first_index` to `count`; empty where `first_index` is not below `count`."""
    first_index: int
    count: int
    """Tokens in the log."""
    state: LogState
    finish_reason: FinishReason | None = None
    """Set where the state is CLOSED."""
    stop_token: int | None = None
    """The token that ended the output, which is not part of it."""


class TokenLogWriter:
    """Appends to a log; one opened on a log that has tokens goes on behind the last committed one.

    Raises:
        StreamGone: the slot is free or holds another generation.
        LogClosed: the log has ended.
    """

    def __init__(self, slab: Slab, stream: StreamRef) -> None:
        self.stream = stream
        self._slab = slab
        state, self._count = slab.require(stream)
        if state is not LogState.OPEN:
            raise LogClosed(f"The log in slot {stream.slot} is {state.name.lower()}.")
        self._at = slab.word_index(stream.slot)
        self._base = slab.ids_index(stream.slot)
        slab.words[self._at + slab.WRITER_PID] = os.getpid()

    @property
    def count(self) -> int:
        """Tokens committed."""
        return self._count

    def append(self, ids: Sequence[int]) -> int:
        """Commit `ids` behind what is there, all of them or none.

        Returns:
            The index of the first of them.

        Raises:
            LogFull: they do not fit.
            LogClosed: the log has ended.
            StreamGone: the slot is free or holds another generation.
            OverflowError: an id is not a uint32.
        """
        first = self._count
        end = self._store(ids)
        if end > first:
            self._slab.words[self._at] = pack_word(self.stream.generation, LogState.OPEN, end)
            self._count = end
        return first

    def close(self, finish_reason: FinishReason, stop_token: int | None = None, ids: Sequence[int] = ()) -> int:
        """End the log as complete.

        Args:
            finish_reason: why the engine stopped.
            stop_token: the token that ended the output, which the log does not hold.
            ids: the last ones, committed together with the end: a log that has all its tokens is never seen open, and
                nobody goes on behind them.

        Returns:
            The index of the first of `ids`.

        Raises:
            LogFull: `ids` do not fit.
            LogClosed: it has ended already.
            StreamGone: the slot is free or holds another generation.
            OverflowError: the stop token or an id is not a uint32.
        """
        if stop_token is not None and not 0 <= stop_token < _HAS_STOP:
            raise OverflowError(f"stop token {stop_token} is not a uint32")
        first = self._count
        end = self._store(ids)
        record = _REASON_CODES[finish_reason] << 40
        if stop_token is not None:
            record |= _HAS_STOP | stop_token
        self._slab.words[self._at + self._slab.CLOSE_RECORD] = record
        self._slab.words[self._at] = pack_word(self.stream.generation, LogState.CLOSED, end)
        self._count = end
        return first

    def abort(self) -> None:
        """End the log as incomplete; raises what `close` raises."""
        self._require_open()
        self._slab.words[self._at] = pack_word(self.stream.generation, LogState.ABORTED, self._count)

    def _store(self, ids: Sequence[int]) -> int:
        """Put `ids` behind what is there, where no reader looks yet; returns the count that would commit them."""
        packed = array("I", ids)
        self._require_open()
        end = self._count + len(packed)
        if end > self._slab.capacity:
            raise LogFull(
                f"The log in slot {self.stream.slot} holds {self._count} of {self._slab.capacity} tokens;"
                f" {len(packed)} more do not fit."
            )
        if packed:
            self._slab.ids[self._base + self._count : self._base + end] = memoryview(packed)
        return end

    def _require_open(self) -> None:
        state, count = self._slab.require(self.stream)
        if state is not LogState.OPEN:
            raise LogClosed(f"The log in slot {self.stream.slot} is {state.name.lower()}.")
        if count != self._count:
            raise BusError(
                f"The log in slot {self.stream.slot} has {count} tokens, its writer wrote {self._count}:"
                " there is a second writer."
            )


class TokenLogReader:
    """Looks at a log. Any number of readers may; none of them is seen by the writer.

    Raises:
        StreamGone: the slot is free or holds another generation.
    """

    def __init__(self, slab: Slab, stream: StreamRef) -> None:
        self.stream = stream
        self._slab = slab
        slab.require(stream)
        self._at = slab.word_index(stream.slot)
        self._base = slab.ids_index(stream.slot)

    def peek(self) -> tuple[int, LogState]:
        """Count and state, without the tokens.

        Raises:
            StreamGone: the slot is free or holds another generation.
        """
        generation, state, count = unpack_word(self._slab.words[self._at])
        if generation != self.stream.generation or state is LogState.FREE:
            raise StreamGone(f"Generation {self.stream.generation} of slot {self.stream.slot} is gone.")
        return count, state

    def read(self, start: int = 0) -> LogView:
        """The tokens from `start` on, and where the log stands.

        Raises:
            StreamGone: the slot is free or holds another generation, maybe since the copy began.
            ValueError: `start` is negative.
        """
        if start < 0:
            raise ValueError(f"start is {start}, which is before the log")
        count, state = self.peek()
        ids = self._slab.ids[self._base + start : self._base + count].tolist() if start < count else []
        record = self._slab.words[self._at + self._slab.CLOSE_RECORD] if state is LogState.CLOSED else 0
        self.peek()  # whoever owns the slot now stored its word before its first id
        reason = _REASONS.get(record >> 40)
        stop_token = record & 0xFFFFFFFF if record & _HAS_STOP else None
        return LogView(ids, start, count, state, reason, stop_token)
