"""Runs a chain in several modes, over and over, and reports what each took.

    python benchmarks/chain.py --config examples/cpu.toml --runs 10 --out cold.jsonl
    python benchmarks/chain.py --config examples/cpu.toml --cache warm --out warm.jsonl
    python benchmarks/chain.py --config examples/cpu.toml --dtype bfloat16 --exactness fast,grid --out levels.jsonl
    python benchmarks/chain.py --profile text --force-max-output-tokens --socket $XDG_RUNTIME_DIR/pingpongd
    python benchmarks/chain.py --report cold.jsonl warm.jsonl

With --config it starts a daemon of its own, otherwise it talks to a running one. Which devices form groups, how many
groups there are, dtype and engine are the daemon's configuration. Exit codes: those of the client; 3 where a run is
not equal to its serial run and --strict-equal is given.

A cold cache is emptied before each run. A warm one holds then, on every group, the static prefixes of all agents and
nothing else: it is emptied and filled anew before each run, so that no run finds what another one's agents wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import get_args

from chain_runner import ChainRunner
from commands import command
from connecting import add_daemon_arguments, connection
from figures import baseline, comparable, exactness, measured
from harness import LEVELS, Harness, check_ready, chosen_levels, chosen_ways
from pingpong_bus.chain import Chain
from pingpong_bus.errors import NotEqual, UsageError
from profiles import (
    PROFILES,
    Document,
    Shape,
    ids_chain,
    reshaped,
    text_chain,
    with_forced_length,
    with_sampling,
)
from report import render
from runs import RUN_MODES, Run, read_runs


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure a chain, in series and read ahead.")
    add_daemon_arguments(parser)
    parser.add_argument(
        "--profile", default="cpu", help=f"{', '.join(PROFILES)}, text (the five-agent example), or a chain's JSON file"
    )
    parser.add_argument("--prefix", type=int, help="tokens of each agent's own text, over the profile's")
    parser.add_argument("--output", type=int, help="tokens that each agent writes, the last one a quarter")
    parser.add_argument("--agents", type=int, help="number of agents, over the profile's")
    parser.add_argument("--shape", choices=get_args(Shape), default="line", help="who reads whom: see profiles.py")
    parser.add_argument("--document", choices=get_args(Document), default="none", help="all share it; by the role text")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmup-runs", type=int, default=1)
    parser.add_argument(
        "--modes",
        help=f"of {', '.join(RUN_MODES)}; comma-separated, and some with a group, such as overlap@gpu0 "
        "(default: serial,ping-pong,presend; the last if possible)",
    )
    parser.add_argument(
        "--exactness",
        help=f"of {', '.join(LEVELS)}; comma-separated: each mode runs at each (default: the daemon's level)",
    )
    parser.add_argument("--order", choices=["alternate", "fixed"], default="alternate", help="of the modes")
    parser.add_argument("--cache", choices=["cold", "warm"], default="cold", help="before each run; warm: prefixes")
    parser.add_argument("--force-max-output-tokens", action="store_true", help="nothing ends an answer early")
    parser.add_argument("--strict-output-tokens", action="store_true", help="fail if an answer ended early")
    parser.add_argument("--strict-equal", action="store_true", help="fail (3) if a run differs from its serial run")
    parser.add_argument("--session", choices=["prefix-cache", "streaming-input"], help="default: the daemon's")
    parser.add_argument("--append-tokens", type=int, help="default: the daemon's")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the chain's ids, and of sampling")
    parser.add_argument("--out", type=Path, help="JSONL file that the runs are added to")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="only report the runs of these files")
    return parser.parse_args(arguments)


def build_chain(options: argparse.Namespace, vocabulary: int) -> Chain:
    """The chain that the command line asks for; random ids stay below `vocabulary`.

    Raises:
        UsageError: no such profile. ChainError: the file is no valid chain.
    """
    if options.profile in PROFILES:
        profile = reshaped(
            PROFILES[options.profile],
            prefix=options.prefix,
            output=options.output,
            agents=options.agents,
            shape=options.shape,
            document=options.document,
        )
        chain = ids_chain(profile, seed=options.seed, vocabulary=vocabulary)
    elif options.profile == "text":
        chain = text_chain()
    elif Path(options.profile).is_file():
        chain = text_chain(Path(options.profile))
    else:
        raise UsageError(
            f"--profile: there is no profile or file {options.profile}.", hint=f"Profiles: {', '.join(PROFILES)}, text."
        )
    if options.force_max_output_tokens:
        chain = with_forced_length(chain)
    if options.temperature:
        chain = with_sampling(chain, temperature=options.temperature, seed=options.seed)
    return chain


async def measure(options: argparse.Namespace) -> list[Run]:
    """Connect, run everything and return the runs."""
    if options.modes is not None:
        chosen_ways(options.modes)
    if options.exactness is not None:
        chosen_levels(options.exactness)
    async with connection(options) as client:
        status = await client.status()
        check_ready(status)
        vocabulary = min(worker.limits.vocabulary_size for worker in status.workers if worker.limits)
        chain = build_chain(options, vocabulary)
        async with ChainRunner(client, status) as runner:
            return await Harness(runner, options, chain).run_all()


@command
def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    runs = read_runs(options.report) if options.report else asyncio.run(measure(options))
    print(render(runs))
    return 0 if not options.strict_equal or all_equal(runs) else NotEqual.exit_code


def all_equal(runs: list[Run]) -> bool:
    """Whether every run equals the serial run that it is compared with."""
    results = [
        exactness(reference, found)
        for by_row in map(measured, comparable(runs))
        for row, found in by_row.items()
        if (reference := baseline(by_row, row))
    ]
    return all(result.exact == result.compared for result in results)


if __name__ == "__main__":
    sys.exit(main())
