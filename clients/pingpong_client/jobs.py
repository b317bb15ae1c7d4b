"""Many chains from one JSON Lines file: checked first, all of them, then run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pingpong_bus.chain import MAX_CHAIN_BYTES, Chain, Exactness, parse_chain, resolve_inputs
from pingpong_bus.errors import ChainError, DaemonUnavailable, Overloaded, PingpongError
from pingpong_bus.messages import ChainResult, Mode, SubmitOptions
from pingpong_client.chain_file import load_chain
from pingpong_client.client import AsyncClient

MAX_PRIORITY = 100
MAX_DEADLINE_S = 31_536_000
"""Of `SubmitOptions`."""

_LINE_HINT = "A line has chain or path, and may have inputs, mode, exactness, speculate, priority and deadline_s."


class Job(msgspec.Struct, frozen=True):
    """One line's work."""

    line: int
    """From 1."""
    chain: Chain
    inputs: dict[str, str]
    mode: Mode | None = None
    priority: int | None = None
    deadline_s: float | None = None
    exactness: Exactness | None = None
    speculate: bool | None = None

    def options(self, common: SubmitOptions) -> SubmitOptions:
        """The options of all lines, with this line's own in their place."""
        own = {
            "mode": self.mode,
            "priority": self.priority,
            "deadline_s": self.deadline_s,
            "exactness": self.exactness,
            "speculate": self.speculate,
        }
        return msgspec.structs.replace(common, **{name: value for name, value in own.items() if value is not None})


class _JobLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chain: msgspec.Raw = msgspec.Raw()
    path: str = ""
    inputs: dict[str, str] = {}
    mode: Mode | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)] | None = None
    exactness: Exactness | None = None
    speculate: bool | None = None


class JobOutcome(msgspec.Struct, frozen=True):
    """How a line's chain ended; `result` is None where the daemon refused it."""

    line: int
    result: ChainResult | None
    error: PingpongError | None = None

    @property
    def finished(self) -> bool:
        return self.result is not None and self.result.state == "finished"

    def as_json(self) -> bytes:
        """The result's fields after the line number; a refusal has the fields `state`, `code` and `error`."""
        fields: dict[str, Any] = {"line": self.line}
        if self.result is not None:
            fields |= msgspec.to_builtins(self.result)
        elif self.error is not None:
            fields |= {"state": "failed", "code": self.error.code, "error": str(self.error)}
        return msgspec.json.encode(fields)


def parse_jobs(data: bytes, folder: Path, given: Mapping[str, str]) -> list[Job]:
    """Decode and check every line; empty lines are skipped.

    Args:
        folder: what a relative `path` is relative to.
        given: inputs for all lines; a line's own come first.

    Raises:
        ChainError: naming the line that is off.
    """
    jobs = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                jobs.append(_parse_line(number, line, folder, given))
            except ChainError as error:
                field = f"line {number}: {error.field}" if error.field else f"line {number}"
                raise ChainError(error.message, hint=error.hint, field=field) from None
    if not jobs:
        raise ChainError("the file holds no chains.", hint='Write one {"path": "chain.json"} a line.')
    return jobs


async def run_jobs(
    client: AsyncClient, jobs: list[Job], options: SubmitOptions, *, concurrency: int, running: set[str]
) -> AsyncGenerator[JobOutcome, None]:
    """Run jobs, `concurrency` at a time, and yield each as it ends.

    Args:
        running: ids of chains that have been accepted and have not ended; kept up to date for the caller.

    Raises:
        DaemonUnavailable: the daemon has gone.
    """
    waiting = iter(jobs)
    tasks: set[asyncio.Task[JobOutcome]] = set()
    try:
        while True:
            while len(tasks) < concurrency and (job := next(waiting, None)) is not None:
                tasks.add(asyncio.create_task(_run_job(client, job, options, running)))
            if not tasks:
                return
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_job(client: AsyncClient, job: Job, options: SubmitOptions, running: set[str]) -> JobOutcome:
    try:
        chain = await client.submit(job.chain, job.inputs, job.options(options), follow=True)
    except PingpongError as error:
        if isinstance(error, DaemonUnavailable) and not isinstance(error, Overloaded):
            raise
        return JobOutcome(job.line, None, error)
    running.add(chain)
    result = await client.wait(chain)
    running.discard(chain)
    return JobOutcome(job.line, result)


def _parse_line(number: int, line: bytes, folder: Path, given: Mapping[str, str]) -> Job:
    if len(line) > MAX_CHAIN_BYTES:
        raise ChainError(f"the line is {len(line)} bytes long, the limit is {MAX_CHAIN_BYTES}.")
    try:
        line.decode("utf-8")
        parsed = msgspec.json.decode(line, type=_JobLine)
    except UnicodeDecodeError as error:
        raise ChainError(f"it is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}.") from None
    except msgspec.ValidationError as error:
        raise ChainError(f"{error}.", hint=_LINE_HINT) from None
    except msgspec.DecodeError as error:
        raise ChainError(f"it is not JSON: {error}.", hint="Write one JSON object a line.") from None
    inline = bytes(parsed.chain)
    if bool(inline) == bool(parsed.path):
        raise ChainError("give either chain or path.", hint='Such as {"path": "chain.json"}.')
    chain = parse_chain(inline) if inline else load_chain(folder / parsed.path)
    common = {name: value for name, value in given.items() if name in chain.inputs}
    inputs = common | parsed.inputs
    resolve_inputs(chain, inputs)
    return Job(
        *(number, chain, inputs, parsed.mode, parsed.priority, parsed.deadline_s, parsed.exactness, parsed.speculate)
    )
