"""Erase chains that have ended."""

from __future__ import annotations

import argparse

from pingpong_bus.errors import DaemonUnavailable, PingpongError
from pingpong_client.commands.context import Context

HELP = "erase ended chains, with their prompts and outputs, at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="+", help="id of a chain that has ended, see `list`")


async def run(context: Context) -> int:
    code = 0
    async with context.connect() as client:
        for chain in dict.fromkeys(context.args.ids):
            try:
                await client.forget(chain)
                context.write(f"forgot {chain}")
            except DaemonUnavailable:
                raise
            except PingpongError as error:  # the others are to be erased all the same
                context.note(f"{chain} was not forgotten: {' '.join(str(error).split())}")
                code = code or error.exit_code
    return code
