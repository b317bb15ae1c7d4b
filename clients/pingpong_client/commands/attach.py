"""Follow a chain that was submitted before."""

from __future__ import annotations

import argparse

from pingpong_client.commands.arguments import add_chain_id, add_json
from pingpong_client.commands.context import Context
from pingpong_client.commands.showing import show_chain, tell_absence
from pingpong_client.progress import ChainProgress

HELP = "follow a chain that was submitted before"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain_id(parser)
    add_json(parser)


async def run(context: Context) -> int:
    async with context.connect() as client:
        tell_absence(context, client)
        snapshot = await client.attach(context.args.id)
        return await show_chain(context, client, ChainProgress.of_result(snapshot))
