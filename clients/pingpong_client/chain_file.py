"""Reading chain files and inputs, before any daemon is looked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from pingpong_bus.chain import MAX_CHAIN_BYTES, Chain, parse_chain
from pingpong_bus.errors import ChainError, UsageError

MAX_INPUT_BYTES = 16 * 1024 * 1024


def load_chain(path: str | os.PathLike[str], *, stdin: BinaryIO | None = None) -> Chain:
    """Read and check a chain file; ``-`` is standard input.

    Raises:
        ChainError: it cannot be read, or something in it is off.
    """
    if os.fspath(path) == "-":
        stream = stdin if stdin is not None else sys.stdin.buffer
        return parse_chain(stream.read(MAX_CHAIN_BYTES + 1), source="standard input")
    return parse_chain(read_file(Path(path), limit=MAX_CHAIN_BYTES, what="the chain file"), source=str(path))


def read_file(path: Path, *, limit: int, what: str) -> bytes:
    """The bytes of a file that a user named, at most one over the limit.

    Raises:
        ChainError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ChainError(f"{what} {path} cannot be read: {reason}.", hint="Check its path and rights.") from None


def parse_inputs(given: Iterable[str]) -> dict[str, str]:
    """Turn ``name=value`` arguments into inputs; ``name=@file`` reads a file, ``name=@@text`` is "@text".

    Raises:
        UsageError: an argument without a name, or a name given twice.
        ChainError: a file that cannot be read, is too large, or is not UTF-8.
    """
    inputs: dict[str, str] = {}
    for argument in given:
        name, equals, value = argument.partition("=")
        if not equals or not name:
            raise UsageError(f"{argument!r} is not name=value.", field="--input", hint="Write --input topic=tides.")
        if name in inputs:
            raise UsageError(f'"{name}" is given twice.', field="--input", hint="Keep one of them.")
        if value.startswith("@@"):
            value = value[1:]
        elif value.startswith("@"):
            value = _read_text(Path(value[1:]), name)
        inputs[name] = value
    return inputs


def _read_text(path: Path, name: str) -> str:
    data = read_file(path, limit=MAX_INPUT_BYTES, what="the file")
    field = f"inputs.{name}"
    if len(data) > MAX_INPUT_BYTES:
        raise ChainError(f"{path} is longer than {MAX_INPUT_BYTES} bytes.", field=field, hint="Use a shorter text.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ChainError(
            f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}.",
            field=field,
            hint="Save the file as UTF-8.",
        ) from None
