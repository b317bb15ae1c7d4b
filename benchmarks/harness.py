"""Runs one chain in several ways, turn about."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TypeVar, get_args

from chain_runner import ChainRunner, RunSettings
from pingpong_bus.chain import Chain, Exactness
from pingpong_bus.errors import DaemonUnavailable, DataError, NotEqual, UsageError
from pingpong_bus.messages import StatusReply
from progress_bar import counted
from runs import Run, append_line, length_faults
from ways import Way, baseline_of, parse_way

T = TypeVar("T")
LEVELS: tuple[Exactness, ...] = get_args(Exactness)
DEFAULT_WAYS = [Way("serial"), Way("ping-pong"), Way("presend")]


def chosen_ways(text: str) -> list[Way]:
    """The ways of a comma-separated list of modes, some with a group: "serial@gpu0,ping-pong".

    Raises:
        UsageError: one is unknown.
    """
    return [parse_way(name) for name in text.split(",")]


def chosen_levels(text: str) -> list[Exactness]:
    """The levels of exactness of a comma-separated list.

    Raises:
        UsageError: one is unknown.
    """
    names = text.split(",")
    for name in names:
        if name not in LEVELS:
            raise UsageError(f"--exactness: there is no level {name!r}.", hint=f"Choose from {', '.join(LEVELS)}.")
    return [level for name in names for level in LEVELS if level == name]


def in_order(what: Sequence[T], index: int, order: str) -> list[T]:
    """What is run, in the order of run `index`; every other run is reversed, so that drift hits all alike."""
    return list(what[::-1]) if order == "alternate" and index % 2 else list(what)


def check_ready(status: StatusReply) -> None:
    """Refuse a daemon of which a part does not serve: half of it would be measured.

    Raises:
        DaemonUnavailable: naming the workers.
    """
    missing = [
        f"{worker.name} is {worker.state}"
        for worker in status.workers
        if worker.state != "ready" or worker.limits is None
    ]
    if status.state != "ready" or missing:
        raise DaemonUnavailable(
            f"the daemon is {status.state}{''.join(f', {text}' for text in missing)}.",
            hint="Wait until `pingpong-client status` shows all of it ready, or start it anew.",
        )


class Harness:
    """Runs one chain in the ways asked for, and keeps what came of it."""

    def __init__(self, runner: ChainRunner, options: argparse.Namespace, chain: Chain) -> None:
        self._runner = runner
        self._options = options
        self._chain = chain
        self._settings = RunSettings(
            cache=options.cache,
            session=options.session,
            append_tokens=options.append_tokens,
            forced_lengths=options.force_max_output_tokens,
            seed=options.seed,
            temperature=options.temperature,
        )

    async def run_all(self) -> list[Run]:
        """All runs, warm-up first.

        Raises:
            ChainFailed: a chain failed. NotEqual: an answer ended early, with --strict-output-tokens.
        """
        options = self._options
        ways = await self._ways()
        levels = [None] if options.exactness is None else chosen_levels(options.exactness)
        kinds = [(level, way) for level in levels for way in ways]
        runs: list[Run] = []
        rounds = range(-options.warmup_runs, options.runs)
        order = [(index, *kind) for index in rounds for kind in in_order(kinds, index, options.order)]
        for index, level, way in counted(order, "runs"):
            baseline = baseline_of(way, ways).name
            run = await self._runner.run(self._chain, way, index, self._settings, exactness=level, baseline=baseline)
            name = way.name if level is None else f"{way.name} at {level}"
            print(f"{'warm-up' if run.warmup else index + 1} {name}: {run.e2e_ms:,.0f} ms", file=sys.stderr)
            runs.append(run)
            if options.out:
                append_line(options.out, run)
            if options.strict_output_tokens and (faults := length_faults(run)):
                raise NotEqual(f"{'; '.join(faults)}.", hint="--force-max-output-tokens forces the length.")
        return runs

    async def _ways(self) -> list[Way]:
        """Those asked for; by default also presend, if the chain is simple enough for it."""
        asked = self._options.modes
        ways = DEFAULT_WAYS if asked is None else chosen_ways(asked)
        if not any(way.mode == "presend" for way in ways):
            return ways
        try:
            await self._runner.presend_agents(self._chain)
        except DataError as error:
            if asked is not None:
                raise
            print(f"without presend: {error}", file=sys.stderr)
            return [way for way in ways if way.mode != "presend"]
        return ways
