"""Let a daemon finish what runs and end, or replace the worker of one device group."""

from __future__ import annotations

import argparse
import asyncio

from pingpong_bus.errors import DaemonUnavailable
from pingpong_bus.messages import StatusReply
from pingpong_client.client import AsyncClient
from pingpong_client.commands.arguments import seconds
from pingpong_client.commands.context import Context

HELP = "finish what runs, take no more and end; or replace one group's worker"
POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--group", metavar="NAME", help="only replace this device group's worker, while chains go on; see `status`"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        help="how long running work may take; the rest is kept (default: the daemon's drain_seconds)",
    )


async def run(context: Context) -> int:
    group, timeout_s = context.args.group, context.args.timeout
    async with context.connect() as client:
        if group is not None:
            context.write(f"waiting until a fresh worker serves {group}")
            await client.drain(group, deadline_s=timeout_s)
            context.write(f"{group} is served by a fresh worker")
            return 0
        status = await client.status()
        await client.drain(deadline_s=timeout_s)
        await _until_gone(context, client, status)
    return 0


async def _until_gone(context: Context, client: AsyncClient, status: StatusReply) -> None:
    """Tell what the daemon waits for, each time that it changes, until it has ended."""
    pid, told = status.pid, ""
    while status.pid == pid:  # another pid: it was started anew by a service manager
        if (waits_for := _live_chains(status)) != told:
            context.write(f"the daemon (pid {pid}) waits for {waits_for}")
            told = waits_for
        await asyncio.sleep(POLL_S)
        try:
            status = await client.status()
        except DaemonUnavailable:
            if await _gone(client):
                break
    context.write("the daemon has ended")


async def _gone(client: AsyncClient) -> bool:
    """Whether nobody answers any more: one request may fail for a daemon that is slow, or in the moment of its end."""
    try:
        await client.status()
    except DaemonUnavailable:
        return True
    return False


def _live_chains(status: StatusReply) -> str:
    live = {state: count for state in ("running", "queued") if (count := status.chains.get(state, 0))}
    chains = ", ".join(f"{count} {state}" for state, count in live.items())
    return f"chains: {chains}" if chains else "nothing but its engines to stop"
