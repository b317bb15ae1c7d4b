"""Files of other packages, replaced as a whole: what is compiled of them goes too; no link is written through."""

from __future__ import annotations

import os
from pathlib import Path

from pingpong_bus.errors import PingpongError

_BESIDE = ".pingpongd-new"


class PatchNotWritten(PingpongError):
    """vLLM's files cannot be read or written."""

    exit_code = 74


def read_file(path: Path) -> bytes | None:
    """A file's content; None where there is none.

    Raises:
        PatchNotWritten: it is there, and cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PatchNotWritten(f"{path} cannot be read: {error.strerror}.") from None


def write_file(path: Path, data: bytes | None) -> None:
    """Replace a file as a whole, or remove it; folders that are missing are made.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if data is not None:
            stage_file(path, data)
        replace_file(path, data)
    except BaseException:
        beside(path).unlink(missing_ok=True)
        raise


def beside(path: Path) -> Path:
    """Where a file's next content is written."""
    return path.with_name(f".{path.name}{_BESIDE}")


def stage_file(path: Path, data: bytes) -> None:
    """Write a file's new content beside it, to the disk: with its mode and owner, and never through a link."""
    staged = beside(path)
    staged.unlink(missing_ok=True)
    file = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(file, "wb") as stream:
        try:
            old = path.stat()
        except FileNotFoundError:
            old = path.parent.stat()
            os.fchmod(file, old.st_mode & 0o666)
        else:
            os.fchmod(file, old.st_mode & 0o7777)
        if os.geteuid() == 0:
            os.fchown(file, old.st_uid, old.st_gid)
        stream.write(data)
        stream.flush()
        os.fsync(file)


def replace_file(path: Path, data: bytes | None) -> None:
    """Put what was staged in a file's place, or remove it; what was compiled of it goes first."""
    for compiled in compiled_of(path):
        compiled.unlink(missing_ok=True)
    if data is None:
        path.unlink(missing_ok=True)
    else:
        beside(path).replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def compiled_of(path: Path) -> list[Path]:
    """The compiled forms of a Python file."""
    return sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")) if path.suffix == ".py" else []
