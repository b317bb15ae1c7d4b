"""Files that a command is told to write: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pingpong_bus.errors import UsageError
from pingpong_client import plotting

_Reported = TypeVar("_Reported")
_DRAWN = frozenset({".html", ".png", ".svg"})


def writer_of(path: Path, forms: Mapping[str, Callable[[_Reported], bytes]]) -> Callable[[_Reported], bytes]:
    """What makes a report's file, by the path's suffix; whether it can is found out before the work, which may be long.

    Args:
        path: of the file.
        forms: what makes the content, by suffix.

    Raises:
        UsageError: the suffix says nothing, the file cannot be made, or what draws is not installed.
    """
    form = path.suffix.lower()
    if form not in forms:
        raise UsageError(
            f"{path} does not say what to write.", field="--output", hint=f"End its name in {', '.join(forms)}."
        )
    if form in _DRAWN:
        plotting.require()
    check_writable(path)
    return forms[form]


def write_file(path: Path, data: bytes) -> None:
    """Write a file; one of that name is replaced as a whole, and what is no file (a pipe) is written to.

    Raises:
        UsageError: no file can be made there.
        OSError: the disk is full, or fails.
    """
    path = path.resolve()  # a link stays one
    if _is_special(path):
        with path.open("wb") as file:
            file.write(data)
        return
    beside = _file_beside(path)
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except BaseException:
        beside.unlink()
        raise


def check_writable(path: Path) -> None:
    """Find out before the work, which may take long, whether a file can be made there.

    Raises:
        UsageError: it cannot.
    """
    path = path.resolve()
    if not _is_special(path):
        _file_beside(path).unlink()


def _is_special(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder: a device, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _file_beside(path: Path) -> Path:
    """A new file in the same folder."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", field="--output", hint="Name a file.")
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".pingpong-", suffix=path.suffix)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.", field="--output", hint="Check its path and rights."
        ) from None
    umask = os.umask(0)
    os.umask(umask)
    os.fchmod(descriptor, 0o666 & ~umask)  # mkstemp's own is for its owner alone
    os.close(descriptor)
    return Path(name)
