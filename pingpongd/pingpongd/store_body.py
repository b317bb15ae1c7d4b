"""How texts stand in the database: so that deleting them leaves nothing of them.

With ``secure_delete`` SQLite overwrites the cells and pages that it frees. But when it moves a row from one page of a
table to its neighbour it may leave the old copy in the first one's unused middle, and of that copy nothing is known
when the row is deleted. Only what stands on the table's own pages is ever moved: the end of a long row is on overflow
pages, which belong to that row alone and are zeroed when it goes. So a body is made such that none of its content
stands on the table's page::

    512 zeros | u32 length of the head | u32 length of the content | head | content | zeros

A row of P bytes keeps K = 489 + (P - 489) % 4092 of them on a 4096-byte page of the table, and only 489 where K would
be above 4061 (https://www.sqlite.org/fileformat2.html#b_tree_pages); the last zeros see to the latter.
"""

from __future__ import annotations

import sqlite3
import struct

PAGE_BYTES = 4096

_KEPT = 489  # of a row, on the table's page: ((4096 - 12) * 32 // 255) - 23
_OVERFLOW = PAGE_BYTES - 4
_ROOM = 250
"""For what else is in the row: its header and a few numbers, at least 1 byte and at most this much."""
_ZEROS = bytes(512)
_LENGTHS = struct.Struct("<II")


def pack(content: bytes, head: bytes = b"") -> bytes:
    """A body; its `head` can be read without the rest."""
    start = _ZEROS + _LENGTHS.pack(len(head), len(content))
    needed = len(start) + len(head) + len(content)
    pages = -(-(needed - _KEPT + _ROOM) // _OVERFLOW)
    return b"".join((start, head, content, bytes(_KEPT + pages * _OVERFLOW - _ROOM - needed)))


def content(body: bytes) -> bytes:
    """What was packed.

    Raises:
        sqlite3.DataError: it is no body.
    """
    begin, end = _bounds(body, len(body))
    return body[begin:end]


def read_head(connection: sqlite3.Connection, table: str, row: int) -> bytes:
    """The head of a body in a table, without reading all of it.

    Raises:
        sqlite3.DataError: it is no body.
    """
    with connection.blobopen(table, "body", row, readonly=True) as blob:
        begin, _ = _bounds(blob.read(len(_ZEROS) + _LENGTHS.size), len(blob))
        blob.seek(len(_ZEROS) + _LENGTHS.size)
        return blob.read(begin - blob.tell())


def _bounds(start: bytes, length: int) -> tuple[int, int]:
    """Where the content begins and ends."""
    at = len(_ZEROS) + _LENGTHS.size
    if len(start) < at:
        raise sqlite3.DataError("a body is too short")
    head_bytes, content_bytes = _LENGTHS.unpack_from(start, len(_ZEROS))
    if at + head_bytes + content_bytes > length:
        raise sqlite3.DataError("a body is shorter than it says")
    return at + head_bytes, at + head_bytes + content_bytes
