"""Print what a chain has given."""

from __future__ import annotations

import argparse

from pingpong_client.client import finished
from pingpong_client.commands.arguments import add_chain_id, add_json
from pingpong_client.commands.context import Context
from pingpong_client.following import ENDED_STATES
from pingpong_client.result_table import result_table, texts

HELP = "print the result of a chain, as far as there is one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain_id(parser)
    add_json(parser)


async def run(context: Context) -> int:
    async with context.connect() as client:
        result = await client.result(context.args.id)
    if context.args.json:
        context.write_json(result)
    else:
        context.stdout.write(texts(result))
        context.write(*result_table(result, context.width))
    if result.state in ENDED_STATES:
        finished(result)
    return 0
