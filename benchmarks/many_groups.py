"""One supervisor with many simulated groups: what it uses, how long its part takes, and where it would end.

    python benchmarks/many_groups.py --groups 8,64,512 --time-scale 1,1,4 --out many-groups.jsonl
    python benchmarks/many_groups.py --report many-groups.jsonl

The engines take what an H200 takes (`h200_simulated.toml`); the daemon is the product's (`forked_workers.py` says how
its workers fit one machine). Chains of five agents arrive at random, as many as keep one running for every two groups.
Two things keep a machine with few cores from being what is measured, and every row has both:

- `time_scale`: model time is so many times as long as real time. The supervisor's work for a chain, a hop or a text
  stays what it is; only less of it comes in a second. What it would use in real time is what it uses for a chain, times
  the chains that would come, and what it uses when idle: heartbeats come every second of real time.
- `token_stretch`: a token stands for so many, is decoded in as many times the time, and answers have as many times
  fewer. The supervisor hears of text at intervals and not of tokens, so that its messages stay the same but for
  appends, of which fewer come. The workers have that much less to do. Above 1 no chain overlaps on one group.

CPU times are those of the processes, whatever else runs. Latencies are those of a machine that was shared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from commands import command
from group_load import ChainMaker, ChainSize, Load, status_times
from groups_config import GroupsSettings, expected_chain_ms, groups_toml, worker_config
from groups_report import GroupsRow, render, summarize
from local_daemon import LogEvent, local_daemon
from pingpong_client import AsyncClient
from pingpong_worker.figures_file import figures_kind, save_figures
from pingpongd.engine_cost import slowed
from progress_bar import counted
from runs import append_line, read_lines
from supervisor_meter import CpuReading, bell_connections, descriptors, memory_mib, read_cpu, sweeper_pid

_PROGRAM = str(Path(__file__).with_name("forked_workers.py"))
_PING_S = 2.0
"""How long a chain may be silent, in model time, before its client asks for it."""
_TIMEOUT_S = 120.0
_CLIENTS = 8
"""Connections that the load is spread over: one client may have only so much unread."""


async def measure(settings: GroupsSettings, options: argparse.Namespace) -> GroupsRow:
    """Start a daemon with these groups, load it, and say what it took."""
    pauses: list[float] = []

    def note(event: LogEvent) -> None:
        if event.get("event") == "collected":
            pauses.append(event["ms"])

    with tempfile.TemporaryDirectory(prefix="pingpong-groups-") as private:
        config = Path(private) / "groups.toml"
        config.write_text(groups_toml(settings, options.calibrate))
        if options.calibrate:
            await _measure_engine(settings, Path(private))
        begun = time.monotonic()
        async with local_daemon(config, program=[_PROGRAM], on_event=note) as folder, AsyncExitStack() as stack:
            start_s = time.monotonic() - begun
            print(f"{settings.groups} groups serve after {start_s:.0f} s", file=sys.stderr)
            ping_s = _PING_S * settings.time_scale
            clients = [
                await stack.enter_async_context(AsyncClient(folder, timeout_s=_TIMEOUT_S, ping_s=ping_s))
                for _ in range(_CLIENTS)
            ]
            return await _observe(settings, options, folder, clients, start_s, pauses)


async def _observe(
    settings: GroupsSettings,
    options: argparse.Namespace,
    folder: Path,
    clients: Sequence[AsyncClient],
    start_s: float,
    pauses: list[float],
) -> GroupsRow:
    """Read what the daemon uses without chains, while it is asked for its status, and under load."""
    size = ChainSize(prefix=options.prefix, output=max(4, options.output // settings.token_stretch))
    load = Load(clients, ChainMaker(size, settings.timing.vocabulary_size), options.mode)
    chain_s = expected_chain_ms(settings, size) / 1e3
    seconds = max(options.chain_times * chain_s, options.seconds)
    status = await clients[0].status()
    workers = [worker.pid for worker in status.workers if worker.pid]
    sweeper = sweeper_pid(status.pid)

    def read() -> CpuReading:
        return read_cpu(status.pid, workers, {"sweeper": sweeper} if sweeper else {})

    quiet_from = read()
    await asyncio.sleep(options.idle_seconds)
    idle_from = read()
    idle_status_ms = await status_times(folder, options.idle_seconds)
    quiet, idle = idle_from.since(quiet_from), read().since(idle_from)

    pauses.clear()
    busy_from = read()
    pinging = asyncio.create_task(status_times(folder, seconds))
    await load.poisson(settings.groups * options.load / chain_s, seconds)
    busy = read().since(busy_from)
    return summarize(
        settings,
        size,
        load,
        mode=options.mode,
        calibrated=options.calibrate,
        load_share=options.load,
        start_s=start_s,
        quiet=quiet,
        idle=idle,
        busy=busy,
        idle_status_ms=idle_status_ms,
        status_ms=await pinging,
        collections_ms=pauses,
        supervisor_mib=memory_mib(status.pid)[0],
        supervisor_descriptors=descriptors(status.pid),
        worker_mib=[memory_mib(pid) for pid in workers[:: max(1, len(workers) // 8)]],
        bells=bell_connections(folder),
    )


async def _measure_engine(settings: GroupsSettings, folder: Path) -> None:
    """Have one group measure its engine in real time, and keep its figures for all groups, in their own time: an engine
    that is many times as slow would only be measured with the smallest prompts."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    one = folder / "one.toml"
    one.write_text(groups_toml(msgspec.structs.replace(settings, groups=1, time_scale=1.0), calibrate=True))
    async with local_daemon(one, program=[_PROGRAM]) as sockets, AsyncClient(sockets) as client:
        (worker,) = (await client.status()).workers
    if worker.limits is not None and worker.figures is not None:
        kind = figures_kind(worker.limits, worker_config(settings))
        save_figures(kind, slowed(worker.figures, settings.time_scale))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure one supervisor with many simulated groups.")
    parser.add_argument("--groups", default="8,64,512", help="comma-separated")
    parser.add_argument("--time-scale", default="1", help="comma-separated, for each number of groups, or one for all")
    parser.add_argument("--token-stretch", type=int, default=8)
    parser.add_argument("--load", type=float, default=0.5, help="chains at once, in the mean, per group")
    parser.add_argument("--mode", default="auto", choices=["auto", "serial", "ping-pong"])
    parser.add_argument("--calibrate", action="store_true", help="measure the engines first, so that auto predicts")
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--output", type=int, default=256, help="tokens of each answer; the last one has a quarter")
    parser.add_argument("--chain-times", type=float, default=3.0, help="for how many times a chain's time chains come")
    parser.add_argument("--seconds", type=float, default=20.0, help="at least for so long")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="before, without chains")
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are added to")
    parser.add_argument("--report", type=Path, help="only report the rows of this file")
    return parser.parse_args()


async def _measure_all(options: argparse.Namespace) -> list[GroupsRow]:
    counts = [int(count) for count in options.groups.split(",")]
    scales = [float(scale) for scale in options.time_scale.split(",")]
    rows = []
    sizes = list(zip(counts, scales * len(counts) if len(scales) == 1 else scales, strict=False))
    for count, scale in counted(sizes, "sizes"):
        row = await measure(
            GroupsSettings(groups=count, time_scale=scale, token_stretch=options.token_stretch), options
        )
        rows.append(row)
        if options.out:
            append_line(options.out, row)
        print(render([row]), file=sys.stderr)
    return rows


@command
def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    rows = read_lines(options.report, GroupsRow) if options.report else asyncio.run(_measure_all(options))
    print(render(rows))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
