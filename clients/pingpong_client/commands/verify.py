"""Run a chain in series and read ahead, and certify that both gave the same."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from pingpong_bus.chain import resolve_inputs
from pingpong_bus.messages import Mode
from pingpong_client.against import check_same_chain
from pingpong_client.certificate import ReadAheadMode
from pingpong_client.certificate_file import read_certificate, write_certificate
from pingpong_client.certificate_table import certificate_lines
from pingpong_client.chain_file import load_chain, parse_inputs
from pingpong_client.commands.arguments import (
    add_chain_file,
    add_exactness,
    add_json,
    add_session,
    add_speculate,
    positive,
)
from pingpong_client.commands.context import Context
from pingpong_client.commands.showing import tell_absence
from pingpong_client.output_file import check_writable
from pingpong_client.verification import verify

HELP = "prove that reading ahead gives the same tokens as running in series"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain_file(parser)
    parser.add_argument(
        "--mode",
        choices=get_args(ReadAheadMode),
        help="what is compared with series (default: ping-pong with two device groups of a model, overlap with one)",
    )
    add_exactness(parser, "what the chain says, else grid, with overlap invariant, with guessed tokens fast")
    add_session(parser)
    add_speculate(parser)
    add_json(parser)
    parser.add_argument("--runs", metavar="N", type=positive, help="runs in each mode (default: 1, or as --against)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the certificate there, as JSON")
    parser.add_argument(
        "--against",
        metavar="FILE",
        type=Path,
        help="check against an earlier certificate of the chain; its mode, level, session and seeds are the defaults",
    )


async def run(context: Context) -> int:
    args = context.args
    given = parse_inputs(args.input)
    chain = load_chain(args.chain, stdin=context.stdin)
    resolve_inputs(chain, given)
    earlier = None
    if args.against is not None:
        earlier = read_certificate(args.against)
        check_same_chain(earlier, chain, given)
    if args.output is not None:
        check_writable(args.output)

    runs = args.runs or (earlier.pairs if earlier is not None else 1)

    def say(run: int, mode: Mode) -> None:
        if context.stderr.isatty():
            context.note(f"run {run} of {runs}, {mode}")

    async with context.connect() as client:
        tell_absence(context, client)
        certificate = await verify(
            client,
            chain,
            given,
            runs=runs,
            mode=args.mode,
            exactness=args.exactness,
            session=args.session,
            speculate=args.speculate,
            earlier=earlier,
            on_progress=say,
        )
    if args.output is not None:
        write_certificate(args.output, certificate)
    if args.json:
        context.write_json(certificate)
    else:
        context.write(*certificate_lines(certificate, context.width))
    certificate.check()
    return 0
