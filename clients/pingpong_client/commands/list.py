"""List the chains that the daemon remembers."""

from __future__ import annotations

import argparse

import msgspec

from pingpong_client.commands.arguments import add_json, positive
from pingpong_client.commands.context import Context
from pingpong_client.report import list_lines

HELP = "list chains"
MAX_LIMIT = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "--limit", metavar="N", type=limit, default=100, help="the latest chains only, up to 10,000 (default: 100)"
    )


def limit(text: str) -> int:
    """An argument that is a number of chains."""
    value = positive(text)
    if value > MAX_LIMIT:
        raise argparse.ArgumentTypeError(f"{value} is more than {MAX_LIMIT}")
    return value


async def run(context: Context) -> int:
    async with context.connect() as client:
        chains = await client.list(context.args.limit)
    if context.args.json:
        context.write_json(msgspec.to_builtins(chains))
    else:
        context.write(*list_lines(chains, context.width))
    return 0
