"""Show the daemon, its workers and slots."""

from __future__ import annotations

import argparse

from pingpong_client.commands.arguments import add_json
from pingpong_client.commands.context import Context
from pingpong_client.commands.starting import found, until_started
from pingpong_client.report import status_lines

HELP = "show the daemon, its workers and slots"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "--wait", action="store_true", help="first wait until a daemon that is not there yet, or starts, has started"
    )


async def run(context: Context) -> int:
    async with found(context) as client:
        if context.args.wait:
            await until_started(context, client)
        status = await client.status()
        # What queued chains wait for is in their list alone.
        chains = await client.list() if status.chains.get("queued") and not context.args.json else []
    if context.args.json:
        context.write_reply(status)
    else:
        context.write(*status_lines(status, chains, context.width))
    return 0
