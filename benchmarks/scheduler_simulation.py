"""Runs random schedules on the decode-first scheduler of whichever vLLM can be imported, without an engine.

    python benchmarks/scheduler_simulation.py --schedules 10000 --jobs 2 --out scheduler-simulation.jsonl
    PYTHONPATH=/path/to/another/vllm python benchmarks/scheduler_simulation.py ...

`tests/random_schedules.py` says what a schedule is, and what must never be. Exits 1 where it was; the seeds that showed
it are in the result, and run alone with --first SEED --schedules 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

_SHARE = 50
"""Schedules that a process takes at once."""


class Result(msgspec.Struct, kw_only=True):
    """A line of the results file: all schedules of one kind of scheduler."""

    vllm: str
    scheduler: str
    first_seed: int
    schedules: int
    steps: int = 0
    """Of the engine core."""
    requests: int = 0
    """Those that came, appends and chunks of sessions among them."""
    preempted: int = 0
    streaming: int = 0
    """Schedules with streaming-input sessions."""
    seconds: float = 0.0
    """Of all processes together."""
    violations: list[str] = []
    """Each names its seed and what went wrong."""
    provenance: dict[str, Any] = {}


class Share(msgspec.Struct):
    """What a process found in some schedules, by whether their scheduler plans ahead."""

    steps: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    requests: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    preempted: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    streaming: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    seconds: list[float] = msgspec.field(default_factory=lambda: [0.0, 0.0])
    violations: list[list[str]] = msgspec.field(default_factory=lambda: [[], []])


def run_share(seeds: range) -> Share:
    """Run some schedules in this process."""
    from random_schedules import Violation, run_schedule, setup_of

    share = Share()
    for seed in seeds:
        setup, begun = setup_of(seed), time.perf_counter()
        kind = int(setup.asynchronous)
        try:
            world = run_schedule(seed)
        except Violation as violation:
            share.violations[kind].append(str(violation))
        else:
            share.steps[kind] += world.steps
            share.requests[kind] += world.requests
            share.preempted[kind] += world.preempted
        share.streaming[kind] += setup.streaming
        share.seconds[kind] += time.perf_counter() - begun
    return share


def run(first: int, count: int, jobs: int) -> list[Result]:
    """Run schedules; one result for each kind of scheduler.

    Args:
        first: seed of the first one.
        count: how many.
        jobs: processes.
    """
    import vllm

    results = [
        Result(vllm=vllm.__version__, scheduler=name, first_seed=first, schedules=0, provenance=provenance())
        for name in ("DecodeFirstScheduler", "AsyncDecodeFirstScheduler")
    ]
    ends = range(first, first + count)
    shares = [ends[at : at + _SHARE] for at in range(0, count, _SHARE)]
    for done, share in enumerate(_run_shares(shares, jobs), 1):
        for kind, result in enumerate(results):
            result.steps += share.steps[kind]
            result.requests += share.requests[kind]
            result.preempted += share.preempted[kind]
            result.streaming += share.streaming[kind]
            result.seconds = round(result.seconds + share.seconds[kind], 1)
            result.violations += share.violations[kind]
        violations = sum(len(result.violations) for result in results)
        print(f"\r{min(done * _SHARE, count)} of {count} schedules, {violations} violations", end="", flush=True)
    print()
    for kind, result in enumerate(results):
        result.schedules = sum(1 for seed in ends if seed % 2 == kind)
    return results


def _run_shares(shares: list[range], jobs: int) -> Iterator[Share]:
    if jobs == 1:
        yield from map(run_share, shares)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_share, shares)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="JSONL file to append the results to")
    options = parser.parse_args()
    results = run(options.first, options.schedules, options.jobs)
    for result in results:
        print(
            f"vLLM {result.vllm}, {result.scheduler}: {result.schedules} schedules, {result.requests} requests, "
            f"{result.steps} steps, {result.preempted} pre-emptions, {len(result.violations)} violations"
        )
        for violation in result.violations[:10]:
            print(f"  {violation}")
    if options.out is not None:
        with options.out.open("ab") as file:
            for result in results:
                file.write(msgspec.json.encode(result) + b"\n")
    sys.exit(any(result.violations for result in results))


if __name__ == "__main__":
    main()
