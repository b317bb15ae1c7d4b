"""Runs a chain in several modes, over and over, and reports what each took.

    python benchmarks/chain.py --config examples/cpu.toml --modes serial,ping-pong,presend --runs 10 --out cold.jsonl
    python benchmarks/chain.py --config examples/cpu.toml --cache warm --out warm.jsonl
    python benchmarks/chain.py --profile text --force-max-output-tokens --socket $XDG_RUNTIME_DIR/pingpongd
    python benchmarks/chain.py --report cold.jsonl warm.jsonl

With --config it starts a daemon of its own, otherwise it talks to a running one. Devices, dtype and engine are the
daemon's. Exit codes: those of the client; 3 where a run is not equal to its serial run and --strict-equal is given.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from local_daemon import local_daemon
from pingpong_bus.chain import Chain
from pingpong_bus.errors import NotEqual, PingpongError, UsageError
from pingpong_bus.messages import StatusReply, SubmitOptions
from pingpong_client import AsyncClient
from presend import PresendAgent, presend_agents, run_presend
from profiles import PROFILES, Profile, ids_chain, text_chain, with_forced_length, with_sampling
from provenance import provenance
from report import exactness, measured, render
from runs import RUN_MODES, Run, RunMode, append_run, length_faults, read_runs


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure a chain, in series and read ahead.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, help="start a daemon with this file, and stop it at the end")
    where.add_argument("--socket", type=Path, help="a running daemon's socket or folder (default: the usual places)")
    parser.add_argument("--model", help="with --config: the model, over the file's")
    parser.add_argument(
        "--profile", default="cpu", help=f"{', '.join(PROFILES)}, text (the five-agent example), or a chain's JSON file"
    )
    parser.add_argument("--prefix", type=int, help="tokens of each agent's own text, over the profile's")
    parser.add_argument("--output", type=int, help="tokens that each agent writes, the last one a quarter")
    parser.add_argument("--agents", type=int, help="number of agents, over the profile's")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmup-runs", type=int, help="default: 1, and 2 with a warm cache (chains change groups)")
    parser.add_argument("--modes", default="serial,ping-pong", help=f"of {', '.join(RUN_MODES)}; comma-separated")
    parser.add_argument("--order", choices=["alternate", "fixed"], default="alternate", help="of the modes")
    parser.add_argument("--cache", choices=["cold", "warm"], default="cold", help="cold: emptied before each run")
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


def chosen_modes(text: str) -> list[RunMode]:
    """The modes of a comma-separated list.

    Raises:
        UsageError: one is unknown.
    """
    modes = text.split(",")
    for mode in modes:
        if mode not in RUN_MODES:
            raise UsageError(f"--modes: there is no mode {mode!r}.", hint=f"Choose from {', '.join(RUN_MODES)}.")
    return [mode for name in modes for mode in RUN_MODES if mode == name]


def mode_order(modes: list[RunMode], index: int, order: str) -> list[RunMode]:
    """The modes in the order of run `index`; every other run is reversed, so that drift hits all alike."""
    return modes[::-1] if order == "alternate" and index % 2 else list(modes)


def build_chain(options: argparse.Namespace, vocabulary: int) -> Chain:
    """The chain that the command line asks for; random ids stay below `vocabulary`.

    Raises:
        UsageError: no such profile. ChainError: the file is no valid chain.
    """
    if options.profile in PROFILES:
        chain = ids_chain(shaped(PROFILES[options.profile], options), seed=options.seed, vocabulary=vocabulary)
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


def shaped(profile: Profile, options: argparse.Namespace) -> Profile:
    """The profile with what the command line changes, and then named for its shape."""
    if not (options.prefix or options.output or options.agents):
        return profile
    prefix, output, agents = (
        options.prefix or profile.prefix,
        options.output or profile.output,
        options.agents or profile.agents,
    )
    return Profile(
        name=f"{agents} agents, prefix {prefix}, output {output}",
        prefix=prefix,
        output=output,
        last_output=max(1, output // 4) if options.output else profile.last_output,
        agents=agents,
        suffix=profile.suffix,
    )


@asynccontextmanager
async def connection(options: argparse.Namespace) -> AsyncIterator[AsyncClient]:
    """A client of the daemon that the command line names, or of one started for it."""
    if options.config is None:
        async with AsyncClient(options.socket) as client:
            yield client
        return

    def show(event: dict[str, Any]) -> None:
        if event.get("event") in ("model_stage", "worker_loading"):
            print(f"{event.get('worker') or event.get('model')}: {event['stage']}", file=sys.stderr)

    flags = ["--model", options.model] if options.model else []
    async with local_daemon(options.config, flags=flags, on_event=show) as folder, AsyncClient(folder) as client:
        yield client


class Harness:
    """Runs one chain in the modes asked for, and keeps what came of it."""

    def __init__(self, client: AsyncClient, options: argparse.Namespace, chain: Chain, status: StatusReply) -> None:
        self._client = client
        self._options = options
        self._chain = chain
        self._groups = [worker.name for worker in status.workers]
        self._presend: list[PresendAgent] = []
        engines = [
            {"group": worker.name, "devices": worker.devices, **msgspec.to_builtins(worker.limits)}
            for worker in status.workers
        ]
        self._provenance = {**provenance(), "engines": engines, "arguments": sys.argv[1:]}

    async def run_all(self) -> list[Run]:
        """All runs, warm-up first.

        Raises:
            ChainFailed: a chain failed. NotEqual: an answer ended early, with --strict-output-tokens.
        """
        options = self._options
        modes = chosen_modes(options.modes)
        warmups = (2 if options.cache == "warm" else 1) if options.warmup_runs is None else options.warmup_runs
        if "presend" in modes:
            self._presend = await self._learn_presend()
        runs: list[Run] = []
        for index in range(-warmups, options.runs):
            for mode in mode_order(modes, index, options.order):
                run = await self._run(mode, index)
                print(f"{'warm-up' if run.warmup else index + 1} {mode}: {run.e2e_ms:,.0f} ms", file=sys.stderr)
                runs.append(run)
                if options.out:
                    append_run(options.out, run)
                if options.strict_output_tokens and (faults := length_faults(run)):
                    raise NotEqual(f"{'; '.join(faults)}.", hint="--force-max-output-tokens forces the length.")
        return runs

    def _submit_options(self, mode: RunMode) -> SubmitOptions:
        options = self._options
        return SubmitOptions(
            mode="serial" if mode == "presend" else mode, session=options.session, append_tokens=options.append_tokens
        )

    async def _learn_presend(self) -> list[PresendAgent]:
        chain_id = await self._client.submit(self._chain, None, self._submit_options("serial"), follow=True)
        await self._client.wait(chain_id)
        return presend_agents(self._chain, await self._client.result(chain_id, prompt_ids=True))

    async def _run(self, mode: RunMode, index: int) -> Run:
        options = self._options
        if options.cache == "cold":
            await self._client.reset_caches()
        started = time.monotonic()
        if mode == "presend":
            result = await run_presend(self._client, self._presend, self._groups)
            wall_ms = e2e_ms = result.e2e_ms or 0.0
        else:
            result = await self._client.run(self._chain, None, self._submit_options(mode))
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
            seed=options.seed if options.temperature else None,
            temperature=options.temperature,
            provenance=self._provenance,
        )


async def measure(options: argparse.Namespace) -> list[Run]:
    """Connect, run everything and return the runs."""
    chosen_modes(options.modes)
    async with connection(options) as client:
        status = await client.status()
        vocabulary = min(worker.limits.vocabulary_size for worker in status.workers if worker.limits)
        return await Harness(client, options, build_chain(options, vocabulary), status).run_all()


def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    try:
        runs = read_runs(options.report) if options.report else asyncio.run(measure(options))
    except PingpongError as error:
        print(f"chain.py: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    print(render(runs))
    by_mode = measured(runs)
    if options.strict_equal and "serial" in by_mode:
        results = [exactness(by_mode["serial"], found) for found in by_mode.values()]
        return 0 if all(result.exact == result.compared for result in results) else NotEqual.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
