"""A `call` step's command: its input on standard input, its answer on standard output. No shell."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pingpong_bus.errors import ChainFailed
from pingpongd.calls import quoted
from pingpongd.child_process import ChildProcess
from pingpongd.process import Guard

GRACE_S = 0.5
"""Between SIGTERM and SIGKILL."""
_PASSED_ON = ("PATH", "HOME", "LANG")
_TAIL_BYTES = 2000
"""Of what it wrote to its standard error last, told where it fails."""
_LAST_OUTPUT_S = 1.0
"""How long its output may stay open once it has ended: somebody who left its session may hold it."""


def environment_of(own: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """A command's whole environment: nothing of the daemon's but what every program needs, and what is given."""
    return {name: own[name] for name in _PASSED_ON if name in own} | dict(given)


async def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    text: str,
    *,
    timeout_s: float,
    most_bytes: int,
    guard: Guard | None = None,
) -> str:
    """Run a command to its end, and return what it wrote to its standard output, without a line break at its end.

    Cancelled, it ends the command and all that it has started.

    Args:
        command: program and arguments.
        environment: its whole environment, see `environment_of`.
        text: its input, in UTF-8.
        timeout_s: it is ended after so many seconds, with all that it has started.
        most_bytes: of its output; more is an error.
        guard: ends it where this process cannot.

    Raises:
        ChainFailed: it cannot be started, takes too long, writes too much or what is not UTF-8, or ends with another
            exit code than 0.
    """
    try:
        child = await ChildProcess.start(command, environment, guard=guard)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        missing = isinstance(error, FileNotFoundError)
        hint = "Install it, or give its whole path in the configuration's `[calls]`." if missing else ""
        raise ChainFailed(f"{command[0]} cannot be started: {why}.", hint=hint) from None
    tail = _Tail()
    complaints = asyncio.create_task(tail.read(child.stderr))
    try:
        async with asyncio.timeout(timeout_s):
            child.write(text.encode(), close=True)
            output, code = await _finish(child, most_bytes)
            if output is not None:
                await asyncio.wait({complaints}, timeout=_LAST_OUTPUT_S)
    except TimeoutError:
        await child.end(GRACE_S)
        raise ChainFailed(f"it took longer than {timeout_s:g} s and was ended{tail}.") from None
    finally:
        await asyncio.shield(child.end(GRACE_S))
        complaints.cancel()
        await asyncio.wait({complaints})
    if output is None:
        raise ChainFailed(f"it wrote more than {most_bytes} bytes and was ended.", hint="Raise max_chars of the step.")
    if code != 0:
        raise ChainFailed(f"{_ending(code)}{tail}.")
    try:
        return output.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ChainFailed(f"its output is not UTF-8: byte {error.start} is 0x{output[error.start]:02x}.") from None


async def _finish(child: ChildProcess, most_bytes: int) -> tuple[bytes | None, int]:
    """Its output, None where there is more than `most_bytes` of it; and its exit code."""
    output = bytearray()
    reading = asyncio.create_task(_read(child.stdout, output, most_bytes))
    exited = asyncio.create_task(child.exited())
    try:
        await asyncio.wait({reading, exited}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and not reading.result():
            return None, 0
        code = await exited
        if not reading.done():
            await asyncio.wait({reading}, timeout=_LAST_OUTPUT_S)
        whole = reading.result() if reading.done() else True
        return (bytes(output) if whole else None), code
    finally:
        reading.cancel()
        exited.cancel()
        await asyncio.wait({reading, exited})


async def _read(stream: asyncio.StreamReader, output: bytearray, most: int) -> bool:
    """Take what comes until its end; False where that is more than `most`."""
    while data := await stream.read(1 << 16):
        output += data
        if len(output) > most:
            return False
    return True


class _Tail:
    """The end of what a command wrote to its standard error."""

    def __init__(self) -> None:
        self._bytes = b""

    async def read(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            self._bytes = (self._bytes + data)[-_TAIL_BYTES:]

    def __str__(self) -> str:
        return quoted("the end of its error output", self._bytes.decode(errors="replace"))


def _ending(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    name = str(-code)
    with suppress(ValueError):
        name = signal.Signals(-code).name
    return f"it was ended by {name}"
