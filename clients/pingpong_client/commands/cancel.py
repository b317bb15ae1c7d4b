"""Cancel a chain."""

from __future__ import annotations

import argparse

from pingpong_client.commands.arguments import add_chain_id
from pingpong_client.commands.context import Context

HELP = "cancel a chain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain_id(parser)


async def run(context: Context) -> int:
    async with context.connect() as client:
        await client.cancel(context.args.id)
    return 0
