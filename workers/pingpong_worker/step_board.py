"""A small file in memory on which an engine's scheduler shows what it does, and what it has learnt.

The scheduler runs in a process of its own (EngineCore), and its step must wait for nothing. So it writes into a
mapping, and the worker looks when it likes. The file has a name only while the engine starts: the worker makes it, the
scheduler finds its path in the environment, and both keep their mappings.

There are two notes, the state and the prices. Each has a sequence number, a length and msgpack:

    offset   0   1        number; odd while the note is being written
             8            bytes of the note
            16            the note

The writer makes the number odd, writes, and makes it even; a reader copies the note between two looks at the number,
and copies again where they differ or are odd. x86-64 keeps the order of stores. There is one writer of a note at a
time: of the prices it is the worker until the engine starts, who puts those on file there, and then the scheduler.

Behind the notes each process of the engine has a slot, for a collection of garbage in any of them holds up the step:

    offset   0   8        its pid; 0 where the slot is free
             8   8        ms that collections have taken in it, a double
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from pingpong_bus.messages import SchedulerState
from pingpong_worker.step_prices import StepPrices

STEP_BOARD: Final = "PINGPONG_STEP_BOARD"
"""Environment variable: the board's path."""

_STATE_AT, _PRICES_AT, _SLOTS_AT, _BYTES = 0, 4096, (1 << 18) - 4096, 1 << 18
_HEAD = 16
_LOOKS = 100
"""Looks at a note before it is left for the next time: a writer may have died in the middle of it."""
_POSTS_BETWEEN_PRICES = 256

_encoder = msgspec.msgpack.Encoder()
_prices_decoder = msgspec.msgpack.Decoder(dict[str, Any])
_state_decoder = msgspec.msgpack.Decoder(SchedulerState)


class _Note:
    """One note on a mapped board, for its writer or a reader."""

    def __init__(self, board: mmap.mmap, start: int, end: int) -> None:
        self._words = memoryview(board)[start : start + _HEAD].cast("Q")
        self._body = memoryview(board)[start + _HEAD : end]

    def write(self, data: bytes) -> bool:
        """Replace the note; False, and nothing done, where it does not fit."""
        if len(data) > len(self._body):
            return False
        number = self._words[0] | 1  # odd already where a writer has died
        self._words[0] = number
        self._words[1] = len(data)
        self._body[: len(data)] = data
        self._words[0] = number + 1
        return True

    def read(self) -> bytes | None:
        """The note as it was at one moment; None where there is none, or it is being written all the time."""
        for _ in range(_LOOKS):
            number = self._words[0]
            if number == 0:
                return None
            if number % 2:
                continue
            data = bytes(self._body[: self._words[1]])
            if self._words[0] == number:
                return data
        return None


class BoardWriter:
    """The scheduler's side.

    Args:
        path: of a board that a worker has made.

    Raises:
        OSError: there is none.
    """

    def __init__(self, path: Path) -> None:
        board = _map(path)
        self._state = _Note(board, _STATE_AT, _PRICES_AT)
        self._prices = _Note(board, _PRICES_AT, _SLOTS_AT)
        self._posts = 0

    @classmethod
    def open_from_environment(cls) -> BoardWriter | None:
        """The board that `STEP_BOARD` names; None where it names none, as in an engine that no worker has started."""
        path = os.environ.get(STEP_BOARD)
        return cls(Path(path)) if path else None

    def prices(self) -> dict[str, Any] | None:
        """What the worker had on file, as `StepPrices.to_dict` gave it; None where that is nothing."""
        data = self._prices.read()
        return None if data is None else _prices_decoder.decode(data)

    def post(self, state: SchedulerState, prices: StepPrices) -> None:
        """Show the state, and now and then the prices. Takes microseconds and never waits."""
        self._state.write(_encoder.encode(state))
        if self._posts % _POSTS_BETWEEN_PRICES == 0:
            self._prices.write(_encoder.encode(prices.to_dict()))
        self._posts += 1


class CollectionsSlot:
    """The slot of one process of the engine; claimed as it starts.

    Args:
        path: of a board that a worker has made.

    Raises:
        OSError: there is none.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # several processes start at once
            pids, self._times_ms = _slots(_map(path))
            self._index = next((index for index, pid in enumerate(pids) if pid == 0), None)
            if self._index is not None:
                pids[self._index] = os.getpid()

    def write(self, total_ms: float) -> None:
        """Say what collections have taken so far; of more processes than there are slots nothing is said."""
        if self._index is not None:
            self._times_ms[self._index] = total_ms


class StepBoard:
    """The worker's side: makes the board, and reads it.

    Args:
        path: where it is made, readable and writable for this user alone; it may be removed once the engine has opened
            it.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _BYTES)
        finally:
            os.close(descriptor)
        board = _map(path)
        self._state = _Note(board, _STATE_AT, _PRICES_AT)
        self._prices = _Note(board, _PRICES_AT, _SLOTS_AT)
        self._times_ms = _slots(board)[1]
        self._last: SchedulerState | None = None

    def offer_prices(self, prices: dict[str, Any]) -> None:
        """Give the scheduler prices to start with; before it opens the board only."""
        self._prices.write(_encoder.encode(prices))

    def state(self) -> SchedulerState | None:
        """What the scheduler showed last, and its processes since; None before its first step with a decode."""
        data = self._state.read()
        if data is not None:
            self._last = msgspec.structs.replace(_state_decoder.decode(data), gc_ms=sum(self._times_ms))
        return self._last

    def prices(self) -> dict[str, Any] | None:
        """The latest prices, as `StepPrices.to_dict` gave them; None where there are none."""
        data = self._prices.read()
        return None if data is None else _prices_decoder.decode(data)


def _slots(board: mmap.mmap) -> tuple[memoryview[int], memoryview[float]]:
    """The pids and the times of all slots."""
    slots = memoryview(board)[_SLOTS_AT:_BYTES]
    return slots.cast("Q")[::2], slots.cast("d")[1::2]


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)
