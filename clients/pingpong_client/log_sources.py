"""Where log lines are read from: files, compressed or growing, a pipe, systemd's journal. Ctrl-C ends each wait."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import AsyncIterator, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from pingpong_bus.errors import DataError, UsageError

_CHUNK = 1 << 18
_POLL_S = 0.5
_GZIP = b"\x1f\x8b"


async def pipe_chunks(stream: BinaryIO) -> AsyncIterator[bytes]:
    """What a stream gives until its end, such as standard input's."""
    try:
        descriptor = stream.fileno()
    except OSError:  # it has none: it is in memory
        yield stream.read()
        return
    while data := await _read(descriptor):
        yield data


async def file_chunks(path: Path) -> AsyncIterator[bytes]:
    """A file's content, decompressed where it is of gzip; a compressed file that is cut gives what is there.

    Raises:
        DataError: it cannot be read.
    """
    unpack: _Gzip | None = None
    first = True
    with _open(path) as file:
        while data := await _read(file.fileno()):
            if first and data.startswith(_GZIP):
                unpack = _Gzip(path)
            first = False
            if unpack is None:
                yield data
            else:
                for part in unpack.feed(data):
                    yield part


async def growing_chunks(paths: Sequence[Path]) -> AsyncIterator[tuple[Path, bytes]]:
    """What files hold, and then what is written to them, for ever; a file that is replaced is begun anew.

    Raises:
        DataError: one cannot be read at first; one that vanishes later is waited for.
    """
    files = {path: _open(path) for path in paths}
    try:
        while True:
            quiet = True
            for path, file in files.items():
                while data := file.read(_CHUNK):
                    quiet = False
                    yield path, data
                    await asyncio.sleep(0)
                if _replaced(path, file):
                    if data := file.read(_CHUNK):  # what came between the last look and the rotation
                        yield path, data
                    try:
                        files[path] = _open(path)
                    except DataError:
                        if path.exists():
                            raise
                        continue  # it was rotated away once more
                    file.close()
                    quiet = False
            await asyncio.sleep(_POLL_S if quiet else 0)
    finally:
        for file in files.values():
            file.close()


async def journal_chunks(unit: str, *, since: float | None, until: float | None, follow: bool) -> AsyncIterator[bytes]:
    """What systemd's journal has of a unit, the system's or the user's own: the messages, a line each.

    Raises:
        UsageError: there is no journal here.
        DataError: it cannot be read.
    """
    command = ["journalctl", "--quiet", "--no-pager", "--output=cat", f"--unit={unit}", f"--user-unit={unit}"]
    # A second more on either side: what is exact are the lines' own times.
    command += [f"--since=@{since - 1:.0f}"] if since is not None else []
    command += [f"--until=@{until + 1:.0f}"] if until is not None else []
    command += ["--follow", "--lines=all"] if follow else []
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except FileNotFoundError:
        raise UsageError(
            "there is no journalctl here.", hint="Name the log's file, or pipe it into `pingpong-client jitter -`."
        ) from None
    assert process.stdout is not None  # noqa: S101 - asked for above
    assert process.stderr is not None  # noqa: S101
    complaint = asyncio.create_task(process.stderr.read())
    try:
        while data := await process.stdout.read(_CHUNK):
            yield data
        said = (await complaint).decode(errors="replace").strip()
        if code := await process.wait():
            raise DataError(f"journalctl ended with {code}: {said.splitlines()[-1] if said else 'it did not say why'}.")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        complaint.cancel()


def _open(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", hint="Name a log of pingpongd.") from None


def _replaced(path: Path, file: FileIO) -> bool:
    """Whether another file has the name now, or the file was emptied."""
    try:
        there, ours = path.stat(), os.fstat(file.fileno())
    except OSError:  # rotated away, and the next one is not there yet
        return False
    return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino) or there.st_size < file.tell()


async def _read(descriptor: int) -> bytes:
    """What can be read now, as soon as there is something; empty at the end.

    The descriptor is left blocking: that of a terminal is shared with standard output.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(descriptor, _done, readable)
    except PermissionError:  # a file on disk, which is always ready
        await asyncio.sleep(0)
    else:
        try:
            await readable
        finally:
            loop.remove_reader(descriptor)
    return os.read(descriptor, _CHUNK)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Gzip:
    """Unpacks a file of one or more members, piece by piece."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unpack = zlib.decompressobj(wbits=31)

    def feed(self, data: bytes) -> list[bytes]:
        parts = []
        try:
            while data:
                parts.append(self._unpack.decompress(data, _CHUNK))
                data = self._unpack.unconsumed_tail
                if self._unpack.eof:
                    data = self._unpack.unused_data
                    self._unpack = zlib.decompressobj(wbits=31)
        except zlib.error as error:
            raise DataError(f"{self._path} is damaged: {error}.", hint="Unpack what is left with `gzip -dc`.") from None
        return parts
