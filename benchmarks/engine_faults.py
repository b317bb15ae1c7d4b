#!/usr/bin/env python3
"""Kill processes of a daemon with real engines, and measure what becomes of its chain and what is left behind.

    python benchmarks/engine_faults.py --config benchmarks/h200.toml --profile gpu-4k --out faults.jsonl

Each fault hits a chain that is being written, read ahead on two groups. Its follower must get every token once, and
those that were committed before the fault must stand in the result. Where the daemon is killed, `gone` is the time
until no process, device memory, segment or socket of its is left. GPU memory is asked of nvidia-smi, where there is
one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import ChainEvent, ChainResult, SubmitOptions
from pingpong_client import AsyncClient
from pingpong_worker.shared_memory_names import instance_prefix, segments
from profiles import PROFILES, ids_chain
from provenance import provenance

START_S = 400.0
HANG_S = 180.0
OPTIONS = SubmitOptions(mode="ping-pong")


class Daemon:
    """A daemon that can be killed and started again on the same folders."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.config = config
        self.runtime = folder / "run"
        self.log = folder / "log"
        self._state = folder / "state"
        self._process: subprocess.Popen[bytes] | None = None
        self.family: list[psutil.Process] = []

    def start(self) -> None:
        """Start it; it loads for a while."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pingpongd", "--config", str(self.config)),
                    *("--runtime-dir", str(self.runtime), "--log-format", "json"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"STATE_DIRECTORY": str(self._state)},
                start_new_session=True,
            )

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """Its process."""
        assert self._process is not None  # noqa: S101 - started before it is asked for
        return self._process

    async def ready(self, seconds: float = START_S) -> float:
        """Wait until every group serves; returns the seconds that it took."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            if self.running.poll() is not None:
                raise SystemExit(f"the daemon ended with {self.running.returncode}:\n{self.log.read_text()[-3000:]}")
            try:
                async with AsyncClient(self.runtime, reconnect_s=0) as client:
                    if (await client.status()).state == "ready":
                        self.family = psutil.Process(self.running.pid).children(recursive=True)
                        return time.monotonic() - begun
            except PingpongError:
                pass
            await asyncio.sleep(0.2)
        raise SystemExit(f"the daemon is not ready after {seconds:g} s:\n{self.log.read_text()[-3000:]}")

    def note_family(self) -> None:
        """Remember what it has started by now."""
        self.family = psutil.Process(self.running.pid).children(recursive=True)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's records of one name."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [record for line in lines if line.startswith("{") and (record := json.loads(line))["event"] == name]

    def engine_of(self, worker_pid: int) -> psutil.Process:
        """The process that runs a worker's engine: the one of its descendants that computes most."""
        found = psutil.Process(worker_pid).children(recursive=True)
        return max(found, key=lambda process: sum(process.cpu_times()[:2]))

    def left(self) -> list[str]:
        """What of it is still there."""
        found = [f"pid {process.pid}" for process in self.family if _runs(process)]
        if self.runtime.exists():
            found += [entry.name for entry in self.runtime.iterdir()]
        return found + segments(instance_prefix(self.runtime))

    async def gone(self, memory_before: list[int]) -> dict[str, float]:
        """Wait until nothing is left; seconds until processes and files, and until the memory of GPUs, were free."""
        begun, times = time.monotonic(), {}
        while len(times) < 2 and time.monotonic() - begun < HANG_S:
            now = time.monotonic() - begun
            if "everything" not in times and not self.left():
                times["everything"] = round(now, 2)
            used = gpu_memory_mib()
            if "gpu_memory" not in times and all(a <= b + 64 for a, b in zip(used, memory_before, strict=True)):
                times["gpu_memory"] = round(now, 2)
            await asyncio.sleep(0.02)
        return times


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gpu_memory_mib() -> list[int]:
    """Used memory of each GPU; empty without any."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return [int(line) for line in listed.stdout.split()]


class Follower:
    """What a client has got of a chain, put together from its events."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self.gaps = 0
        """Events that did not go on where the one before had ended."""

    def take(self, event: ChainEvent) -> None:
        """Apply an event."""
        if event.kind == "tokens":
            known = self.ids.setdefault(event.agent, [])
            self.gaps += event.data["first_index"] != len(known)
            known += event.data["ids"]
        elif event.kind == "agent_restarted":
            self.ids.pop(event.agent, None)

    def agrees(self, result: ChainResult) -> bool:
        """Whether it is what the result has."""
        equal = all(self.ids.get(agent.name, []) == agent.output_ids for agent in result.agents)
        return equal and self.gaps == 0


async def struck(
    daemon: Daemon, profile: str, seed: int, strike: Callable[[ChainResult], None], *, again: bool = False
) -> dict[str, Any]:
    """Run a chain, strike while its second agent writes, and see it to its end.

    Args:
        again: the daemon is struck: wait for its end, note what is left, start it anew.
    """
    memory = gpu_memory_mib() if not again else IDLE_MEMORY
    chain = ids_chain(PROFILES[profile], seed=seed)
    follower, outcome = Follower(), {}
    async with AsyncClient(daemon.runtime, reconnect_s=START_S) as client:
        number = await client.submit(chain, options=OPTIONS, follow=True)

        async def follow() -> None:
            async for event in client.follow(number):
                follower.take(event)

        following = asyncio.create_task(follow())
        daemon.note_family()  # now: a struck agent must not have finished by the time that this takes
        async with asyncio.timeout(HANG_S):
            while len((before := await client.result(number)).agents[1].output_ids) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        begun = time.monotonic()
        strike(before)
        if again:
            daemon.running.wait(HANG_S)
            outcome["gone_s"] = await daemon.gone(memory)
            daemon.start()
            outcome["serves_again_s"] = round(await daemon.ready(), 1)
        async with asyncio.timeout(START_S):
            await following
        outcome["chain_ended_s"] = round(time.monotonic() - begun, 1)
        result = await client.result(number)
        if not again:
            await daemon.ready()
            outcome["serves_again_s"] = round(time.monotonic() - begun, 1)
    kept = len(before.agents[0].output_ids)
    return outcome | {
        "state": result.state,
        "resumed": [msgspec.to_builtins(entry) for agent in result.agents for entry in agent.resumed],
        "attempts": [agent.attempt for agent in result.agents],
        "every_token_once": follower.agrees(result),
        "finished_agent_kept": result.agents[0].output_ids[:kept] == before.agents[0].output_ids,
        "lost_s": [entry["timestamp"] for entry in daemon.events("hop_lost")][-1:],
    }


IDLE_MEMORY = gpu_memory_mib()


def worker_pid(result: ChainResult, workers: dict[str, int]) -> int:
    """Of the worker that the second agent writes on."""
    return workers[result.agents[1].worker]


async def run(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All faults, one after the other."""
    daemon, rows = Daemon(options.config.resolve(), folder), []

    async def workers() -> dict[str, int]:
        async with AsyncClient(daemon.runtime) as client:
            return {worker.name: worker.pid or 0 for worker in (await client.status()).workers}

    def row(fault: str, outcome: dict[str, Any]) -> None:
        rows.append({"fault": fault, **outcome})
        print(json.dumps(rows[-1]), flush=True)

    daemon.start()
    row("first start", {"serves_again_s": round(await daemon.ready(), 1)})
    for seed, name in enumerate(options.engine_signals.split(",")):
        pids = await workers()
        engines = {pid: daemon.engine_of(pid) for pid in pids.values()}
        number = signal.Signals[name]

        def hit_engine(
            before: ChainResult,
            pids: dict[str, int] = pids,
            engines: dict[int, psutil.Process] = engines,
            number: int = number,
        ) -> None:
            engines[worker_pid(before, pids)].send_signal(number)

        row(f"{name} engine, decoding", await struck(daemon, options.profile, seed, hit_engine))
    pids = await workers()
    row(
        "SIGKILL worker, decoding",
        await struck(daemon, options.profile, 3, lambda before: os.kill(worker_pid(before, pids), signal.SIGKILL)),
    )
    row(
        "SIGKILL daemon, decoding",
        await struck(daemon, options.profile, 4, lambda _: daemon.running.kill(), again=True),
    )
    daemon.running.kill()
    daemon.running.wait()
    await daemon.gone(IDLE_MEMORY)
    daemon.start()
    begun = time.monotonic()
    while time.monotonic() - begun < options.loading_s and max(gpu_memory_mib(), default=0) < options.loading_mib:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    daemon.note_family()
    loaded = gpu_memory_mib()
    daemon.running.kill()
    daemon.running.wait()
    row("SIGKILL daemon, loading", {"gone_s": await daemon.gone(IDLE_MEMORY), "gpu_memory_mib_then": loaded})
    daemon.start()
    ready = round(await daemon.ready(), 1)
    daemon.running.terminate()
    code = daemon.running.wait(HANG_S)
    row("SIGTERM daemon", {"serves_again_s": ready, "exit_code": code, "gone_s": await daemon.gone(IDLE_MEMORY)})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="two groups of real engines")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="cpu")
    parser.add_argument("--engine-signals", default="SIGKILL,SIGSTOP,SIGSEGV", help="what engines are hit with")
    parser.add_argument("--loading-s", type=float, default=8.0, help="when to kill a daemon that loads, at the latest")
    parser.add_argument("--loading-mib", type=int, default=4096, help="or with so much memory of a GPU in use")
    parser.add_argument("--out", type=Path, help="JSONL to append to")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="pp-faults-") as folder:
        rows = asyncio.run(run(options, Path(folder)))
    if options.out is not None:
        made = provenance()
        with options.out.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps({"benchmark": "engine_faults", **row, **made}) + "\n" for row in rows)
    ok = all(row.get("state", "finished") == "finished" and row.get("every_token_once", True) for row in rows)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
