"""Print the JSON Schema of chain.json; needs no daemon."""

from __future__ import annotations

import argparse

import msgspec

from pingpong_bus.chain import json_schema
from pingpong_client.commands.context import Context

HELP = "print the JSON Schema of chain.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


async def run(context: Context) -> int:
    context.write(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode())
    return 0
