"""A known chain comes back after fifty others that filled the cache: what its agents wait for their first tokens.

    python benchmarks/prefix_reuse.py --config benchmarks/prefixes-cpu.toml --prefix 600 --other 150 --out reuse.jsonl
    python benchmarks/prefix_reuse.py --config benchmarks/prefixes-h200.toml --prefix 6000 --other 1500 --host-gib 16
    python benchmarks/prefix_reuse.py --report reuse.jsonl

A round, from an empty cache, on one group: the known chain (cold), again with another input, and once more (warm); then
`--others` chains that differ in all their texts; then the known chain with an input of its own (after). Rounds are made
on daemons that keep nothing, that keep prefixes, and with `--host-gib` on one that has host memory and keeps nothing on
the device, and on one that does both. In series, so that nothing hides a prefill: read ahead, much of it would be.

What counts is the downstream agents' TTFT; of a round, their mean.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from commands import command
from connecting import made_with
from harness import check_ready
from local_daemon import local_daemon
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.errors import ConfigError, DataError
from pingpong_bus.messages import ChainResult, StatusReply, SubmitOptions
from pingpong_client import AsyncClient
from progress_bar import counted, tell_stage
from runs import append_line, read_lines

Moment = Literal["cold", "again", "warm", "after"]
MOMENTS: tuple[Moment, ...] = ("cold", "again", "warm", "after")


class Side(msgspec.Struct, frozen=True):
    """What a daemon keeps."""

    name: str
    keep: float
    host_gib: float = 0.0


class ReuseRun(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file: one run of the known chain."""

    side: str
    keep: float
    host_gib: float
    round: int
    moment: Moment
    prefix: int
    """Static tokens of each agent."""
    others: int
    """Chains that came before "after"."""
    other_tokens: int
    """Tokens that these computed."""
    kv_tokens: int
    """That the group's KV cache holds."""
    ttft_ms: list[float]
    """Of each agent."""
    prompt_tokens: list[int]
    cached_tokens: list[int]
    """Of each agent's prompt, what was found."""
    e2e_ms: float
    provenance: dict[str, Any]

    @property
    def downstream_ms(self) -> float:
        """Mean TTFT of the agents that read others."""
        return statistics.fmean(self.ttft_ms[1:])


def chain_of(name: str, static: random.Random, fresh: random.Random, sizes: argparse.Namespace, prefix: int) -> Chain:
    """Agents in a row, each with a beginning from `static` and an input from `fresh`."""

    def ids(draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(100, sizes.vocabulary) for _ in range(count)]

    agents = [
        Agent(
            name=f"agent{at}",
            prompt_ids=[*ids(static, prefix), *([f"{{{{agent{at - 1}}}}}"] if at else []), *ids(fresh, sizes.input)],
            max_tokens=sizes.output,
            ignore_eos=True,
        )
        for at in range(sizes.agents)
    ]
    return Chain(name=name, agents=agents)


def render(runs: Sequence[ReuseRun]) -> str:
    """Medians over the rounds, as Markdown."""
    lines = [
        "| kept | rounds | cold ms | warm ms | after ms | after / warm | after / cold | found after |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for side in dict.fromkeys(run.side for run in runs):
        mine = {moment: [run for run in runs if (run.side, run.moment) == (side, moment)] for moment in MOMENTS}
        if not all(mine[moment] for moment in ("cold", "warm", "after")):
            raise DataError(f'"{side}" has no whole round.')
        cold, warm, after = (
            statistics.median(run.downstream_ms for run in mine[moment]) for moment in ("cold", "warm", "after")
        )
        found = statistics.median(sum(run.cached_tokens) / sum(run.prompt_tokens) for run in mine["after"])
        lines.append(
            f"| {side} | {len(mine['after'])} | {cold:,.1f} | {warm:,.1f} | {after:,.1f} | {after / warm:.2f} "
            f"| {after / cold:.2f} | {found:.0%} |"
        )
    return "\n".join(lines)


def sides_of(options: argparse.Namespace) -> list[Side]:
    """The daemons that are compared."""
    sides = [Side("nothing", 0.0), Side("on the device", options.keep)]
    if options.host_gib:
        sides += [Side("on the host", 0.0, options.host_gib), Side("on both", options.keep, options.host_gib)]
    return sides


def config_of(path: Path, folder: Path, side: Side) -> Path:
    """A copy of the configuration that keeps what the side does.

    Raises:
        ConfigError: it cannot be read, or says itself what is kept.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    if "[prefixes]" in text:
        raise ConfigError(f"{path} has a [prefixes] of its own.", hint="The benchmark writes it; leave it out.")
    copy = folder / path.name
    copy.write_text(f"{text}\n[prefixes]\nkeep = {side.keep}\nhost_gib = {side.host_gib}\n", encoding="utf-8")
    return copy


class Rounds:
    """Rounds on one daemon."""

    def __init__(self, client: AsyncClient, status: StatusReply, side: Side, options: argparse.Namespace) -> None:
        self._client, self._side, self._options = client, side, options
        worker = next((one for one in status.workers if one.name == options.group), status.workers[0])
        assert worker.limits is not None  # noqa: S101 - it is ready
        self._limits = worker.limits
        self._submit = SubmitOptions(mode="serial", group=worker.name)
        self._made = made_with(status)

    async def run(self, index: int) -> list[ReuseRun]:
        """One round, from an empty cache."""
        options = self._options
        runs: list[ReuseRun] = []
        await self._client.reset_caches()
        runs += [self._noted(await self._known(index, moment), index, moment, 0) for moment in MOMENTS[:3]]
        tokens = await self._others(index)
        if tokens < self._limits.kv_tokens:
            raise DataError(
                f"the others compute {tokens} tokens, and the cache holds {self._limits.kv_tokens}.",
                hint="They have to fill it: raise --other or --others.",
            )
        runs.append(self._noted(await self._known(index, "after"), index, "after", tokens))
        for run in runs:
            if options.out:
                append_line(options.out, run)
        return runs

    async def _known(self, index: int, moment: Moment) -> ChainResult:
        static = random.Random(f"known {index} {self._options.seed}")
        fresh = random.Random(f"{moment} {index} {self._options.seed}")
        chain = chain_of(f"known{index}", static, fresh, self._options, self._options.prefix)
        return await self._client.run(chain, None, self._submit)

    async def _others(self, index: int) -> int:
        """Run the others, some at once; gives the tokens that they computed."""
        options, tokens = self._options, 0
        waiting = list(range(options.others))

        async def client() -> None:
            nonlocal tokens
            while waiting:
                name = f"other {index} {waiting.pop()} {options.seed}"
                draw = random.Random(name)
                chain = chain_of(name.replace(" ", "-"), draw, draw, options, options.other)
                result = await self._client.run(chain, None, self._submit)
                tokens += sum(
                    agent.prompt_tokens - agent.cached_tokens + agent.output_tokens for agent in result.agents
                )

        await asyncio.gather(*(client() for _ in range(options.at_once)))
        return tokens

    def _noted(self, result: ChainResult, index: int, moment: Moment, other_tokens: int) -> ReuseRun:
        return ReuseRun(
            side=self._side.name,
            keep=self._side.keep,
            host_gib=self._side.host_gib,
            round=index,
            moment=moment,
            prefix=self._options.prefix,
            others=self._options.others,
            other_tokens=other_tokens,
            kv_tokens=self._limits.kv_tokens,
            ttft_ms=[agent.ttft_ms or 0.0 for agent in result.agents],
            prompt_tokens=[agent.prompt_tokens for agent in result.agents],
            cached_tokens=[agent.cached_tokens for agent in result.agents],
            e2e_ms=result.e2e_ms or 0.0,
            provenance=self._made,
        )


async def measure(options: argparse.Namespace) -> list[ReuseRun]:
    """All rounds on all sides, on each after a chain that warms the engine up."""
    runs: list[ReuseRun] = []
    for side in sides_of(options):
        with tempfile.TemporaryDirectory(prefix="pingpong-config-") as folder:
            config = config_of(options.config, Path(folder), side)
            async with local_daemon(config, on_event=tell_stage) as socket, AsyncClient(socket) as client:
                status = await client.status()
                check_ready(status)
                options.vocabulary = min(one.limits.vocabulary_size for one in status.workers if one.limits)
                rounds = Rounds(client, status, side, options)
                await client.run(chain_of("warm-up", random.Random(0), random.Random(1), options, options.prefix))
                for index in counted(range(options.rounds), f"rounds, kept {side.name}"):
                    runs += await rounds.run(index)
    return runs


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure how a known chain fares after others.")
    parser.add_argument("--config", type=Path, help="of the daemons; it says nothing of [prefixes]")
    parser.add_argument("--group", help="that runs all; default: the first")
    parser.add_argument("--agents", type=int, default=3, help="of every chain")
    parser.add_argument("--prefix", type=int, default=600, help="static tokens of each agent of the known chain")
    parser.add_argument("--other", type=int, default=150, help="the same of the others")
    parser.add_argument("--input", type=int, default=32, help="tokens of each agent that are new in every run")
    parser.add_argument("--output", type=int, default=8, help="tokens that each agent writes")
    parser.add_argument("--others", type=int, default=50, help="chains between")
    parser.add_argument("--at-once", type=int, default=4, help="of these")
    parser.add_argument("--keep", type=float, default=0.5, help="the part of the cache that may be kept")
    parser.add_argument("--host-gib", type=float, default=0.0, help="GPUs: also with so much host memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSONL file that the runs are added to")
    parser.add_argument("--report", type=Path, help="only report the runs of this file")
    options = parser.parse_args()
    if (options.config is None) == (options.report is None):
        parser.error("either --config or --report is needed")
    if options.agents < 2:
        parser.error("--agents: one that reads another is needed")
    return options


@command
def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    runs = read_lines(options.report, ReuseRun) if options.report else asyncio.run(measure(options))
    print(render(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
