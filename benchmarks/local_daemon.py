"""A daemon of one's own for the time of a measurement: started, waited for, stopped, with nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from pingpong_bus.errors import PingpongError
from progress_bar import start_shown

LogEvent = dict[str, Any]
PROGRAM = ("-m", "pingpongd")

STOP_S = 60.0
"""An engine takes some seconds to shut down; a daemon that takes longer than this is killed."""
LINGER_S = 30.0
"""How long what a daemon has started may outlive it: the kernel takes seconds to free much pinned memory, and the next
daemon needs the device's."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
HASTE_S = 0.5
"""After a failure, how long the daemon may drain before it is told to stop at once."""


class DaemonEnded(PingpongError):
    """The daemon ended by itself."""


@asynccontextmanager
async def local_daemon(
    config: Path,
    *,
    flags: Sequence[str] = (),
    runtime_dir: Path | None = None,
    on_event: Callable[[LogEvent], None] = lambda _: None,
    program: Sequence[str] = PROGRAM,
) -> AsyncIterator[Path]:
    """Run a daemon and yield its folder of sockets once all engines serve. Its chains are kept only as long.

    SIGTERM or SIGHUP to this process ends the body like an interrupt, so that the daemon is stopped then too.

    Args:
        config: the daemon's TOML file.
        flags: more flags of `pingpongd`.
        runtime_dir: where its sockets are; None: a private temporary folder.
        on_event: is given each record of the daemon's log.
        program: what Python runs in place of pingpongd, with the same flags.

    Raises:
        DaemonEnded: it ended before it was ready; the message has its last words.
    """
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="pingpong-") as private:
        folder = runtime_dir or Path(private) / "run"
        async with daemon_process(
            config, folder, Path(private) / "state", flags=flags, on_event=on_event, program=program
        ):
            yield folder


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP cancel the task that enters it."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine always runs in a task
    loop = asyncio.get_running_loop()
    # One that is ignored stays so: `nohup` means that a closed terminal is to change nothing.
    handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


@asynccontextmanager
async def daemon_process(
    config: Path,
    folder: Path,
    state: Path,
    *,
    flags: Sequence[str] = (),
    on_event: Callable[[LogEvent], None] = lambda _: None,
    program: Sequence[str] = PROGRAM,
) -> AsyncIterator[None]:
    """Run a daemon; the body begins once all engines serve.

    Args:
        config: its TOML file.
        folder: of its sockets.
        state: where it keeps chains.
        flags: more flags of `pingpongd`.
        on_event: is given each record of its log.
        program: as of `local_daemon`.

    Raises:
        DaemonEnded: it ended before it was ready; the message has its last words.
    """
    ready = asyncio.Event()
    last_lines: deque[str] = deque(maxlen=5)

    async def read_log(log: asyncio.StreamReader) -> None:
        async for line in log:
            try:
                event = msgspec.json.decode(line, type=LogEvent)
            except msgspec.MsgspecError:  # a line that no logger wrote: a warning, or the error that it ends with
                last_lines.append(line.decode(errors="replace").strip())
                continue
            if event.get("event") == "daemon_ready":
                ready.set()
            on_event(event)

    async with _pipe() as (log, writing_end):
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *(*program, "--config", str(config), "--runtime-dir", str(folder), "--log-format", "json", *flags),
                stderr=writing_end,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "STATE_DIRECTORY": str(state)},
                start_new_session=True,  # an interrupt at the terminal reaches us alone; we stop it in our own time
            )
        finally:
            os.close(writing_end)
        reading, waiting = asyncio.create_task(read_log(log)), asyncio.create_task(ready.wait())
        ended = asyncio.create_task(process.wait())
        haste = True
        try:
            async with start_shown(folder):
                await asyncio.wait({ended, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.is_set():
                await asyncio.wait({reading}, timeout=HASTE_S)
                raise DaemonEnded(" ".join(last_lines) or f"the daemon ended with code {await process.wait()}.")
            yield
            haste = False
        finally:
            try:
                await _stop(process, haste=haste)
                _, lingering = await asyncio.wait({reading}, timeout=LINGER_S)
                if lingering:
                    print(f"something that the daemon started has outlived it by {LINGER_S:g} s", file=sys.stderr)
            finally:
                for task in (reading, waiting, ended):
                    task.cancel()
                await asyncio.gather(reading, waiting, ended, return_exceptions=True)


@asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A pipe: what reads it, and its other end, which is the caller's to close.

    Not asyncio's own for a process: that takes one for alive whose pipe another has open, and cannot be closed before.
    """
    reader = asyncio.StreamReader(limit=2**22)
    reading_end, writing_end = os.pipe()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading_end, "rb", 0)
    )
    try:
        yield reader, writing_end
    finally:
        transport.close()


async def _stop(process: asyncio.subprocess.Process, *, haste: bool) -> None:
    """End the daemon and wait for it; an interrupt while waiting does not make us leave it behind."""
    limits = [HASTE_S, STOP_S] if haste else [STOP_S]
    for limit in limits:
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), limit)
    if process.returncode is None:
        process.kill()
        await process.wait()
