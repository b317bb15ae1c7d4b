"""Chains on two groups of which one is slowed in bursts: does acting on it keep `auto` from losing to series?

    python benchmarks/jitter_bound.py --bursts 10/20,3/10 --at-once 1,4 --seeds 0,1 --out jitter-bound.jsonl
    python benchmarks/jitter_bound.py --report jitter-bound.jsonl

Two simulated H200s (`h200_simulated.toml`). The steps of the second take twice as long in bursts whose lengths, and the
times between them, are drawn at random; only the engine knows. Each way has a daemon of its own, all of them with the
same bursts, all started together and loaded at the same time, chain after chain, or so many at once:

- `series`: in series on whichever group the daemon takes; nothing is done about slow groups.
- `series, steady`: the same on the first group alone, which no burst slows: the best that series can do.
- `auto, still`: placed by prediction; nothing is done about slow groups.
- `auto`: the product as it is: it gives a slow group no new hops, and moves hops off it.

A row of the file is one way under one load and one seed. Prefixes are cold: no two chains share a token's place.
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
from typing import Any, NamedTuple

import msgspec

from commands import command
from group_load import ChainMaker, ChainSize
from groups_config import H200, keys
from jitter_bound_report import BoundRow, render
from local_daemon import LogEvent, local_daemon
from pingpong_bus.errors import ChainFailed, DataError, UsageError
from pingpong_bus.messages import ChainResult, EngineFigures, EngineLimits, Mode, SubmitOptions
from pingpong_client import AsyncClient
from pingpong_worker.config import SimulatedSettings, WorkerConfig
from pingpong_worker.figures_file import figures_kind, save_figures
from pingpongd.config import load_config
from provenance import command_line, provenance
from runs import append_line, read_lines

STEADY, WOBBLY = "steady", "wobbly"
_QUIET_S = 25.0
"""From the first daemon's start to where the first burst may come on any: what is usual has to be known before."""
_LOADING_S = 0.7
"""From a daemon's start to its engines'."""
_WARM_UP = 1
"""Chains that do not count, of those that run one after another."""


class Way(NamedTuple):
    """How chains are run."""

    name: str
    mode: Mode
    group: str | None
    acts: bool


WAYS = (
    Way("series", "serial", None, acts=False),
    Way("series, steady", "serial", STEADY, acts=False),
    Way("auto, still", "auto", None, acts=False),
    Way("auto", "auto", None, acts=True),
)


class Engine(NamedTuple):
    """As it is where nothing disturbs it."""

    figures: EngineFigures
    limits: EngineLimits


class Bursts(NamedTuple):
    """How the second group is slowed: mean seconds of a burst and between two, and the seed."""

    mean_s: float
    every_s: float
    factor: float
    seed: int
    after_s: float = 0.0
    """Since the engine's start."""

    def on(self, timing: SimulatedSettings) -> SimulatedSettings:
        """An engine with them."""
        return msgspec.structs.replace(
            timing,
            burst_factor=self.factor,
            burst_s=self.mean_s,
            burst_every_s=self.every_s,
            burst_seed=self.seed,
            burst_after_s=self.after_s,
        )


def daemon_toml(bursts: Bursts | None, *, acts: bool) -> str:
    """A configuration with the two groups; None: no bursts."""
    timing = load_config(H200).simulated
    top = {"instance": "jitter-bound", "engine": "simulated", "slots": 64, "slot_tokens": 1024}
    lines = [*keys(top), "[simulated]", *keys(_builtins(timing))]
    lines += ["[jitter]", *keys({"route": acts, "move": acts})]
    lines += ["[[groups]]", *keys({"name": STEADY, "devices": ["simulated:0"]})]
    lines += ["[[groups]]", *keys({"name": WOBBLY, "devices": ["simulated:1"]})]
    if bursts is not None:
        lines += ["[groups.simulated]", *keys(_builtins(bursts.on(timing)))]
    return "\n".join(lines) + "\n"


def _builtins(timing: SimulatedSettings) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(timing).items() if value is not None}


async def quiet_engine(folder: Path) -> Engine:
    """What a daemon measures its engines to take where nothing disturbs them."""
    config = folder / "quiet.toml"
    config.write_text(daemon_toml(None, acts=False))
    async with local_daemon(config) as socket, AsyncClient(socket) as client:
        worker = (await client.status()).workers[0]
    assert worker.figures is not None  # noqa: S101 - simulated engines can always be measured
    assert worker.limits is not None  # noqa: S101 - it serves
    return Engine(worker.figures, worker.limits)


def keep_figures(engine: Engine, timing: SimulatedSettings) -> None:
    """Have engines of this timing start with what was measured without bursts."""
    config = load_config(H200)
    worker = WorkerConfig(
        name=WOBBLY,
        devices=["simulated:1"],
        engine="simulated",
        session=config.session,
        decode_first=config.decode_first.enabled,
        paces=(config.decode_first.final, config.decode_first.inner),
        simulated=timing,
        slab_fd=-1,
        control="",
        bell="",
        supervisor_pid=0,
    )
    save_figures(figures_kind(engine.limits, worker), engine.figures)


class Side:
    """A way, its daemon, and what came of its chains."""

    def __init__(self, way: Way, maker: ChainMaker, logs: Path | None) -> None:
        self.way = way
        self.results: list[ChainResult] = []
        self.events: dict[str, int] = {}
        self.file_name = way.name.replace(", ", "-")
        self._maker = maker
        self._number = 0
        self._log = logs / f"{self.file_name}.jsonl" if logs is not None else None

    def note(self, event: LogEvent) -> None:
        """Count what the daemon logs, and keep it."""
        name = event.get("event", "")
        self.events[name] = self.events.get(name, 0) + 1
        if self._log is not None:
            with self._log.open("ab") as file:
                file.write(msgspec.json.encode(event) + b"\n")

    async def run_until(self, client: AsyncClient, at_once: int, end: float) -> None:
        """Run chains, so many at once, until that time of the monotonic clock has come."""
        while time.monotonic() < end:
            chains = [self._maker.chain(self._number + at) for at in range(at_once)]
            self._number += at_once
            options = SubmitOptions(mode=self.way.mode, group=self.way.group)
            self.results += await asyncio.gather(*(client.run(chain, None, options) for chain in chains))


async def measure(
    bursts: Bursts, at_once: int, options: argparse.Namespace, folder: Path, ways: Sequence[Way], engine: Engine
) -> list[BoundRow]:
    """Run all ways at the same time under the same bursts."""
    quiet = load_config(H200).simulated
    size = ChainSize(prefix=options.prefix, output=options.output)
    sides = [Side(way, ChainMaker(size, quiet.vocabulary_size, bursts.seed), options.logs) for way in ways]
    begun = time.monotonic()
    async with AsyncExitStack() as stack:

        async def start(side: Side) -> AsyncClient:
            after_s = round(begun + _QUIET_S - time.monotonic() - _LOADING_S, 1)
            same = bursts._replace(after_s=after_s)
            for timing in (same.on(quiet), quiet):
                keep_figures(engine, timing)
            config = folder / f"{side.file_name}.toml"
            config.write_text(daemon_toml(same, acts=side.way.acts))
            socket = await stack.enter_async_context(local_daemon(config, on_event=side.note))
            return await stack.enter_async_context(AsyncClient(socket))

        clients = [await start(side) for side in sides]
        figures = [worker.figures for client in clients for worker in (await client.status()).workers]
        if not all(one is not None and one.cached for one in figures):
            raise DataError("an engine was measured while it was disturbed.")
        print(f"{len(sides)} daemons serve after {time.monotonic() - begun:.1f} s", file=sys.stderr)
        end = time.monotonic() + options.seconds
        await asyncio.gather(
            *(side.run_until(client, at_once, end) for side, client in zip(sides, clients, strict=True))
        )
        made_with = provenance() | {"arguments": command_line()}
    return [row(side, bursts, at_once, size, made_with) for side in sides]


def row(side: Side, bursts: Bursts, at_once: int, size: ChainSize, made_with: dict[str, Any]) -> BoundRow:
    """What came of one way."""
    counted = side.results[_WARM_UP * at_once :]
    return BoundRow(
        way=side.way.name,
        burst_s=bursts.mean_s,
        every_s=bursts.every_s,
        factor=bursts.factor,
        seed=bursts.seed,
        at_once=at_once,
        agents=size.agents,
        prefix=size.prefix,
        output=size.output,
        e2e_ms=[round(result.e2e_ms or 0.0, 1) for result in counted],
        placements=[result.placement or "" for result in counted],
        moved=[sum(hop.state == "moved" for agent in result.agents for hop in agent.hops) for result in counted],
        on_wobbly=[sum(agent.worker == WOBBLY for agent in result.agents) for result in counted],
        episodes=side.events.get("decode_jitter", 0),
        rerouted=side.events.get("agent_rerouted", 0),
        provenance=made_with,
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what bursts on one of two groups cost.")
    parser.add_argument("--bursts", default="10/20", metavar="S/S,...", help="mean length / mean time between")
    parser.add_argument("--factor", type=float, default=2.0, help="what steps take in a burst")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--at-once", default="1", metavar="N,...")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each load and seed")
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--ways", help="names, separated by semicolons (default: all)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="folder in which the daemons' logs are kept")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE")
    return parser.parse_args()


async def measure_all(options: argparse.Namespace) -> list[BoundRow]:
    """Every load with every seed.

    Raises:
        UsageError: there is no such way.
    """
    names = options.ways.split(";") if options.ways else [way.name for way in WAYS]
    ways = [way for way in WAYS if way.name in names]
    if len(ways) != len(names):
        raise UsageError(f"--ways: there is no such way among {names}.", hint=f"There are: {[w.name for w in WAYS]}.")
    found: list[BoundRow] = []
    with tempfile.TemporaryDirectory(prefix="pingpong-bound-") as private:
        folder = Path(private)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # figures of engines with bursts are nobody else's
        engine = await quiet_engine(folder)
        for seed in map(int, options.seeds.split(",")):
            for text in options.bursts.split(","):
                mean_s, every_s = map(float, text.split("/"))
                bursts = Bursts(mean_s, every_s, options.factor, seed)
                for at_once in map(int, options.at_once.split(",")):
                    rows = await measure(bursts, at_once, options, folder, ways, engine)
                    found += rows
                    for one in rows if options.out else ():
                        append_line(options.out, one)
                    print(render(rows), file=sys.stderr)
    return found


@command
def main() -> int:
    """Run or report; returns the exit code."""
    options = parse_arguments()
    if options.report:
        rows = [one for file in options.report for one in read_lines(file, BoundRow)]
    else:
        try:
            rows = asyncio.run(measure_all(options))
        except ChainFailed as error:
            print(f"a chain failed: {error}", file=sys.stderr)
            return 1
    print(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
