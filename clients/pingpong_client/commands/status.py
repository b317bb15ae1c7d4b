"""Show the daemon, its workers and slots."""

from __future__ import annotations

import argparse

import msgspec

from pingpong_client.commands.arguments import add_json
from pingpong_client.commands.context import Context
from pingpong_client.report import status_lines

HELP = "show the daemon, its workers and slots"
_WIRE_ONLY = ("type", "request")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


async def run(context: Context) -> int:
    async with context.connect() as client:
        status = await client.status()
        # What queued chains wait for is in their list alone.
        chains = await client.list() if status.chains.get("queued") and not context.args.json else []
    if context.args.json:
        fields = msgspec.to_builtins(status)
        context.write_json({name: value for name, value in fields.items() if name not in _WIRE_ONLY})
    else:
        context.write(*status_lines(status, chains, context.width))
    return 0
