"""Cancel a chain."""

from __future__ import annotations

import argparse

from pingpong_client.commands.arguments import add_chain_id
from pingpong_client.commands.context import Context
from pingpong_client.commands.showing import tell_absence
from pingpong_client.following import ENDED_STATES

HELP = "cancel a chain and wait until it has ended"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain_id(parser)
    parser.add_argument(
        "--no-wait", action="store_true", help="return once the daemon knows; the chain ends soon after"
    )


async def run(context: Context) -> int:
    chain = context.args.id
    async with context.connect() as client:
        tell_absence(context, client)
        before = await client.result(chain)
        if before.state in ENDED_STATES:
            context.note(f"{chain} had ended before: {before.state}.")
            return 0
        await client.cancel(chain)
        if context.args.no_wait:
            return 0
        ended = await client.wait(chain)
    context.write(f"{chain}: {ended.state}" if ended.state != "finished" else f"{chain}: had finished before")
    return 0
