"""What the jitter watchdog and its probes cost: CPU time, as a part of one core, for so many workers.

    python benchmarks/probe_cost.py --workers 1,2,8 --seconds 30 --out cost.jsonl
    python benchmarks/probe_cost.py --gpus --out cost.jsonl        # asks this machine's NVML, too
    python benchmarks/probe_cost.py --report cost.jsonl

Each worker is a family of processes with as many threads as a real one has; one thread of each makes steps. They are
looked at by the daemon's own probes, in their thread. Heartbeats as a busy worker sends them are decoded and judged by
the daemon's own watchdog, in this process's main thread, which does nothing else. With --gpus every worker has a card;
where the machine has fewer cards than workers, the same card is asked for each of them, all anew.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from commands import command
from pingpong_bus.codec import encode
from pingpong_bus.errors import UsageError
from pingpong_bus.messages import Heartbeat, SchedulerState, StepCounts, WorkerMessage
from pingpong_bus.step_times import StepTimes
from pingpongd.config import DaemonConfig, GroupConfig, JitterConfig
from pingpongd.jitter_watch import JitterWatch
from pingpongd.nvml import Nvml, NvmlRefused, load_nvml
from pingpongd.probes import Probes
from pingpongd.worker_handle import Worker
from provenance import command_line, provenance
from runs import append_line, read_lines

_FAMILY = r"""
import os, sys, threading, time
processes, threads = int(sys.argv[1]), int(sys.argv[2])
for _ in range(processes - 1):
    if os.fork() == 0:
        break
for _ in range(threads - 1):
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
os.write(1, b"%d\n" % os.getpid())
while os.getppid() != 1:
    time.sleep(0.009)
    sum(range(20_000))
"""
_STEP_MS = 10.0
_WARM_S = 8.0
"""The first looks find the busiest threads, and the driver is connected to."""


class ProbeCost(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file."""

    workers: int
    processes: int
    """Of each."""
    threads: int
    """Of each process."""
    gpu: str
    """The cards that were asked; empty: none."""
    seconds: float
    looks: int
    """At each worker."""
    probes: float
    """Part of one core: of the probes' thread."""
    watchdog: float
    """The same, of the main thread: heartbeats decoded and judged."""
    look_ms: float
    """CPU time of one look at all workers, on average."""
    limited: bool
    """Whether the daemon's limit on its looks was in force; without it, rows say what looks at every second take."""
    provenance: dict[str, Any]

    @property
    def total(self) -> float:
        """Part of one core."""
        return self.probes + self.watchdog


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the jitter watchdog and its probes cost.")
    parser.add_argument("--workers", type=_numbers, default=[1, 2, 8], metavar="N,...")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=3, help="of each worker")
    parser.add_argument("--threads", type=int, default=80, help="of each process")
    parser.add_argument("--gpus", action="store_true", help="ask NVML for a card of each worker")
    parser.add_argument("--unlimited", action="store_true", help="look every second, whatever it takes")
    parser.add_argument("--out", type=Path, help="JSONL file that rows are added to")
    parser.add_argument("--report", type=Path, help="measure nothing, report this file")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@contextmanager
def families(count: int, processes: int, threads: int) -> Iterator[list[list[int]]]:
    """So many workers' processes; ended with the block."""
    parents: list[subprocess.Popen[str]] = []
    try:
        pids = []
        for _ in range(count):
            arguments = [sys.executable, "-c", _FAMILY, str(processes), str(threads)]
            parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
            parents.append(parent)
            assert parent.stdout is not None  # noqa: S101 - it is a pipe
            pids.append([int(parent.stdout.readline()) for _ in range(processes)])
        yield pids
    finally:
        for parent in parents:
            os.killpg(parent.pid, 9)
            parent.wait()
            if parent.stdout is not None:
                parent.stdout.close()


class ManyCards:
    """NVML with a card for every worker: those that are there, again and again."""

    def __init__(self, nvml: Nvml, count: int) -> None:
        self._nvml = nvml
        self._cards = nvml.uuids()
        if not self._cards:
            raise UsageError("--gpus: NVML knows no card here.")
        self._count = count
        self.name = str(nvml.ask("nvmlDeviceGetName", nvml.handle(self._cards[0])))

    def uuids(self) -> list[str]:
        """A name for each worker's card."""
        return [f"GPU-{index}" for index in range(self._count)]

    def handle(self, uuid: str) -> Any:
        """The card behind a name."""
        return self._nvml.handle(self._cards[int(uuid.removeprefix("GPU-")) % len(self._cards)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvml, name)


def heartbeat(number: int, pids: Sequence[int], draw: random.Random) -> Heartbeat:
    """A second of a worker that decodes, now beside appends and now not."""
    counts = []
    for kind, context in (("decode", 2048), ("decode", 4096), ("appends", 4096)):
        times = StepTimes()
        for _ in range(33):
            times.add(_STEP_MS * draw.lognormvariate(0.0, 0.04))
        buckets = times.buckets()
        counts.append(
            StepCounts(
                kind=kind,  # type: ignore[arg-type]
                decodes=1,
                context=context,
                buckets=buckets,
                worst_ms=times.worst_ms,
                total_ms=33 * _STEP_MS,
            )
        )
    scheduler = SchedulerState(
        steps=100 * number,
        step_ms=_STEP_MS,
        decode_ms=_STEP_MS,
        target_ms=12.0,
        budget_tokens=63,
        reason="best",
        append_tokens=6300 * number,
        withheld_steps=0,
        kv_usage=0.3,
    )
    return Heartbeat(
        at_ns=time.monotonic_ns(),
        open_hops=1,
        output_tokens=100 * number,
        rss_bytes=4 << 30,
        steps=100 * number,
        waiting=1,
        predicted_step_ms=_STEP_MS,
        scheduler=scheduler,
        step_counts=counts,
        pids=list(pids),
    )


async def measure(count: int, options: argparse.Namespace, nvml: Nvml | None) -> ProbeCost:
    """Watch so many workers for a while."""
    cards = None if nvml is None else ManyCards(nvml, count)

    def connect() -> Nvml:
        if cards is None:
            raise NvmlRefused(9, "not asked for")
        return cards

    devices = ["cpu:0"] * count if cards is None else cards.uuids()
    groups = [GroupConfig(name=f"g{index}", devices=[device]) for index, device in enumerate(devices)]
    config = DaemonConfig(groups=groups, jitter=JitterConfig())
    limit = {"share": 1.0} if options.unlimited else {}
    probes = Probes(config.jitter, nvml=connect, **limit)
    workers = {group.name: Worker(group, "") for group in groups}
    for worker in workers.values():
        worker.state, worker.heartbeat_s = "ready", 1.0
    watch = JitterWatch(workers, lambda: config, lambda _: None, probes)
    decoder, draw, looks = msgspec.msgpack.Decoder(WorkerMessage), random.Random(count), 0
    with families(count, options.processes, options.threads) as pids:
        ticking = asyncio.create_task(watch.run())
        began = used = judged = 0.0
        seconds = round(options.seconds + _WARM_S)
        for number in range(1, seconds + 1):
            frames = [encode(heartbeat(number, family, draw)) for family in pids]
            seen = [probes.latest(name) for name in workers]
            if number == round(_WARM_S):
                began, used, judged, looks = time.monotonic(), probes.cpu_s, 0.0, 0
            mark = time.thread_time()
            for worker, frame in zip(workers.values(), frames, strict=True):
                message = decoder.decode(frame)
                assert isinstance(message, Heartbeat)  # noqa: S101 - it was encoded above
                watch.beat(worker, message)
            judged += time.thread_time() - mark
            await asyncio.sleep(1.0)
            looks += any(probes.latest(name) is not old for name, old in zip(workers, seen, strict=True))
        passed, used = time.monotonic() - began, probes.cpu_s - used
        ticking.cancel()
        watch.close()
    return ProbeCost(
        workers=count,
        processes=options.processes,
        threads=options.threads,
        gpu="" if cards is None else cards.name,
        seconds=round(passed, 1),
        looks=looks,
        probes=round(used / passed, 6),
        watchdog=round(judged / passed, 6),
        look_ms=round(1000 * used / max(1, looks), 3),
        limited=not options.unlimited,
        provenance={**provenance(), "arguments": command_line()},
    )


def render(rows: Sequence[ProbeCost]) -> str:
    """A table for people."""
    lines = ["workers  cards            looks a second  a look, ms   probes    watchdog  total, of one core"]
    for row in rows:
        looks = f"{row.workers:>7}  {row.gpu or 'none':<15}  {row.looks / row.seconds:>14.2f}  {row.look_ms:>10.2f}"
        parts = (f"{100 * part:.3f} %" for part in (row.probes, row.watchdog, row.total))
        lines.append("   ".join([looks, *parts]))
    return "\n".join(lines)


@command
def main() -> int:
    """Measure each number of workers, one after the other."""
    options = parse_arguments()
    if options.report is not None:
        print(render(read_lines(options.report, ProbeCost)))
        return 0
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(io.StringIO()))
    try:
        nvml = load_nvml() if options.gpus else None
    except NvmlRefused as refusal:
        raise UsageError(f"--gpus: {refusal}.") from None
    rows = []
    for count in options.workers:
        rows.append(asyncio.run(measure(count, options, nvml)))
        if options.out is not None:
            append_line(options.out, rows[-1])
    print(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
