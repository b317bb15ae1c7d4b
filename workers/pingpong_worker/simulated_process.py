"""The simulated engine's child process: runs the scheduler in real time. Light, for tests start many.

Started as ``python -m pingpong_worker.simulated_process PARENT_PID`` with a pipe on standard input and output.
"""

from __future__ import annotations

import os
import select
import sys
import time
from typing import NoReturn

import msgspec

from pingpong_bus.messages import SchedulerState
from pingpong_worker.garbage_watch import collections_of_this_process
from pingpong_worker.parent_death import die_with_parent
from pingpong_worker.simulated_arrivals import Arrivals
from pingpong_worker.simulated_bursts import Bursts
from pingpong_worker.simulated_messages import (
    LENGTH_BYTES,
    Abort,
    CacheReset,
    Chunk,
    Command,
    Configure,
    Loaded,
    Reply,
    ResetCache,
    Scheduled,
    Started,
    frame,
)
from pingpong_worker.simulated_scheduler import SimulatedScheduler
from pingpong_worker.simulated_timing import TimingModel

_STDIN, _STDOUT = 0, 1
_SHARDS = 10
_DECODER = msgspec.msgpack.Decoder(Command)


class CommandPipe:
    """Commands from the parent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()

    def receive(self, timeout_s: float | None) -> list[Command]:
        """What has come, after waiting for something at most `timeout_s`; None waits for ever.

        Raises:
            EOFError: the parent closed the pipe.
        """
        if select.select([self._descriptor], [], [], timeout_s)[0]:
            data = os.read(self._descriptor, 1 << 20)
            if not data:
                raise EOFError
            self._buffer += data
        commands = []
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
            if len(self._buffer) < end:
                break
            commands.append(_DECODER.decode(self._buffer[LENGTH_BYTES:end]))
            del self._buffer[:end]
        return commands


class SimulatedModel:
    """Serves commands until the parent closes the pipe."""

    def __init__(self, pipe: CommandPipe) -> None:
        self._pipe = pipe
        setup = self._configure()
        self._load(setup.settings.start_ms * 1e-3 * setup.settings.time_scale)
        self._arrivals = Arrivals(TimingModel(setup.settings))
        self._scheduler = SimulatedScheduler(setup.settings, decode_first=setup.decode_first, keep=setup.keep)
        self._bursts = Bursts(setup.settings)
        self._collections = collections_of_this_process()
        self._shown: SchedulerState | None = None
        self._started = time.monotonic()
        self._send([Started()])

    def serve(self) -> NoReturn:
        """Run steps back to back while there is work; raises EOFError at the end."""
        while True:
            self._take(0)
            step = self._scheduler.plan()
            if step is None:
                self._send(self._changes(self._shown))  # something was aborted, perhaps
                self._take(self._arrivals.wait_s(time.monotonic()))
                continue
            begun = time.monotonic()
            end = self._started + self._bursts.end_of(begun - self._started, step.duration_s)
            while (left := end - time.monotonic()) > 0:
                self._take(left)
            replies = self._scheduler.commit(step)
            took_ms = (end - begun) * 1e3
            state = msgspec.structs.replace(step.state, step_ms=took_ms) if step.state else self._shown
            self._send(replies + self._changes(state))

    def _load(self, seconds: float) -> None:
        for shard in range(_SHARDS if seconds > 0 else 0):
            self._send([Loaded(shard, _SHARDS)])
            time.sleep(seconds / _SHARDS)

    def _changes(self, state: SchedulerState | None) -> list[Reply]:
        """What the scheduler did last, with what holds memory by now, where that is news."""
        if state is None:
            return []
        state = msgspec.structs.replace(
            state, kv_usage=self._scheduler.kv_usage, kv_kept=self._scheduler.kv_kept, gc_ms=self._collections.total_ms
        )
        if state == self._shown:
            return []
        self._shown = state
        return [Scheduled(state)]

    def _configure(self) -> Configure:
        while True:
            for command in self._pipe.receive(None):
                if isinstance(command, Configure):
                    return command

    def _take(self, timeout_s: float | None) -> None:
        for command in self._pipe.receive(timeout_s):
            match command:
                case Chunk():
                    self._arrivals.add(command, time.monotonic())
                case Abort(request):
                    self._arrivals.drop(request)
                    self._scheduler.abort(request)
                case ResetCache():
                    self._scheduler.reset_prefix_cache()
                    self._send([CacheReset()])
                case Configure():
                    raise ValueError("configured twice")
        for chunk in self._arrivals.take(time.monotonic()):
            self._scheduler.add(chunk)

    def _send(self, replies: list[Reply]) -> None:
        if not replies:
            return
        view = memoryview(frame(replies))
        while view:
            view = view[os.write(_STDOUT, view) :]


def main() -> None:
    """Run until the parent closes the pipe or dies."""
    if not die_with_parent(int(sys.argv[1])):
        return
    try:
        SimulatedModel(CommandPipe(_STDIN)).serve()
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    main()
