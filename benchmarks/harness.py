"""Runs one chain in several modes, turn about, each with the prefix caches in the same state."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TypeVar, get_args

from connecting import made_with
from pingpong_bus.chain import Chain, Exactness
from pingpong_bus.errors import DaemonUnavailable, DataError, NotEqual, UsageError
from pingpong_bus.messages import StatusReply, SubmitOptions
from pingpong_client import AsyncClient
from presend import PresendAgent, presend_agents, run_presend
from profiles import filling_chain
from runs import RUN_MODES, Run, RunMode, append_line, length_faults

T = TypeVar("T")
S = TypeVar("S", bound=str)
LEVELS: tuple[Exactness, ...] = get_args(Exactness)
DEFAULT_MODES: list[RunMode] = ["serial", "ping-pong", "presend"]


def chosen_modes(text: str) -> list[RunMode]:
    """The modes of a comma-separated list.

    Raises:
        UsageError: one is unknown.
    """
    return _chosen(text, RUN_MODES, "--modes", "mode")


def chosen_levels(text: str) -> list[Exactness]:
    """The levels of exactness of a comma-separated list.

    Raises:
        UsageError: one is unknown.
    """
    return _chosen(text, LEVELS, "--exactness", "level")


def _chosen(text: str, known: Sequence[S], flag: str, what: str) -> list[S]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise UsageError(f"{flag}: there is no {what} {name!r}.", hint=f"Choose from {', '.join(known)}.")
    return [one for name in names for one in known if one == name]


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
    """Runs one chain in the modes asked for, and keeps what came of it."""

    def __init__(self, client: AsyncClient, options: argparse.Namespace, chain: Chain, status: StatusReply) -> None:
        self._client = client
        self._options = options
        self._chain = chain
        self._groups = [worker.name for worker in status.workers]
        self._presend: list[PresendAgent] = []
        self._provenance = made_with(status)

    async def run_all(self) -> list[Run]:
        """All runs, warm-up first.

        Raises:
            ChainFailed: a chain failed. NotEqual: an answer ended early, with --strict-output-tokens.
        """
        options = self._options
        modes = await self._modes()
        levels = [None] if options.exactness is None else chosen_levels(options.exactness)
        kinds = [(level, mode) for level in levels for mode in modes]
        runs: list[Run] = []
        for index in range(-options.warmup_runs, options.runs):
            for level, mode in in_order(kinds, index, options.order):
                run = await self._run(mode, index, level)
                name = mode if level is None else f"{mode} at {level}"
                print(f"{'warm-up' if run.warmup else index + 1} {name}: {run.e2e_ms:,.0f} ms", file=sys.stderr)
                runs.append(run)
                if options.out:
                    append_line(options.out, run)
                if options.strict_output_tokens and (faults := length_faults(run)):
                    raise NotEqual(f"{'; '.join(faults)}.", hint="--force-max-output-tokens forces the length.")
        return runs

    async def _modes(self) -> list[RunMode]:
        """Those asked for; by default also presend, if the chain is simple enough for it."""
        asked = self._options.modes
        modes = DEFAULT_MODES if asked is None else chosen_modes(asked)
        if "presend" not in modes:
            return modes
        serial = await self._client.run(self._chain, None, self._submit_options("serial"))
        with_ids = await self._client.result(serial.id, prompt_ids=True)
        try:
            self._presend = presend_agents(self._chain, with_ids)
        except DataError as error:
            if asked is not None:
                raise
            print(f"without presend: {error}", file=sys.stderr)
            return [mode for mode in modes if mode != "presend"]
        return modes

    async def _set_caches(self, level: Exactness | None) -> None:
        """Empty the prefix caches, and fill every group's with the prefixes if they are to be warm."""
        await self._client.reset_caches()
        if self._options.cache == "warm":
            filling = filling_chain(self._chain)
            await asyncio.gather(
                *(
                    self._client.run(filling, None, SubmitOptions(mode="serial", group=group, exactness=level))
                    for group in self._groups
                )
            )

    def _submit_options(self, mode: RunMode, level: Exactness | None = None) -> SubmitOptions:
        options = self._options
        return SubmitOptions(
            mode="serial" if mode == "presend" else mode,
            session=options.session,
            append_tokens=options.append_tokens,
            exactness=level,
        )

    async def _run(self, mode: RunMode, index: int, level: Exactness | None) -> Run:
        options = self._options
        await self._set_caches(level)
        started = time.monotonic()
        if mode == "presend":
            result = await run_presend(self._client, self._presend, self._groups, level)
            wall_ms = e2e_ms = result.e2e_ms or 0.0
        else:
            result = await self._client.run(self._chain, None, self._submit_options(mode, level))
            wall_ms = (time.monotonic() - started) * 1e3
            e2e_ms = result.e2e_ms or 0.0
        return Run(
            profile=self._chain.name,
            mode=mode,
            cache=options.cache,
            index=index,
            warmup=index < 0,
            e2e_ms=e2e_ms,
            wall_ms=wall_ms,
            result=result,
            max_tokens=[agent.max_tokens for agent in self._chain.agents],
            session=options.session or "default",
            append_tokens=options.append_tokens,
            exactness=result.exactness,
            forced_lengths=options.force_max_output_tokens,
            seed=options.seed,
            temperature=options.temperature,
            provenance=self._provenance,
        )
