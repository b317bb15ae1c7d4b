#!/usr/bin/env python3
"""Disturb engines that decode, and measure whether the daemon notices, when it knows the cause, and when it is over.

    python benchmarks/jitter_injection.py --config examples/cpu.toml --faults cpu,stop --out injected.jsonl
    python benchmarks/jitter_injection.py --config unbudgeted.toml --faults appends --out injected.jsonl

Every group answers one prompt after the other all the time. For each fault: some seconds without, in which an alarm is
a false one; the fault, for `--hold` seconds; and the time until the group is healthy again. "appends" are chains that
read ahead beside those answers: their appends have no budget where the configuration says `decode_first.enabled =
false`. A row is a fault: seconds until the first alarm and until the right cause stood in the log, its sentence, and
seconds from the fault's end until the group was used again.

With `--routed N`, at last: a chain of five agents in series, on two groups and by `auto`, N times each without a fault,
and N times while the second group suffers from the first fault of the list.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import psutil

from commands import command
from injected_faults import FAULTS, Fault, Target, beside, own_memory_cgroup
from local_daemon import LogEvent, local_daemon
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.errors import UsageError
from pingpong_bus.messages import Mode, SubmitOptions, WorkerStatus
from pingpong_client import AsyncClient
from pingpong_worker.pinning import parse_device
from pingpongd.config import load_config
from profiles import Profile, ids_chain
from provenance import command_line, provenance

APPENDS = "appends"
_ALARMS = ("decode_jitter", "decode_jitter_cause")
_CLEAR_S = 90.0


class Seen(msgspec.Struct):
    """Log events with the times at which they were read."""

    events: list[tuple[float, LogEvent]] = []

    def take(self, event: LogEvent) -> None:
        """Take one from the daemon's log."""
        self.events.append((time.monotonic(), event))

    def since(self, at: float, names: Sequence[str], workers: Sequence[str]) -> list[tuple[float, LogEvent]]:
        """Those of some names and workers from a time on."""
        return [
            (when, it) for when, it in self.events if when >= at and it["event"] in names and it["worker"] in workers
        ]


async def keep_busy(client: AsyncClient, group: str, prompt: int, output: int) -> None:
    """Have a group answer one prompt after the other."""
    for number in itertools.count():
        ids = [(7919 * number + 31 * at) % 3_900 + 100 for at in range(prompt)]
        agent = Agent(name="only", prompt_ids=ids, max_tokens=output, ignore_eos=True)
        await client.run(Chain(name="busy", agents=[agent]), {}, SubmitOptions(group=group))


async def read_ahead(client: AsyncClient, prefix: int, output: int, seed: int) -> None:
    """Run chains that read ahead on all groups, one after the other."""
    profile = Profile(name="ahead", prefix=prefix, output=output, last_output=output, agents=4)
    for number in itertools.count(1000 * seed):
        await client.run(ids_chain(profile, seed=number, vocabulary=4_000), {}, SubmitOptions(mode="ping-pong"))


def target_of(worker: WorkerStatus, cores: Sequence[int]) -> Target:
    """What there is to disturb of a group that serves."""
    assert worker.pid is not None  # noqa: S101 - it serves
    family = [worker.pid, *(child.pid for child in psutil.Process(worker.pid).children(recursive=True))]
    found = list(cores)
    for device in worker.devices:
        parsed = parse_device(device)
        found += parsed if isinstance(parsed, list) else []
    return Target(
        worker.name, family, found or list(range(psutil.cpu_count() or 1)), worker.gpus[0].uuid if worker.gpus else ""
    )


def judged(seen: Seen, loading: float, began: float, causes: Sequence[str], workers: Sequence[str]) -> dict[str, Any]:
    """What the log says of a fault so far: times since it `began`, alarms since it was `loading`."""
    alarms = seen.since(loading, _ALARMS, workers)
    right = [(when, event) for when, event in alarms if event["cause"] in causes]
    return {
        "first_alarm_s": round(alarms[0][0] - began, 2) if alarms else None,
        "first_cause": alarms[0][1]["cause"] if alarms else None,
        "recognised_s": round(right[0][0] - began, 2) if right else None,
        "why": right[0][1]["why"] if right else (alarms[0][1]["why"] if alarms else None),
        "causes": [event["cause"] for _, event in alarms],
    }


async def healthy_again(client: AsyncClient, workers: Sequence[str]) -> float | None:
    """Seconds until all of these groups are healthy; None where one is not after a long time."""
    begun = time.monotonic()
    while time.monotonic() - begun < _CLEAR_S:
        status = await client.status()
        if all(worker.health.state == "healthy" for worker in status.workers if worker.name in workers):
            return round(time.monotonic() - begun, 2)
        await asyncio.sleep(0.1)
    return None


async def measure(
    options: argparse.Namespace, folder: Path, seen: Seen, cores: dict[str, list[int]]
) -> list[dict[str, Any]]:
    """Inject each fault, and judge what the daemon made of it."""
    rows: list[dict[str, Any]] = []
    async with AsyncClient(folder, timeout_s=120.0) as client:
        status = await client.status()
        names = [worker.name for worker in status.workers]
        busy = [keep_busy(client, name, options.prompt, options.output) for name in names]
        async with beside(*busy):
            await asyncio.sleep(options.settle)
            for round_number, name in itertools.product(range(options.rounds), options.faults):
                quiet_from = time.monotonic()
                await asyncio.sleep(options.quiet)
                status = await client.status()
                false_alarms = [event for _, event in seen.since(quiet_from, _ALARMS, names)]
                worker = status.workers[0]
                hit = names if name in (APPENDS, "memory") else [worker.name]
                causes = ("own_appends",) if name == APPENDS else FAULTS[name].causes
                loading = time.monotonic()
                if name == APPENDS:
                    loads = [
                        read_ahead(client, options.prefix, options.ahead_output, seed)
                        for seed in range(round_number * options.ahead, (round_number + 1) * options.ahead)
                    ]
                    disturbance: Any = beside(*loads)
                else:
                    fault: Fault = FAULTS[name]
                    disturbance = fault.during(target_of(worker, cores[worker.name]))
                async with disturbance:
                    began = time.monotonic()
                    await asyncio.sleep(options.hold)
                cleared = await healthy_again(client, hit)
                row = {
                    "fault": name,
                    "round": round_number,
                    "workers": hit,
                    "expected": list(causes),
                    **judged(seen, loading, began, causes, hit),
                    "cleared_s": cleared,
                    "false_alarms": [event["why"] for event in false_alarms],
                    "usual_ms": worker.itl.usual_ms,
                    "p50_ms": worker.itl.p50_ms,
                    "hold_s": options.hold,
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


async def routed(options: argparse.Namespace, folder: Path, cores: dict[str, list[int]]) -> list[dict[str, Any]]:
    """What chains take, placed by hand and by `auto`, while all is well and while the second group suffers."""
    rows: list[dict[str, Any]] = []
    profile = Profile(name="routed", prefix=options.prefix, output=options.output // 2, last_output=options.output // 8)
    fault = FAULTS[options.faults[0]]
    seeds = itertools.count(5_000)
    async with AsyncClient(folder, timeout_s=120.0) as client:
        workers = (await client.status()).workers
        disturbances: list[tuple[str, Any]] = [("none", nullcontext())]
        disturbances.append((fault.name, fault.during(target_of(workers[1], cores[workers[1].name]))))
        for name, disturbance in disturbances:
            async with disturbance:
                await client.run(
                    ids_chain(profile, seed=next(seeds), vocabulary=4_000), {}, SubmitOptions(mode="ping-pong")
                )
                for number in range(options.routed):
                    modes: list[Mode] = ["serial", "ping-pong", "auto"]
                    for mode in modes if number % 2 == 0 else modes[::-1]:
                        chain = ids_chain(profile, seed=next(seeds), vocabulary=4_000)
                        result = await client.run(chain, {}, SubmitOptions(mode=mode))
                        row = {
                            "routed": name,
                            "mode": mode,
                            "placement": result.placement,
                            "e2e_ms": result.e2e_ms,
                            "workers": [agent.worker for agent in result.agents],
                            "moved": sum(hop.state == "moved" for agent in result.agents for hop in agent.hops),
                            "why": result.why,
                        }
                        rows.append(row)
                        print(json.dumps(row), flush=True)
                        if options.results:
                            with options.results.open("ab") as out:
                                out.write(msgspec.json.encode(result) + b"\n")
    return rows


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the daemon and measure."""
    config, seen = load_config(options.config), Seen()
    cores = {group.name: group.cores for group in config.groups}
    with ExitStack() as stack:
        log = stack.enter_context(options.log.open("w")) if options.log else None
        if "memory" in options.faults:
            stack.enter_context(own_memory_cgroup())

        def take(event: LogEvent) -> None:
            seen.take(event)
            if log is not None:
                log.write(json.dumps(event) + "\n")
                log.flush()

        async with local_daemon(options.config, on_event=take) as folder:
            rows = await measure(options, folder, seen, cores)
            return rows + (await routed(options, folder, cores) if options.routed else [])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    routed_rows = [row for row in rows if "routed" in row]
    rows = [row for row in rows if "fault" in row]
    lines = [f"{'fault':9} {'alarm s':>8} {'cause s':>8} {'clear s':>8}  cause, evidence"]
    for row in rows:
        right = "" if row["recognised_s"] is not None else "WRONG: "
        shown = [
            "-" if row[key] is None else f"{row[key]:.1f}" for key in ("first_alarm_s", "recognised_s", "cleared_s")
        ]
        lines.append(
            f"{row['fault']:9} {shown[0]:>8} {shown[1]:>8} {shown[2]:>8}  {right}{row['first_cause']}: {row['why']}"
        )
        lines += [f"{'':9} false alarm: {why}" for why in row["false_alarms"]]
    for key in dict.fromkeys((row["routed"], row["mode"]) for row in routed_rows):
        times = [row["e2e_ms"] for row in routed_rows if (row["routed"], row["mode"]) == key]
        lines.append(f"second group: {key[0]:5} {key[1]:9} {statistics.mean(times):9,.0f} ms")
    return "\n".join(lines)


@command
def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--faults", default="cpu,stop", help=f"of {', '.join([*FAULTS, APPENDS])}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--settle", type=float, default=20.0, help="seconds of load before the first fault")
    parser.add_argument("--quiet", type=float, default=15.0, help="seconds without a fault before each")
    parser.add_argument("--hold", type=float, default=12.0, help="seconds that a fault goes on")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompts that keep groups busy")
    parser.add_argument("--output", type=int, default=256, help="tokens of their answers")
    parser.add_argument("--prefix", type=int, default=1500, help="tokens of each agent's own text, for appends")
    parser.add_argument("--ahead", type=int, default=2, help="chains that read ahead at once, for appends")
    parser.add_argument("--ahead-output", type=int, default=64, help="tokens that each of their agents writes")
    parser.add_argument("--routed", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log", type=Path, help="where the daemon's log is kept")
    parser.add_argument("--results", type=Path, help="where the routed chains' results are kept")
    options = parser.parse_args()
    options.faults = options.faults.split(",")
    for name in options.faults:
        if name not in FAULTS and name != APPENDS:
            raise UsageError(
                f'there is no fault "{name}".', field="--faults", hint=f"There are: {', '.join([*FAULTS, APPENDS])}."
            )
    rows = asyncio.run(run(options))
    about = {"provenance": provenance(), "arguments": command_line()}
    if options.out:
        with options.out.open("a") as out:
            out.writelines(json.dumps(row | about) + "\n" for row in rows)
    print(table(rows))
    injected = [row for row in rows if "fault" in row]
    return 0 if all(row["recognised_s"] is not None and row["cleared_s"] is not None for row in injected) else 1


if __name__ == "__main__":
    raise SystemExit(main())
