"""Where a downstream agent's first milliseconds go: a trace, switched on by an environment variable.

`PINGPONG_TRACE` names a folder, in the daemon's environment; every process of a worker and its engine then writes
``<pid>.jsonl`` there, a line a moment::

    {"of": "chain/1/1#7", "stage": "hashed", "at_ns": 123}

`at_ns` is CLOCK_MONOTONIC, which all processes of a host share. Without the variable nothing is wrapped, and no line of
a hot path asks for it. The stages of a hop, here:

| stage | of | when |
|---|---|---|
| rung | slot/generation | a follower of this log was woken |
| appended | hop | an append was done, or given up |
| finalized | hop | the prompt was complete, and the rest of it is handed to the engine |
| first token | hop | it is committed |
| ended | hop | the last token was committed |

`vllm_trace.py` has those of a request on its way through vLLM.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pingpong_bus.messages import HopAppended, HopEnded, HopFinalized, HopFirstToken, WorkerMessage
from pingpong_bus.subscriber import Subscriber

TRACE = "PINGPONG_TRACE"


class Moment(msgspec.Struct, frozen=True):
    """A line of a trace."""

    of: str
    stage: str
    at_ns: int


class Trace:
    """The moments of one process; any thread may note one."""

    def __init__(self, folder: Path) -> None:
        # A descriptor for the process's life; lines of several threads do not mix in a file that is appended to.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(folder / f"{os.getpid()}.jsonl", flags, 0o600)

    def note(self, of: str, stage: str, at_ns: int) -> None:
        """Write a line."""
        os.write(self._file, msgspec.json.encode(Moment(of, stage, at_ns)) + b"\n")


def read_trace(folder: Path) -> list[Moment]:
    """All moments that processes have noted so far, in the order of time."""
    decoder = msgspec.json.Decoder(Moment)
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_bytes().splitlines()]
    return sorted(map(decoder.decode, lines), key=lambda moment: moment.at_ns)


def traced_folder() -> Path | None:
    """Where to, in a process that is to be traced."""
    folder = os.environ.get(TRACE)
    return Path(folder) if folder else None


def traced_report(report: Callable[[WorkerMessage], None], subscriber: Subscriber) -> Callable[[WorkerMessage], None]:
    """What hops report through, and a subscriber that wakes them, with their moments noted where that is asked for."""
    folder = traced_folder()
    if folder is None:
        return report
    trace = Trace(folder)
    ring = subscriber.ring

    def traced_ring(slot: int, generation: int) -> bool:
        woken = ring(slot, generation)
        if woken:
            trace.note(f"{slot}/{generation}", "rung", time.monotonic_ns())
        return woken

    def traced(message: WorkerMessage) -> None:
        report(message)
        match message:
            case HopAppended():
                trace.note(message.hop, "appended", message.append.done_ns or time.monotonic_ns())
            case HopFinalized():
                trace.note(message.hop, "finalized", message.at_ns)
            case HopFirstToken():
                trace.note(message.hop, "first token", message.at_ns)
            case HopEnded():
                trace.note(message.hop, "ended", message.at_ns)

    subscriber.ring = traced_ring  # type: ignore[method-assign]
    return traced
