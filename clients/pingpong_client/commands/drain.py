"""Let a daemon finish what runs and end, or replace the worker of one device group."""

from __future__ import annotations

import argparse
import asyncio
from typing import Literal

from pingpong_bus.errors import DaemonUnavailable, UsageError
from pingpong_bus.messages import StatusReply
from pingpong_client.client import AsyncClient
from pingpong_client.commands.arguments import seconds
from pingpong_client.commands.context import Context

HELP = "finish what runs, take no more and end; or replace one group's worker"
POLL_S = 0.2


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
        status = await client.status()
        if group is not None:
            _require_group(group, status)
            context.write(f"waiting until a fresh worker serves {group}")
            await client.drain(group, deadline_s=timeout_s)
            context.write(f"{group} is served by a fresh worker")
            return 0
        await client.drain(deadline_s=timeout_s)
        await _until_gone(context, client, status)
    return 0


def _require_group(group: str, status: StatusReply) -> None:
    known = [worker.name for worker in status.workers]
    if known and group not in known:  # while the daemon starts there are none yet
        raise UsageError(
            f'there is no device group "{group}".', field="--group", hint=f"There are: {', '.join(known)}."
        )


async def _until_gone(context: Context, client: AsyncClient, status: StatusReply) -> None:
    """Tell what the daemon waits for, each time that it changes, until it has ended."""
    pid, told = status.pid, ""
    running = queued = 0
    while status.pid == pid:  # another pid: it was started anew by a service manager
        running, queued = _count(status, "running"), _count(status, "queued")
        if (waits_for := _waits_for(status)) != told:
            context.write(f"the daemon (pid {pid}) waits for {waits_for}")
            told = waits_for
        await asyncio.sleep(POLL_S)
        try:
            status = await client.status()
        except DaemonUnavailable:
            if await _gone(client):
                break
    context.write(f"the daemon has ended{_left_words(running, queued)}")


def _left_words(running: int, queued: int) -> str:
    """What the daemon has left for its next start; what ran may have finished at the last moment."""
    left = running + queued
    if not left:
        return ""
    chains = _chains(left)
    if running:
        return f"; {left} {chains} had not finished when it last answered: what is left goes on at its next start"
    return f"; {left} {chains} had not finished, and {'goes' if left == 1 else 'go'} on at its next start"


async def _gone(client: AsyncClient) -> bool:
    """Whether nobody answers any more: one request may fail for a daemon that is slow, or in the moment of its end."""
    try:
        await client.status()
    except DaemonUnavailable:
        return True
    return False


def _waits_for(status: StatusReply) -> str:
    """What runs; queued chains start no more, and are kept."""
    running, queued = _count(status, "running"), _count(status, "queued")
    text = f"{running} running {_chains(running)}" if running else "nothing but its engines to stop"
    if queued:
        text += f"; {queued} queued {_chains(queued)} {'is' if queued == 1 else 'are'} kept for its next start"
    return text


def _count(status: StatusReply, state: Literal["running", "queued"]) -> int:
    return status.chains.get(state, 0)


def _chains(count: int) -> str:
    return "chain" if count == 1 else "chains"
