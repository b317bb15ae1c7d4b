"""Random chains in series and read ahead at a level of exactness: how many are equal, and what the level costs.

    python benchmarks/exactness.py --config examples/cpu.toml --dtype bfloat16 --chains 20 --out grid.jsonl
    python benchmarks/exactness.py --config benchmarks/h200.toml --exactness grid --chains 10 --agents 5 \\
        --prefix 4096 --output 256 --last-output 64 --fan-in 0
    python benchmarks/exactness.py --report grid.jsonl

Every run is isolated from all caches. The same chain is also run at "fast", both ways, unless --no-baseline is given:
what the level costs is said against that. With --config it starts a daemon of its own, otherwise it talks to a running
one. Exit codes: those of the client; 3 where a chain is not equal at the level asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from commands import command
from connecting import add_daemon_arguments, connection, made_with
from harness import check_ready
from pingpong_bus.chain import Chain, Exactness
from pingpong_bus.errors import NotEqual, UsageError
from pingpong_bus.messages import ChainResult, Mode, SessionKind, StatusReply, SubmitOptions
from pingpong_client import AsyncClient
from pingpong_client.certificate import ReadAheadMode, RunCertificate, compare_runs, describe
from pingpong_client.client import finished
from pingpong_client.rescoring import with_gaps
from profiles import text_chain, with_forced_length
from progress_bar import counted
from random_chains import ChainShape, Range, random_chain, random_pool
from runs import append_line, read_lines


class ChainPair(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file: one chain, in series and read ahead, at one level."""

    chain: str
    index: int
    exactness: Exactness
    mode: ReadAheadMode
    grid: int | None
    """The cell in tokens, at level grid."""
    prefixes: list[int]
    """Tokens of each agent's own text before the upstreams' outputs."""
    reads: list[list[str]]
    """Of each agent, those that it reads."""
    certificate: RunCertificate
    provenance: dict[str, Any]


async def measure(options: argparse.Namespace) -> list[ChainPair]:
    """Connect, run everything and return what came of it."""
    shape = ChainShape(
        agents=Range.parse(options.agents),
        prefix=Range.parse(options.prefix),
        output=Range.parse(options.output),
        last_output=Range.parse(options.last_output) if options.last_output else None,
        fan_in=options.fan_in,
    )
    levels: list[Exactness] = [options.exactness]
    if options.exactness != "fast" and not options.no_baseline:
        levels.append("fast")
    pairs: list[ChainPair] = []
    async with connection(options) as client:
        status = await client.status()
        check_ready(status)
        measuring = Measuring(client, options.mode, options.session, made_with(status))
        pool = await prompt_pool(client, status, options.prompts, options.seed)
        await measuring.warm_up(random_chain(shape, -1, seed=options.seed, pool=pool), levels)
        for index in counted(range(options.first, options.first + options.chains), "chains"):
            chain = random_chain(shape, index, seed=options.seed, pool=pool)
            for level in levels[::-1] if index % 2 else levels:
                pair = await measuring.pair(chain, index, level, ahead_first=bool(index // 2 % 2))
                pairs.append(pair)
                print(f"{index + 1} {level}: {_outcome(pair)}", file=sys.stderr, flush=True)
                if options.out:
                    append_line(options.out, pair)
    return pairs


class Measuring:
    """Runs chains in pairs, and compares them."""

    def __init__(
        self, client: AsyncClient, mode: ReadAheadMode, session: SessionKind | None, origin: dict[str, Any]
    ) -> None:
        self._client = client
        self._mode = mode
        self._session = session
        self._provenance = origin

    async def warm_up(self, chain: Chain, levels: Sequence[Exactness]) -> None:
        """Run a chain both ways at each level, for the engines' first steps of a kind are slow."""
        for level in levels:
            for mode in self._modes(ahead_first=False):
                await self._run(chain, mode, level)

    async def pair(self, chain: Chain, index: int, level: Exactness, *, ahead_first: bool) -> ChainPair:
        """Run a chain in series and read ahead, in this or the other order."""
        results = {mode: await self._run(chain, mode, level) for mode in self._modes(ahead_first=ahead_first)}
        serial, ahead = results["serial"], results[self._mode]
        prompts = [agent.prompt_ids or [] for agent in chain.agents]
        names = [[item[2:-2] for item in prompt if isinstance(item, str)] for prompt in prompts]
        firsts = [next((at for at, item in enumerate(prompt) if isinstance(item, str)), None) for prompt in prompts]
        return ChainPair(
            chain=chain.name,
            index=index,
            exactness=level,
            mode=self._mode,
            grid=ahead.grid,
            prefixes=[len(prompt) if at is None else at for prompt, at in zip(prompts, firsts, strict=True)],
            reads=names,
            certificate=await with_gaps(self._client, compare_runs(serial, ahead), serial, ahead),
            provenance=self._provenance,
        )

    def _modes(self, *, ahead_first: bool) -> list[Mode]:
        return [self._mode, "serial"] if ahead_first else ["serial", self._mode]

    async def _run(self, chain: Chain, mode: Mode, level: Exactness) -> ChainResult:
        options = SubmitOptions(mode=mode, isolate=True, session=self._session, exactness=level)
        ended = await self._client.run(chain, None, options)
        return finished(await self._client.result(ended.id, prompt_ids=True))


async def prompt_pool(
    client: AsyncClient, status: StatusReply, kind: Literal["text", "ids"] | None, seed: int
) -> list[int]:
    """Ids that prompts are cut from: those of the five-agent example's text, or random ones.

    Raises:
        UsageError: text is asked for, and an engine has no tokenizer.
    """
    limits = [worker.limits for worker in status.workers if worker.limits is not None]
    has_tokenizer = all(limit.has_tokenizer for limit in limits)
    if kind == "text" and not has_tokenizer:
        raise UsageError("--prompts text: the model has no tokenizer.", hint="--prompts ids needs none.")
    if kind == "ids" or not has_tokenizer:
        return random_pool(min(limit.vocabulary_size for limit in limits), seed=seed)
    short = with_forced_length(text_chain())
    agents = [msgspec.structs.replace(agent, max_tokens=1) for agent in short.agents]
    ended = await client.run(msgspec.structs.replace(short, agents=agents), None, SubmitOptions(mode="serial"))
    result = await client.result(ended.id, prompt_ids=True)
    return [token for agent in result.agents for token in agent.prompt_ids or []]


def render(pairs: Sequence[ChainPair]) -> str:
    """How many are equal at each level, how long they took, and every first difference; as Markdown."""
    levels = list(dict.fromkeys((pair.exactness, pair.mode, pair.grid) for pair in pairs))
    lines = ["| level | chains equal | agents equal | series, s | read ahead, s | saved |", "|---|--:|--:|--:|--:|--:|"]
    for level, mode, grid in levels:
        some = [pair for pair in pairs if (pair.exactness, pair.mode, pair.grid) == (level, mode, grid)]
        agents = [agent for pair in some for agent in pair.certificate.agents]
        serial, ahead = (sum(ms) / 1e3 for ms in zip(*map(_times, some), strict=True))
        lines.append(
            f"| {level}{f' of {grid}' if grid else ''}, {mode} | {equal_chains(some)} of {len(some)} "
            f"| {sum(agent.equal for agent in agents)} of {len(agents)} "
            f"| {serial:,.1f} | {ahead:,.1f} | {100 * (1 - ahead / serial):.1f} % |"
        )
    lines += ["", *_costs(pairs)]
    for pair in pairs:
        for agent in pair.certificate.agents:
            if (found := agent.difference) is not None:
                gap = f"; logit gap {found.logit_gap:.3g}" if found.logit_gap is not None else ""
                lines.append(f"- {pair.exactness}, {pair.chain}, {agent.agent}: {describe(found)}{gap}")
    return "\n".join(lines)


def _costs(pairs: Sequence[ChainPair]) -> list[str]:
    """What levels cost over "fast": the median over the chains that ran at both, and the ratio of the sums."""
    fast = {pair.index: pair for pair in pairs if pair.exactness == "fast"}
    lines = []
    for level in ("grid", "invariant"):
        both = [(pair, fast[pair.index]) for pair in pairs if pair.exactness == level and pair.index in fast]
        for at, name in enumerate(("in series", "read ahead")) if both else ():
            ratios = [_times(pair)[at] / _times(other)[at] for pair, other in both]
            sums = sum(_times(pair)[at] for pair, _ in both) / sum(_times(other)[at] for _, other in both)
            lines.append(
                f"- {level} over fast, {name}: {100 * (statistics.median(ratios) - 1):+.1f} % median, "
                f"{100 * (sums - 1):+.1f} % in all"
            )
    return lines


def equal_chains(pairs: Sequence[ChainPair]) -> int:
    """How many are equal, and have not been cut off and gone on."""
    return sum(pair.certificate.equal and not pair.certificate.resumed for pair in pairs)


def _times(pair: ChainPair) -> tuple[float, float]:
    return pair.certificate.serial_ms or 0.0, pair.certificate.read_ahead_ms or 0.0


def _outcome(pair: ChainPair) -> str:
    serial, ahead = _times(pair)
    prefixes = "/".join(map(str, pair.prefixes))
    verdict = "equal" if pair.certificate.equal else "DIFFERENT"
    return f"{verdict}, series {serial:,.0f} ms, read ahead {ahead:,.0f} ms, prefixes {prefixes}"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    shape = ChainShape()
    parser = argparse.ArgumentParser(description="Compare random chains in series and read ahead.")
    add_daemon_arguments(parser)
    parser.add_argument("--exactness", choices=get_args(Exactness), default="grid")
    parser.add_argument("--mode", choices=get_args(ReadAheadMode), default="ping-pong", help="of reading ahead")
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first chain: the seed's others are skipped")
    parser.add_argument("--agents", default=f"{shape.agents.least}:{shape.agents.most}", help="from:to, or a number")
    parser.add_argument("--prefix", default=f"{shape.prefix.least}:{shape.prefix.most}", help="tokens of each agent")
    parser.add_argument("--output", default=f"{shape.output.least}:{shape.output.most}", help="tokens of each agent")
    parser.add_argument("--last-output", help="tokens of the last agent (default: as the others)")
    parser.add_argument("--fan-in", type=float, default=shape.fan_in, help="share of agents that read two others")
    parser.add_argument("--prompts", choices=["text", "ids"], help="default: text where there is a tokenizer")
    parser.add_argument("--session", choices=["prefix-cache", "streaming-input"], help="default: the daemon's")
    parser.add_argument("--no-baseline", action="store_true", help='do not run at "fast" beside it')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSONL file that the pairs are added to")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="only report the pairs of these files")
    return parser.parse_args(arguments)


@command
def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    if options.report:
        pairs = [pair for path in options.report for pair in read_lines(path, ChainPair)]
    else:
        pairs = asyncio.run(measure(options))
    print(render(pairs))
    promised = [pair for pair in pairs if pair.exactness != "fast" or options.exactness == "fast"] or pairs
    return 0 if equal_chains(promised) == len(promised) else NotEqual.exit_code


if __name__ == "__main__":
    sys.exit(main())
