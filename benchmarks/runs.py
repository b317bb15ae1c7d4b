"""One measured run of a chain, and the JSONL file that keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from pingpong_bus.messages import ChainResult

RunMode = Literal["serial", "ping-pong", "auto", "presend"]
RUN_MODES: tuple[RunMode, ...] = ("serial", "ping-pong", "auto", "presend")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file."""

    profile: str
    mode: RunMode
    cache: Literal["cold", "warm"]
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
    session: str = "default"
    """The kind of session that was asked for."""
    seed: int | None = None
    temperature: float = 0.0
    provenance: dict[str, Any] = {}


def append_run(path: Path, run: Run) -> None:
    """Add a line to a results file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(run) + b"\n")


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """All runs of some results files, in order.

    Raises:
        msgspec.ValidationError: a line is no run.
    """
    decoder = msgspec.json.Decoder(Run)
    return [decoder.decode(line) for path in paths for line in path.read_bytes().splitlines() if line.strip()]


def length_faults(run: Run) -> list[str]:
    """Agents that did not write exactly their `max_tokens`, as sentences."""
    return [
        f"{run.mode} run {run.index}: {agent.name} wrote {agent.output_tokens} tokens, not {expected}"
        for agent, expected in zip(run.result.agents, run.max_tokens, strict=True)
        if agent.output_tokens != expected
    ]
