"""Malformed frames against every socket of a running daemon, while a good client must get the right tokens.

    python benchmarks/fuzz_sockets.py [--frames 1000000] [--seed 1]

Starts a daemon with two groups of the simulated engine. One process per socket (control.sock, workers.sock, each
bus-*.sock) sends mutated, truncated and random frames, wrong versions, long and nested ones, wrong numbers of parts,
garbage subscriptions, and bytes that are no ZeroMQ at all. A good client meanwhile runs chains, in series and read
ahead, and compares what comes. One record is appended to `benchmarks/results/fuzz-sockets.jsonl`; the exit code is 1
where a chain was wrong, or something was left of the attack.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from local_daemon import LogEvent, local_daemon
from pingpong_bus.chain import Chain
from pingpong_bus.errors import EngineError
from pingpong_bus.messages import StatusReply, SubmitOptions
from pingpong_client import AsyncClient
from profiles import Profile, ids_chain
from provenance import provenance

RESULTS = Path(__file__).parent / "results" / "fuzz-sockets.jsonl"
SHARES = {"control": 0.6, "workers": 0.2, "bus": 0.2}
"""Of all frames; the last is divided among the groups."""
SETTLE_SECONDS = 30.0
GROWTH_MIB = 96
"""Beyond this the daemon has kept what it was sent: more than its allocator and its caches take."""

CONFIG = """
engine = "simulated"
slots = 64
state_dir = "{folder}/state"
[simulated]
step_ms = 1.0
row_us = 20.0
max_model_len = 4096
[[groups]]
name = "a"
devices = ["cpu:0"]
[[groups]]
name = "b"
devices = ["cpu:0"]
"""


class Attack(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part."""

    socket: str
    frames: int
    sent: dict[str, int]
    exit_code: int


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process of the daemon's."""

    rss_mib: float
    descriptors: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has shown."""

    frames: int
    seconds: float
    attacks: list[Attack]
    refused_frames: dict[str, int]
    """As the daemon counts."""
    log_lines: dict[str, int]
    """Of the daemon during the attack, by event."""
    chains: int
    """Run by the good client during the attack."""
    wrong_chains: int
    before: dict[str, Footprint]
    after: dict[str, Footprint]

    @property
    def problems(self) -> list[str]:
        """What was not as it should be."""
        found = [
            f"{attack.socket}: the attacker ended with {attack.exit_code}"
            for attack in self.attacks
            if attack.exit_code
        ]
        if self.wrong_chains or not self.chains:
            found.append(f"{self.wrong_chains} of {self.chains} chains were wrong")
        for name, before in self.before.items():
            after = self.after.get(name)
            if after is None:
                found.append(f"{name} is gone")
            elif after.descriptors > before.descriptors:
                found.append(f"{name} holds {after.descriptors} descriptors, {before.descriptors} before")
            elif after.rss_mib > before.rss_mib + GROWTH_MIB:
                found.append(f"{name} holds {after.rss_mib:.0f} MiB, {before.rss_mib:.0f} before")
        return found


class GoodClient:
    """Runs chains, and knows what they have to give."""

    def __init__(self, path: Path) -> None:
        self.chains = 0
        self.wrong = 0
        self._client = AsyncClient(path)
        self._known: dict[int, list[list[int]]] = {}

    async def __aenter__(self) -> GoodClient:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(*error)

    async def learn(self) -> None:
        """Run every chain undisturbed, and have the workers connect to each other."""
        for salt in range(4):
            self._known[salt] = await self._outputs(salt, "serial")
            if not self._known[salt] or await self._outputs(salt, "ping-pong") != self._known[salt]:
                raise EngineError(f"chain {salt} is wrong without any attack.")

    async def run(self) -> None:
        """Run chains until cancelled."""
        while True:
            for salt, expected in self._known.items():
                for mode in ("serial", "ping-pong"):
                    right = await self._outputs(salt, mode) == expected
                    self.chains += 1
                    self.wrong += not right

    async def _outputs(self, salt: int, mode: Any) -> list[list[int]]:
        result = await self._client.run(_chain(salt), options=SubmitOptions(mode=mode))
        return [agent.output_ids for agent in result.agents] if result.state == "finished" else []

    async def status(self) -> StatusReply:
        return await self._client.status()


def _chain(salt: int) -> Chain:
    profile = Profile(name="fuzz", prefix=100, output=16, last_output=8, agents=3)
    return ids_chain(profile, seed=salt, vocabulary=4096)


async def fuzz(frames: int, seed: int) -> Outcome:
    """Attack a daemon of one's own with so many frames.

    Raises:
        PingpongError: the daemon did not start, or a request of the good client's failed.
    """
    lines: dict[str, int] = {}

    def count(event: LogEvent) -> None:
        lines[str(event.get("event"))] = lines.get(str(event.get("event")), 0) + 1

    with tempfile.TemporaryDirectory(prefix="pp-fuzz-") as folder:
        config = Path(folder) / "config.toml"
        config.write_text(CONFIG.format(folder=folder))
        async with (
            local_daemon(config, runtime_dir=Path(folder) / "run", on_event=count) as sockets,
            GoodClient(sockets / "control.sock") as good,
        ):
            await good.learn()
            lines.clear()
            before = footprints(await good.status())
            start = time.monotonic()
            working = asyncio.create_task(good.run())
            attacks = asyncio.gather(*(attack(*part) for part in parts(sockets, frames, seed)))
            await asyncio.wait({working, attacks}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            done = await attacks
            seconds = time.monotonic() - start
            working.cancel()
            await asyncio.wait({working})
            status = await good.status()
            after = await settled(status, before)
            return Outcome(
                frames=frames,
                seconds=round(seconds, 1),
                attacks=done,
                refused_frames=status.refused_frames,
                log_lines=dict(lines),
                chains=good.chains,
                wrong_chains=good.wrong,
                before=before,
                after=after,
            )


def parts(sockets: Path, frames: int, seed: int) -> list[tuple[Path, str, int, int]]:
    """Arguments of every attack: the socket, its kind, how many frames, the seed."""
    bells = sorted(sockets.glob("bus-*.sock"))
    targets = [(sockets / "control.sock", "control", 1), (sockets / "workers.sock", "workers", 1)]
    targets += [(bell, "bus", len(bells)) for bell in bells]
    return [
        (path, kind, max(1, round(frames * SHARES[kind] / share)), seed + at)
        for at, (path, kind, share) in enumerate(targets)
    ]


async def attack(path: Path, kind: str, frames: int, seed: int) -> Attack:
    """Run one attacker to its end."""
    script = Path(__file__).parent / "fuzz_attack.py"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), str(path), kind, str(frames), str(seed)), stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None  # noqa: S101 - it has ended
    sent = json.loads(output) if process.returncode == 0 else {}
    return Attack(socket=path.name, frames=frames, sent=sent, exit_code=process.returncode)


def footprints(status: StatusReply) -> dict[str, Footprint]:
    """Of the daemon and its workers."""
    found = {}
    for name, pid in [("daemon", status.pid), *((worker.name, worker.pid) for worker in status.workers)]:
        if pid is not None and psutil.pid_exists(pid):
            process = psutil.Process(pid)
            rss_mib = round(process.memory_info().rss / 2**20, 1)
            found[name] = Footprint(rss_mib=rss_mib, descriptors=process.num_fds())
    return found


async def settled(status: StatusReply, before: dict[str, Footprint]) -> dict[str, Footprint]:
    """The footprints once no more descriptors are held than before, or when they have had their time."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        after = footprints(status)
        held = {name: print_.descriptors for name, print_ in after.items()}
        if all(held.get(name, 0) <= print_.descriptors for name, print_ in before.items()):
            return after
        if time.monotonic() > deadline:
            return after
        await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    outcome = asyncio.run(fuzz(arguments.frames, arguments.seed))
    record = {
        "benchmark": "fuzz-sockets",
        **provenance(),
        "settings": {"frames": arguments.frames, "seed": arguments.seed},
        **msgspec.to_builtins(outcome),
        "problems": outcome.problems,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    sent = sum(sum(attack.sent.values()) for attack in outcome.attacks)
    print(f"{sent} frames in {outcome.seconds:.0f} s; refused: {outcome.refused_frames}")
    print(f"{outcome.chains} chains beside them, {outcome.wrong_chains} wrong")
    for name, before in outcome.before.items():
        after = outcome.after.get(name)
        print(f"{name:8} {before} -> {after}")
    for problem in outcome.problems:
        print(f"PROBLEM: {problem}")
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
