"""Drives daemons with many chains, and reports what each side made of the same load.

    python benchmarks/load.py --side ours=examples/cpu.toml:auto --side stock=examples/cpu.toml:round-robin --at-once 4
    python benchmarks/load.py --side ours=DIR:auto --side stock=DIR_2:round-robin --rate 0.5 --seconds 60
    python benchmarks/load.py --report load.jsonl --baseline stock

A side is a daemon and what it is asked to do: a mode, or `round-robin`, the usual way without this project: chain k
runs in series on group k mod N. A daemon is named by its folder of sockets, or by a configuration (.toml) with which
it is started; for round-robin that one gets vLLM's own scheduler. Daemons are up together and take turns, one round at
a time, each with the same chains at the same moments and with prefix caches in the same state; the order of the sides
is reversed every other round.

Exit codes: those of the client; 1 where a chain did not finish.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from commands import command
from harness import LEVELS
from load_report import render
from load_rounds import LoadTest, Settings, run_tests
from load_rows import Load, Round, Shape
from load_sides import SideSpec, opened
from pingpong_bus.errors import ChainFailed, UsageError
from profiles import PROFILES, reshaped
from runs import append_line, read_lines


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure many chains at once, on several sides in turn.")
    parser.add_argument(
        "--side", action="append", default=[], metavar="NAME=[PLACE:]HOW", help="PLACE: a running daemon, or a .toml"
    )
    parser.add_argument("--config", type=Path, help="configuration of sides without a place")
    parser.add_argument("--socket", type=Path, help="running daemon of sides without a place (default: the usual)")
    parser.add_argument("--at-once", metavar="N,...", help="chains submitted together; several loads take turns")
    parser.add_argument("--rate", metavar="R,...", help="chains a second that come by themselves; likewise")
    parser.add_argument("--seconds", type=float, metavar="S", help="with --rate: for how long")
    parser.add_argument("--profile", default="cpu", choices=PROFILES, help="shape of the chains")
    parser.add_argument("--prefix", type=int, help="tokens of each agent's own text, over the profile's")
    parser.add_argument("--output", type=int, help="tokens that each agent writes, the last one a quarter")
    parser.add_argument("--agents", type=int, help="number of agents, over the profile's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", choices=["cold", "warm"], default="cold", help="before each round; warm: prefixes")
    parser.add_argument("--exactness", choices=LEVELS, default="fast", help="of all sides; stock engines are fast only")
    parser.add_argument("--seed", type=int, default=0, help="of token ids and arrivals")
    parser.add_argument("--budget-s", type=float, help="start no round that would end later than that")
    parser.add_argument("--patience-s", type=float, default=600.0, help="a chain that takes longer has failed")
    parser.add_argument("--goodput-ms", type=float, help="end-to-end time that a good chain may take")
    parser.add_argument("--goodput-times", type=float, default=2.0, help="the same, in times of one chain alone")
    parser.add_argument("--baseline", metavar="NAME", help="side that others are compared with (default: round-robin)")
    parser.add_argument("--out", type=Path, help="JSONL file that the rounds are added to")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="only report the rounds of these files")
    return parser.parse_args(arguments)


def chosen_settings(options: argparse.Namespace, load: Load) -> Settings:
    """What all sides have in common under one load."""
    profile = reshaped(PROFILES[options.profile], prefix=options.prefix, output=options.output, agents=options.agents)
    return Settings(
        load=load,
        shape=Shape.of(profile),
        cache=options.cache,
        exactness=options.exactness,
        seed=options.seed,
        patience_s=options.patience_s,
    )


def chosen_loads(options: argparse.Namespace) -> list[Load]:
    """The loads of the command line.

    Raises:
        UsageError: one is none, or there is none.
    """
    try:
        at_once = [Load(at_once=int(text)) for text in (options.at_once or "").split(",") if text]
        rates = [Load(rate=float(text), seconds=options.seconds) for text in (options.rate or "").split(",") if text]
    except ValueError as error:
        raise UsageError(f"--at-once or --rate: {error}.") from None
    loads = at_once + rates
    if not loads or bool(rates) != (options.seconds is not None):
        raise UsageError("the load is --at-once N, or --rate R with --seconds S, or both.")
    if min(load.at_once or load.rate or 0 for load in loads) <= 0 or (options.seconds or 1) <= 0:
        raise UsageError("--at-once, --rate and --seconds are above zero.")
    return loads


def chosen_sides(texts: list[str], baseline: str | None) -> list[SideSpec]:
    """The sides of the command line.

    Raises:
        UsageError: there is none, one is no side, two have one name, or the baseline is none of them.
    """
    sides = [SideSpec.parse(text) for text in texts]
    names = [side.name for side in sides]
    if not sides:
        raise UsageError("there is no --side.", hint="Such as --side ours=examples/cpu.toml:auto.")
    if len({*names}) < len(names):
        raise UsageError("--side: two sides have the same name.")
    if baseline is not None and baseline not in names:
        raise UsageError(f"--baseline: there is no side {baseline!r}.", hint=f"Sides: {', '.join(names)}.")
    return sides


async def measure(options: argparse.Namespace) -> list[Round]:
    """Open all sides, run the rounds and return them."""
    loads = chosen_loads(options)
    specs = chosen_sides(options.side, options.baseline)

    def keep(row: Round) -> None:
        if options.out:
            append_line(options.out, row)

    with tempfile.TemporaryDirectory(prefix="pingpong-config-") as folder:
        async with opened(specs, options.config or options.socket, Path(folder)) as sides:
            tests = [LoadTest(sides, chosen_settings(options, load), keep) for load in loads]
            return await run_tests(tests, options.rounds, options.budget_s)


@command
def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    if options.report:
        rounds = [row for path in options.report for row in read_lines(path, Round)]
    else:
        rounds = asyncio.run(measure(options))
    print(
        render(
            rounds,
            baseline=options.baseline,
            goodput_ms=options.goodput_ms,
            goodput_times=options.goodput_times,
        )
    )
    return ChainFailed.exit_code if any(len(row.finished) < len(row.chains) for row in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
