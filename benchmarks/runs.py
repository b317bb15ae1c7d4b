"""One measured run of a chain, and the JSONL file that keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from pingpong_bus.chain import Exactness
from pingpong_bus.errors import DataError
from pingpong_bus.messages import ChainResult

RunMode = Literal["serial", "ping-pong", "overlap", "auto", "presend"]
RUN_MODES: tuple[RunMode, ...] = ("serial", "ping-pong", "overlap", "auto", "presend")
GROUPED_MODES: tuple[RunMode, ...] = ("serial", "overlap", "presend")
"""Those that may be held to one group."""

Line = TypeVar("Line", bound=msgspec.Struct)


class DeviceGaps(msgspec.Struct, frozen=True, kw_only=True):
    """When tokens came from one device group in one run, by its doorbells."""

    group: str
    devices: list[str]
    gaps_us: list[int]
    """Between neighbouring doorbells of one agent, over all agents that it decoded; microseconds."""
    missed: int = 0
    """Tokens of which no doorbell was heard."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file."""

    profile: str
    mode: RunMode
    group: str = ""
    """The one group that the mode was held to; empty: it chose."""
    daemon: str = ""
    """Which of several daemons of one suite; see `suite.py`. Empty where there is one."""
    baseline: str = "serial"
    """The `row` that this one is compared with; a baseline names itself."""
    suite: str = ""
    """Runs of one suite, on whatever daemon, were made side by side on one machine. Empty: by chain.py."""
    cell: str = ""
    """Of the suite."""
    cache: Literal["cold", "warm"]
    """What prefix caches held before the run: nothing, or the static prefixes of all agents."""
    index: int
    """Runs of one index stand side by side: they are what is compared."""
    warmup: bool = False
    """Run to warm up; no report counts it."""
    e2e_ms: float
    """Submission to last token, by the daemon's clock; of presend, as the client sees it (it is a client's doing)."""
    wall_ms: float
    """First request to last answer, by the client's clock."""
    result: ChainResult
    """Of presend, put together from the results of its requests, with their times since the first one's submission."""
    max_tokens: list[int]
    """Of each agent."""
    reads: list[list[int]] | None = None
    """Of each agent, the agents that it reads; None in older files: each reads the one before."""
    session: str = "default"
    """The kind of session that was asked for."""
    append_tokens: int | None = None
    """What was asked for; None: the daemon's own."""
    exactness: Exactness = "fast"
    """That it ran at; the cell of "grid" is in the result."""
    forced_lengths: bool = False
    """Whether nothing could end an answer before its `max_tokens`, by the command line."""
    seed: int | None = None
    """Of the chain's ids, and of sampling."""
    temperature: float = 0.0
    gaps: list[DeviceGaps] = []
    """Empty in files that are older than it."""
    provenance: dict[str, Any] = {}

    @property
    def row(self) -> str:
        """What a report calls it: "serial", "overlap@gpu0", "stock serial@gpu1"."""
        return row_name(self.daemon, self.mode, self.group)


def row_name(daemon: str, mode: RunMode, group: str) -> str:
    """Daemon, mode and group as one name; the first and the last may be empty."""
    return f"{daemon} {mode}{'@' if group else ''}{group}".strip()


def append_line(path: Path, line: msgspec.Struct) -> None:
    """Add a line to a results file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """All runs of some results files, in order.

    Raises:
        DataError: a file cannot be read, or a line is no run.
    """
    return [run for path in paths for run in read_lines(path, Run)]


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """A file of JSON lines of one kind; empty ones are skipped.

    Raises:
        DataError: it cannot be read, or a line is not of this kind.
    """
    return decoded_lines(path, kind, kind.__name__)


def decoded_lines(path: Path, kind: Any, name: str) -> list[Any]:
    """A file of JSON lines of some kinds; empty ones are skipped.

    Args:
        kind: a type, or a union of tagged ones.
        name: of a line, for errors.

    Raises:
        DataError: it cannot be read, or a line is not of this kind.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    decoder = msgspec.json.Decoder(kind)
    found: list[Any] = []
    for number, line in enumerate(lines, 1):
        try:
            found += [decoder.decode(line)] if line.strip() else []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {number}, is no {name}: {error}.") from None
    return found


def length_faults(run: Run) -> list[str]:
    """Agents that did not write exactly their `max_tokens`, as sentences."""
    return [
        f"{run.row} run {run.index}: {agent.name} wrote {agent.output_tokens} tokens, not {expected}"
        for agent, expected in zip(run.result.agents, run.max_tokens, strict=True)
        if agent.output_tokens != expected
    ]
