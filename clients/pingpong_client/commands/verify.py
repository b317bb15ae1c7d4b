"""Run a chain in series and read ahead, and certify that both gave the same."""

from __future__ import annotations

import argparse

from pingpong_bus.chain import resolve_inputs
from pingpong_bus.messages import Mode
from pingpong_client.certificate import certificate_lines
from pingpong_client.chain_file import load_chain, parse_inputs
from pingpong_client.commands.arguments import add_chain_file, add_json, add_session, positive
from pingpong_client.commands.context import Context
from pingpong_client.commands.showing import tell_absence
from pingpong_client.verification import verify

HELP = "prove that reading ahead gives the same tokens as running in series"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain_file(parser)
    add_session(parser)
    add_json(parser)
    parser.add_argument("--runs", metavar="N", type=positive, default=1, help="runs in each mode (default: 1)")


async def run(context: Context) -> int:
    args = context.args
    given = parse_inputs(args.input)
    chain = load_chain(args.chain, stdin=context.stdin)
    resolve_inputs(chain, given)

    def say(run: int, mode: Mode) -> None:
        if context.stderr.isatty():
            context.note(f"run {run} of {args.runs}, {mode}")

    async with context.connect() as client:
        tell_absence(context, client)
        certificate = await verify(client, chain, given, runs=args.runs, session=args.session, on_progress=say)
    if args.json:
        context.write_json(certificate)
    else:
        context.write(*certificate_lines(certificate, context.width))
    certificate.check()
    return 0
