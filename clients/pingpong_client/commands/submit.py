"""Run a chain, or many."""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import aclosing
from pathlib import Path

from pingpong_bus.chain import MAX_CHAIN_BYTES, Chain, resolve_inputs
from pingpong_bus.errors import ChainError, PingpongError, UsageError
from pingpong_bus.messages import SubmitOptions
from pingpong_client.chain_file import load_chain, parse_inputs, read_file
from pingpong_client.client import AsyncClient
from pingpong_client.commands.arguments import (
    add_chain_file,
    add_exactness,
    add_json,
    add_mode,
    add_session,
    add_speculate,
    deadline,
    positive,
    priority,
    trace_context,
    traceparent,
)
from pingpong_client.commands.context import Context
from pingpong_client.commands.showing import show_chain, tell_absence
from pingpong_client.commands.starting import found, until_started
from pingpong_client.explained_table import explained_lines
from pingpong_client.jobs import Job, parse_jobs, run_jobs
from pingpong_client.progress import ChainProgress

HELP = "run a chain and show what its agents write"
_MAX_JSONL_BYTES = 16 * MAX_CHAIN_BYTES
_CONCURRENCY = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain_file(parser, optional=True)
    add_mode(parser)
    add_exactness(parser, "what the chain says, else the daemon's choice")
    add_session(parser)
    add_speculate(parser)
    add_json(parser)
    parser.add_argument(
        "--group", metavar="NAME", help="run on this device group alone, in series or with --mode overlap; see `status`"
    )
    parser.add_argument(
        "--priority", metavar="N", type=priority, default=0, help="-100 to 100; higher ones start first (default: 0)"
    )
    parser.add_argument(
        "--deadline", metavar="SECONDS", type=deadline, help="the chain fails if it has not finished by then"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="run nothing: show what each placement should take now, by what the engines were measured to take; which "
        "would be taken, and what would make the chain faster",
    )
    parser.add_argument(
        "--traceparent",
        metavar="CONTEXT",
        type=traceparent,
        help="W3C trace context that the chain's spans belong to (default: $TRACEPARENT)",
    )
    parser.add_argument("--detach", action="store_true", help="print the chain's id and return")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait for a daemon that is not there yet, or starts; for one that starts always where the output is a "
        "terminal",
    )
    parser.add_argument(
        "--cancel-on-exit", action="store_true", help="cancel the chain if this command is interrupted or ended"
    )
    parser.add_argument(
        "--jsonl",
        metavar="FILE",
        help='run many: one {"chain" or "path", "inputs", "mode", "exactness", "speculate", "priority", "deadline_s"} '
        "a line (- is stdin); one result a line, as they end",
    )
    parser.add_argument(
        "--concurrency", metavar="N", type=positive, help=f"chains at a time with --jsonl (default: {_CONCURRENCY})"
    )


async def run(context: Context) -> int:
    args = context.args
    if args.group is not None and args.mode == "ping-pong":
        raise UsageError("--group runs a chain on one group, ping-pong needs two.", hint="Leave one of them out.")
    options = SubmitOptions(
        mode=args.mode,
        session=args.session,
        group=args.group,
        priority=args.priority,
        deadline_s=args.deadline,
        exactness=args.exactness,
        speculate=args.speculate,
        traceparent=args.traceparent or trace_context(os.environ),
    )
    if args.explain:
        _check_nothing_runs(args)
    given = parse_inputs(args.input)
    if args.jsonl is not None:
        if args.chain is not None or args.detach:
            raise UsageError("--jsonl goes with neither a chain file nor --detach.", hint="Leave one of them out.")
        return await _run_many(context, _read_jobs(context, given), options)
    if args.chain is None:
        raise UsageError("no chain file is given.", hint="Name one, or - for standard input.")
    if args.detach and (args.json or args.cancel_on_exit):
        raise UsageError("--detach goes with neither --json nor --cancel-on-exit.", hint="Leave one of them out.")
    chain = load_chain(args.chain, stdin=context.stdin)
    resolve_inputs(chain, given)
    if args.explain:
        return await _explain(context, chain, given, options)
    async with found(context) as client:
        await _wait_for_start(context, client)
        tell_absence(context, client)
        chain_id = await client.submit(chain, given, options, follow=not args.detach)
        if args.detach:
            context.write(chain_id)
            return 0
        try:
            return await show_chain(context, client, ChainProgress.of_chain(chain_id, chain))
        except (asyncio.CancelledError, BrokenPipeError):
            await _leave(context, client, {chain_id})
            raise


def _check_nothing_runs(args: argparse.Namespace) -> None:
    given = {
        "--traceparent": args.traceparent is not None,
        "--jsonl": args.jsonl is not None,
        "--concurrency": args.concurrency is not None,
        "--detach": args.detach,
        "--cancel-on-exit": args.cancel_on_exit,
        "--priority": args.priority != 0,
        "--deadline": args.deadline is not None,
    }
    named = " and ".join(option for option, there in given.items() if there)
    if named:
        raise UsageError(f"--explain runs nothing, so it does not go with {named}.", hint="Leave one of them out.")


async def _explain(context: Context, chain: Chain, given: dict[str, str], options: SubmitOptions) -> int:
    async with found(context) as client:
        await _wait_for_start(context, client)
        explained = await client.explain(chain, given, options)
    if context.args.json:
        context.write_reply(explained)
    else:
        context.write(*explained_lines(explained, context.width))
    return 0


async def _run_many(context: Context, jobs: list[Job], options: SubmitOptions) -> int:
    running: set[str] = set()
    failed = 0
    async with found(context) as client:
        await _wait_for_start(context, client)
        tell_absence(context, client)
        try:
            concurrency = context.args.concurrency or _CONCURRENCY
            outcomes = run_jobs(client, jobs, options, concurrency=concurrency, running=running)
            async with aclosing(outcomes):
                async for outcome in outcomes:
                    failed += not outcome.finished
                    context.write(outcome.as_json().decode())
        except (asyncio.CancelledError, BrokenPipeError):
            await _leave(context, client, running)
            raise
    if failed:
        context.note(f"{failed} of {len(jobs)} chains did not finish.")
    return 1 if failed else 0


async def _wait_for_start(context: Context, client: AsyncClient) -> None:
    """A person would only try again; a script may have plans of its own."""
    if context.args.wait or context.on_terminal:
        await until_started(context, client)


async def _leave(context: Context, client: AsyncClient, chains: set[str]) -> None:
    """Interrupted: end what runs, or say how to come back to it."""
    for chain in sorted(chains):
        if context.args.cancel_on_exit:
            try:
                await client.cancel(chain)
            except PingpongError as error:
                context.note(f"{chain} could not be cancelled: {error}")
            else:
                context.note(f"cancelled {chain}.")
        else:
            context.note(f"{chain} goes on; `pingpong-client result {chain}` fetches its result.")


def _read_jobs(context: Context, given: dict[str, str]) -> list[Job]:
    name = context.args.jsonl
    folder = Path() if name == "-" else Path(name).parent
    if name == "-":
        data = context.stdin.read(_MAX_JSONL_BYTES + 1)
    else:
        data = read_file(Path(name), limit=_MAX_JSONL_BYTES, what="the file")
    if len(data) > _MAX_JSONL_BYTES:
        source = "standard input" if name == "-" else name
        raise ChainError(
            f"{source} is larger than {_MAX_JSONL_BYTES} bytes.", hint="Split it into several files of lines."
        )
    return parse_jobs(data, folder, given)
