"""The shared memory that all token logs of one daemon live in.

One memfd, created and filled by the supervisor and handed to workers as an inherited descriptor. It has no name, so
nothing can be left behind: the kernel frees it with its last holder. All numbers are little-endian::

    byte 0        8        16       24       32                64
    ┌────────┬────────┬────────┬────────┬─────────────────┐
    │ magic  │ layout │ slots  │capacity│ zero            │  the slab's header
    ├────────┼────────┼────────┼────────┴─────────────────┤
    │ commit │ close  │ writer │ zero                     │  slot 0: its header, a cache line of its own
    │ word   │ record │ pid    │                          │
    ├────────┴────────┴────────┴──────────────────────────┤
    │ uint32 ids[capacity], padded to a multiple of 64    │  slot 0: its tokens
    ├─────────────────────────────────────────────────────┤
    │ …                                                   │  slot 1, …

    commit word    bits 63…40 generation   39…32 state   31…0 count

The commit word says everything that readers act on, so it changes in one aligned 8-byte store. `memoryview.cast("Q")`
gives such a store (a `memcpy` of 8 bytes, one `mov`); `struct.pack_into` writes byte by byte and was seen to show
torn values, and two words, one for the count and one for the state, lose the tokens between them.

Order of stores: a writer stores ids, then the word; `allocate` stores the word of the new generation before any id of
it is written; a reader loads the word, copies, and loads it again. x86-64 keeps stores in order and loads in order, so
this is enough there. ARM keeps neither and Python offers no barrier: there, a reader that polls could in
principle see a count before its ids, and only one that was woken by a doorbell (two system calls and a socket
lie between) is safe in practice.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from enum import IntEnum
from typing import Self

from pingpong_bus.errors import BusError, SlabFull, StreamGone
from pingpong_bus.memory_limit import available_memory
from pingpong_bus.messages import StreamRef

LAYOUT_VERSION = 1
MAX_GENERATION = 2**24 - 1
MAX_CAPACITY = 2**32 - 1

_MAGIC = int.from_bytes(b"pingpong", "little")
_LINE = 64
"""Bytes of a cache line, and of either header."""
MAX_SHARE = 0.5
"""The most of the available memory that a slab may take: engines have to live there too."""


class LogState(IntEnum):
    """What a slot is to its readers."""

    FREE = 0
    OPEN = 1
    CLOSED = 2
    """Complete; the close record is valid."""
    ABORTED = 3
    """It will not grow any more and is not complete."""

    @property
    def over(self) -> bool:
        """Whether the log has ended, one way or the other."""
        return self in (LogState.CLOSED, LogState.ABORTED)


def pack_word(generation: int, state: LogState, count: int) -> int:
    """The commit word."""
    return generation << 40 | state << 32 | count


def unpack_word(word: int) -> tuple[int, LogState, int]:
    """Generation, state and count of a commit word."""
    return word >> 40, LogState(word >> 32 & 0xFF), word & 0xFFFFFFFF


class Slab:
    """A mapping of the shared memory; made by `create` or `attach`.

    Attributes:
        fd: the memfd, owned by this object.
        slots: how many logs fit.
        capacity: tokens a log can hold.
        words: the whole memory as uint64; `word_index` says where a slot's header begins.
        ids: the whole memory as uint32; `ids_index` says where a slot's tokens begin.
    """

    COMMIT, CLOSE_RECORD, WRITER_PID = 0, 1, 2
    """Words of a slot's header."""

    def __init__(self, fd: int, slots: int, capacity: int, *, creator: bool) -> None:
        self.fd = fd
        self.slots = slots
        self.capacity = capacity
        self._stride = _stride(capacity)
        self._map = mmap.mmap(fd, _LINE + slots * self._stride)
        self._bytes = memoryview(self._map)
        self.words = self._bytes.cast("Q")
        self.ids = self._bytes.cast("I")
        # Oldest first, so that a slot rests as long as can be before it is given away again.
        self._free = deque(range(slots)) if creator else None

    @classmethod
    def create(cls, slots: int, capacity: int) -> Self:
        """Make the shared memory.

        Args:
            slots: how many logs, at least 1.
            capacity: tokens a log can hold, 1 to 2^32 - 1.

        Raises:
            SlabFull: the numbers make no sense, or the machine lacks the memory; nothing stays behind.
        """
        if slots < 1 or not 1 <= capacity <= MAX_CAPACITY:
            raise SlabFull(
                f"A slab of {slots} slots with {capacity} tokens each cannot be made.",
                hint=f"Ask for at least 1 slot, and 1 to {MAX_CAPACITY} tokens.",
            )
        size = slab_bytes(slots, capacity)
        available = available_memory()
        if size > available * MAX_SHARE:
            # Filling it would not fail: it would push the machine into swapping or its out-of-memory killer.
            raise _no_memory(slots, capacity, size, f"{MAX_SHARE:.0%} of the {_mib(available)} MiB available")
        fd = os.memfd_create("pingpong-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            # Nobody can shrink it under a mapping, which would be a SIGBUS for everyone.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            slab = cls(fd, slots, capacity, creator=True)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise _no_memory(slots, capacity, size, "what the kernel gives") from error
            raise
        slab.words[1], slab.words[2], slab.words[3] = LAYOUT_VERSION, slots, capacity
        slab.words[0] = _MAGIC
        return slab

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map a slab that another process made.

        Args:
            fd: an inherited descriptor; the slab closes it in the end, or at once where this fails.

        Raises:
            BusError: what is behind `fd` is not a slab of this layout.
        """
        try:
            slots, capacity = _read_header(fd)
            os.set_inheritable(fd, False)  # what this process starts shall not keep the memory alive
            return cls(fd, slots, capacity, creator=False)
        except BaseException:
            os.close(fd)
            raise

    @property
    def free_slots(self) -> int:
        """Slots that `allocate` can still give; creator only."""
        return len(self._owned())

    def allocate(self) -> StreamRef:
        """Open an empty log of a new generation; creator only.

        Raises:
            SlabFull: every slot is taken.
        """
        free = self._owned()
        if not free:
            raise SlabFull(f"All {self.slots} slots of the slab hold a log.", hint="Wait until a chain has ended.")
        slot = free.popleft()
        at = self.word_index(slot)
        generation = (self.words[at] >> 40) % MAX_GENERATION + 1
        self.words[at] = pack_word(generation, LogState.OPEN, 0)
        self.words[at + self.WRITER_PID] = 0
        return StreamRef(slot=slot, generation=generation)

    def free(self, stream: StreamRef) -> None:
        """Give a log's slot back; creator only, once its writer and its readers are through with it.

        Raises:
            StreamGone: it has been freed before.
        """
        free = self._owned()
        self.require(stream)
        self.words[self.word_index(stream.slot)] = pack_word(stream.generation, LogState.FREE, 0)
        free.append(stream.slot)

    def require(self, stream: StreamRef) -> tuple[LogState, int]:
        """State and count of a log.

        Raises:
            StreamGone: the slot is free or holds another generation.
        """
        if not 0 <= stream.slot < self.slots:
            raise StreamGone(f"The slab has no slot {stream.slot}; it has {self.slots}.")
        generation, state, count = unpack_word(self.words[self.word_index(stream.slot)])
        if generation != stream.generation or state is LogState.FREE:
            raise StreamGone(f"Generation {stream.generation} of slot {stream.slot} is gone.")
        return state, count

    def writer_pid(self, stream: StreamRef) -> int:
        """The process that last opened the log for writing; 0 for none."""
        self.require(stream)
        return self.words[self.word_index(stream.slot) + self.WRITER_PID]

    def word_index(self, slot: int) -> int:
        """Where in `words` a slot's header begins: its commit word."""
        return (_LINE + slot * self._stride) // 8

    def ids_index(self, slot: int) -> int:
        """Where in `ids` a slot's tokens begin."""
        return (2 * _LINE + slot * self._stride) // 4

    def close(self) -> None:
        """Unmap the memory and close the descriptor; a second call does nothing."""
        if self.fd < 0:
            return
        for view in (self.ids, self.words, self._bytes):
            view.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _owned(self) -> deque[int]:
        if self._free is None:
            raise BusError("Only the process that made the slab gives slots away.")
        return self._free


def slab_bytes(slots: int, capacity: int) -> int:
    """How much shared memory a slab takes."""
    return _LINE + slots * _stride(capacity)


def _read_header(fd: int) -> tuple[int, int]:
    """Slots and capacity of the slab behind a descriptor."""
    size = os.fstat(fd).st_size
    header = os.pread(fd, _LINE, 0)
    if len(header) < _LINE or int.from_bytes(header[:8], "little") != _MAGIC:
        raise BusError(f"Descriptor {fd} is not a token slab.")
    layout, slots, capacity = memoryview(header).cast("Q")[1:4].tolist()
    if layout != LAYOUT_VERSION:
        raise BusError(
            f"The token slab has layout {layout}, this side knows {LAYOUT_VERSION}.",
            hint="Run daemon and workers of the same release.",
        )
    if size != slab_bytes(slots, capacity):
        raise BusError(f"The token slab is {size} bytes long, which does not fit what its header says.")
    return slots, capacity


def _stride(capacity: int) -> int:
    """Bytes from one slot to the next."""
    return _LINE + -(-capacity * 4 // _LINE) * _LINE


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def _no_memory(slots: int, capacity: int, size: int, limit: str) -> SlabFull:
    return SlabFull(
        f"{slots} slots of {capacity} tokens need {_mib(size)} MiB of shared memory, more than {limit}.",
        hint="Configure fewer slots or a smaller max_model_len, or free memory.",
    )
