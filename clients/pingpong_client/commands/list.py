"""List the chains that the daemon remembers."""

from __future__ import annotations

import argparse

import msgspec

from pingpong_client.commands.arguments import add_json
from pingpong_client.commands.context import Context
from pingpong_client.report import list_lines

HELP = "list chains"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


async def run(context: Context) -> int:
    async with context.connect() as client:
        chains = await client.list()
    if context.args.json:
        context.write_json(msgspec.to_builtins(chains))
    else:
        context.write(*list_lines(chains, context.width))
    return 0
