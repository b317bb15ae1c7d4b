"""Results of chains in files, as `submit --json` and `result --json` print them."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec

from pingpong_bus.errors import DataError
from pingpong_bus.messages import ChainResult
from pingpong_client.chain_file import read_file

_LIMIT = 256 * 1024 * 1024
_HINT = "Name a file that `pingpong-client submit --json` or `result --json` has written."


def read_result(name: str, stdin: BinaryIO) -> ChainResult:
    """A chain's result; ``-`` is standard input.

    Raises:
        DataError: it cannot be read, or is none that this client knows.
    """
    if name == "-":
        source, data = "standard input", stdin.read(_LIMIT + 1)
    else:
        source, data = name, read_file(Path(name), limit=_LIMIT, what="the result")
    if len(data) > _LIMIT:
        raise DataError(f"{source} is larger than {_LIMIT} bytes, so it is no chain's result.", hint=_HINT)
    try:
        return msgspec.json.decode(data, type=ChainResult)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{source} is no chain's result: {error}.", hint=_HINT) from None
