"""The process that runs `extract` steps: what they match may take for ever, and then it is killed and replaced.

Started as ``python -m pingpongd.extract_process SUPERVISOR_PID``. On its standard input come frames, a length of four
bytes (little-endian) and a msgpack `Request`; on its standard output goes an `Answer` for each, and one at first when
it is ready. It ends with its input, or with its supervisor.
"""

from __future__ import annotations

import resource
import struct
import sys
from typing import BinaryIO

import msgspec

from pingpong_bus.chain import Extract
from pingpong_worker.parent_death import die_with_parent
from pingpongd.extracting import NotFound, extract

_MEMORY_BYTES = 2**31
"""Of address space: a text of some megabytes, decoded, takes a hundred times as much at most."""
LENGTH = struct.Struct("<I")


class Request(msgspec.Struct, frozen=True):
    """A step."""

    spec: Extract
    text: str


class Answer(msgspec.Struct, frozen=True):
    """What it took out."""

    text: str | None
    """None where there is nothing of the kind."""
    why: str = ""
    """Then why, in a clause."""
    failed: bool = False
    """The step cannot be done at all, whatever is to be taken otherwise."""


def answer(request: Request) -> Answer:
    """Do one step."""
    try:
        return Answer(extract(request.spec, request.text))
    except NotFound as nothing:
        return Answer(None, str(nothing))
    except (ValueError, RecursionError, MemoryError) as error:
        return Answer(None, f"{type(error).__name__}: {error}", failed=True)


def _write(stream: BinaryIO, message: Answer) -> None:
    if message.text is not None:
        # A JSON string may hold half of a surrogate pair, which no text that is passed on can: it becomes U+FFFD.
        whole = message.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        message = msgspec.structs.replace(message, text=whole)
    frame = msgspec.msgpack.encode(message)
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()


def main() -> None:
    """Answer requests until there are no more."""
    if not die_with_parent(int(sys.argv[1])):
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    given, out = sys.stdin.buffer, sys.stdout.buffer
    decoder = msgspec.msgpack.Decoder(Request)
    _write(out, Answer(""))
    while len(head := given.read(LENGTH.size)) == LENGTH.size:
        _write(out, answer(decoder.decode(given.read(LENGTH.unpack(head)[0]))))


if __name__ == "__main__":
    main()
