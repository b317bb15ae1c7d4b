"""What guessing tokens is worth: one chain without guesses, guessed for the first time, and as one that is known.

    python benchmarks/speculation.py --config benchmarks/speculation-cpu.toml --out speculation.jsonl
    python benchmarks/speculation.py --config benchmarks/speculation-h200.toml --random 4096 --out speculation.jsonl
    python benchmarks/speculation.py --report speculation.jsonl

Sides, turn about, on one daemon whose engines can guess; the order is reversed in every other round:

    plain    no guesses
    first    under a name that the daemon has not met: only prompts, with the upstream's text, are guessed from
    known    under a name that has run with other inputs
    same     the run of "first" once more: what each agent wrote is remembered

Each round has an input of its own, and every run finds empty prefix caches. The first round is a warm-up, and is not
counted. An engine that can guess, and is not asked to, is one that cannot: vLLM is configured alike.

With `--counting`, and engines of `load_format = "counting"` (each token is followed by the next id), there are two
chains of random ids: one whose agents all begin to count where the first one does, so that each copies what it reads,
and one whose agents count where nothing they read does. They show what guessing brings at the most where everything is
copied, and what it costs where nothing is.

With `--random` agents of random ids are run in place of the examples, for engines with random weights: what these write
is like nothing in their prompts, so "first" shows what guessing costs where nothing is to be guessed, and "same" what
it brings at the most.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from commands import command
from connecting import add_daemon_arguments, connection, made_with
from harness import check_ready
from pingpong_bus.chain import Agent, Chain, parse_chain
from pingpong_bus.errors import DataError
from pingpong_bus.messages import ChainResult, SubmitOptions
from pingpong_client import AsyncClient
from profiles import Profile, ids_chain
from progress_bar import counted
from runs import append_line, read_lines
from speculation_texts import INPUTS

Side = Literal["plain", "first", "known", "same"]
SIDES: tuple[Side, ...] = ("plain", "first", "known", "same")
EXAMPLES = Path(__file__).parents[1] / "examples"


class SpeculationRun(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file: one run of a chain."""

    chain: str
    side: Side
    index: int
    """Runs of one index have the same input; 0 is the warm-up."""
    e2e_ms: float
    output_tokens: list[int]
    """Of each agent."""
    decode_ms: list[float]
    """Of each agent, from its first token to its last."""
    steps: list[int]
    """Of each agent: engine steps that gave its tokens; as many as tokens where nothing was guessed."""
    drafted: list[int]
    accepted: list[int]
    digest: str
    """Of all that was written: alike where the tokens are."""
    provenance: dict[str, Any]

    @property
    def token_ms(self) -> float:
        """Milliseconds a token, over all agents' decodes."""
        return sum(self.decode_ms) / max(1, sum(tokens - 1 for tokens in self.output_tokens))


def run_of(chain: str, side: Side, index: int, result: ChainResult, provenance: dict[str, Any]) -> SpeculationRun:
    """The line of a run that has finished."""
    assert result.e2e_ms is not None  # noqa: S101 - it has finished
    agents = result.agents
    counts = [agent.drafts for agent in agents]
    return SpeculationRun(
        chain=chain,
        side=side,
        index=index,
        e2e_ms=result.e2e_ms,
        output_tokens=[agent.output_tokens for agent in agents],
        decode_ms=[_decode_ms(agent) for agent in agents],
        steps=[one.steps if one else agent.output_tokens for one, agent in zip(counts, agents, strict=True)],
        drafted=[one.drafted if one else 0 for one in counts],
        accepted=[one.accepted if one else 0 for one in counts],
        digest=hashlib.sha256(msgspec.json.encode([agent.output_ids for agent in agents])).hexdigest()[:16],
        provenance=provenance,
    )


def _decode_ms(agent: Any) -> float:
    return max(0.0, (agent.last_token_ms or 0.0) - (agent.first_token_ms or 0.0))


def render(runs: Sequence[SpeculationRun]) -> str:
    """Medians over the rounds, as Markdown; gains are medians of what each round has gained."""
    lines = [
        (
            "| chain | side | rounds | E2E ms | faster than plain | ms a token | tokens a step | right of guessed "
            "| same ids |"
        ),
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    counted_runs = [run for run in runs if run.index > 0]
    for chain in dict.fromkeys(run.chain for run in counted_runs):
        plain = {run.index: run for run in counted_runs if (run.chain, run.side) == (chain, "plain")}
        for side in SIDES:
            mine = [run for run in counted_runs if (run.chain, run.side) == (chain, side) and run.index in plain]
            if not mine:
                continue
            gain = statistics.median(1 - run.e2e_ms / plain[run.index].e2e_ms for run in mine)
            per_step = sum(sum(run.output_tokens) for run in mine) / max(1, sum(sum(run.steps) for run in mine))
            drafted = sum(sum(run.drafted) for run in mine)
            right = f"{sum(sum(run.accepted) for run in mine) / drafted:.0%} of {drafted}" if drafted else "none"
            alike = sum(run.digest == plain[run.index].digest for run in mine)
            lines.append(
                f"| {chain} | {side} | {len(mine)} | {statistics.median(run.e2e_ms for run in mine):,.0f} "
                f"| {gain:+.1%} | {statistics.median(run.token_ms for run in mine):.2f} | {per_step:.2f} | {right} "
                f"| {alike} of {len(mine)} |"
            )
    if len(lines) == 2:
        raise DataError("there is no whole round.")
    return "\n".join(lines)


def rounds(options: argparse.Namespace) -> Iterator[tuple[Chain, int, dict[str, str]]]:
    """Chains, rounds and inputs."""
    for index in range(options.runs + 1):
        if options.counting:
            for name, copies in (("counting alike", True), ("counting apart", False)):
                yield counting_chain(name, options, index, copies=copies), index, {}
            continue
        if options.random:
            profile = Profile(
                name="random", prefix=options.random, output=options.output, last_output=options.output, agents=3
            )
            yield ids_chain(profile, seed=index, vocabulary=options.vocabulary), index, {}
            continue
        for path in options.chains:
            chain = parse_chain(path.read_bytes(), source=str(path))
            texts = INPUTS.get(chain.name, ())
            yield chain, index, {"text": texts[index % len(texts)]} if texts else {}


def counting_chain(name: str, options: argparse.Namespace, index: int, *, copies: bool) -> Chain:
    """Three agents in a line that count: on from the same id, or each from one of its own.

    What they read besides is drawn from the upper half of the ids, and they count in the lower one.
    """
    draw, half = random.Random(f"{name} {index}"), options.vocabulary // 2
    first = draw.randrange(100, half // 2)
    agents = [
        Agent(
            name=f"agent{at}",
            prompt_ids=[
                *(draw.randrange(half, options.vocabulary) for _ in range(options.counting)),
                *([f"{{{{agent{at - 1}}}}}"] if at else []),
                *(draw.randrange(half, options.vocabulary) for _ in range(16)),
                first if copies else first + at * 2 * options.output,
            ],
            max_tokens=options.output,
            ignore_eos=True,
        )
        for at in range(3)
    ]
    return Chain(name=name, agents=agents)


def in_turn(index: int) -> list[Side]:
    """The sides, reversed in every other round; "same" repeats "first", and so stays behind it."""
    return ["known", "first", "same", "plain"] if index % 2 else list(SIDES)


def renamed(chain: Chain, side: Side, index: int) -> Chain:
    """The chain under the name that makes it new, or known."""
    suffix = {"plain": "plain", "known": "known"}.get(side, f"round {index}")
    return msgspec.structs.replace(chain, name=f"{chain.name} {suffix}")


async def measure(client: AsyncClient, options: argparse.Namespace) -> list[SpeculationRun]:
    """Run all rounds, and write each run down as it ends."""
    status = await client.status()
    check_ready(status)
    made = made_with(status)
    runs: list[SpeculationRun] = []
    for chain, index, inputs in counted(list(rounds(options)), "rounds"):
        for side in in_turn(index):
            how = SubmitOptions(mode="serial", isolate=True, speculate=side != "plain")
            result = await client.run(renamed(chain, side, index), inputs, options=how)
            runs.append(run_of(chain.name, side, index, result, made))
            if options.out:
                append_line(options.out, runs[-1])
    return runs


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_daemon_arguments(parser)
    parser.add_argument(
        "--chains",
        type=lambda text: [Path(name) for name in text.split(",")],
        default=[EXAMPLES / "copying.json", EXAMPLES / "not_copying.json"],
        help="files of chains, separated by commas (default: the examples)",
    )
    parser.add_argument(
        "--random", type=int, default=0, help="tokens of each agent's own random text, in place of --chains"
    )
    parser.add_argument("--counting", type=int, default=0, help="the same of agents that count, for engines that do")
    parser.add_argument(
        "--output", type=int, default=256, help="tokens that each agent with random text writes (%(default)s)"
    )
    parser.add_argument("--vocabulary", type=int, default=100_000, help="random ids are below it (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="rounds beside the warm-up (%(default)s)")
    parser.add_argument("--out", type=Path, help="append the runs to this JSONL file")
    parser.add_argument("--report", type=Path, help="only show what such a file has")
    return parser.parse_args(argv)


async def measured(options: argparse.Namespace) -> list[SpeculationRun]:
    """What a daemon of one's own, or one that runs, takes for the rounds."""
    async with connection(options) as client:
        return await measure(client, options)


@command
def main() -> int:
    """Measure, or report."""
    options = arguments(None)
    runs = read_lines(options.report, SpeculationRun) if options.report else asyncio.run(measured(options))
    print(render(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
