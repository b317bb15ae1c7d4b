"""Waiting for a daemon that starts, with its bars in sight: what commands that need its engines share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rich.console import Console

from pingpong_bus.messages import StatusReply
from pingpong_client.client import AsyncClient
from pingpong_client.commands.context import Context
from pingpong_client.start_bars import StartBars
from pingpong_client.table import clean
from pingpong_client.transport import NobodyThere

POLL_S = 0.25


@asynccontextmanager
async def found(context: Context) -> AsyncIterator[AsyncClient]:
    """A client of the daemon. With ``--wait`` one that is not there yet is looked for until it is: a script may have
    started it a moment ago.

    Raises:
        DaemonUnavailable: there is none, and no ``--wait``; or this user may not use it.
    """
    told = False
    async with AsyncExitStack() as stack:
        while True:
            client = context.connect()  # anew: where its socket is depends on what is there
            try:
                await stack.enter_async_context(client)
                break
            except NobodyThere:
                if not context.args.wait:
                    raise
            if not told:
                told = True
                context.note(f"no daemon is at {client.socket} yet: waiting for one.")
            await asyncio.sleep(POLL_S)
        yield client


async def until_started(context: Context, client: AsyncClient) -> None:
    """Return once the daemon serves, at once where it does; a daemon that drains is not waited for.

    Bars on standard error tell how far it has come; where that is no terminal for them, a line for each new stage.

    Raises:
        DaemonUnavailable: it has ended.
    """
    status = await client.status()
    if status.state != "starting":
        return
    console = Console(file=context.stderr)
    bars = StartBars(console) if context.stderr.isatty() and not console.is_dumb_terminal else None
    told: set[str] = set()
    try:
        while status.state == "starting":
            if bars is not None:
                bars.update(status.workers, status.progress)
            else:
                for stage in _stages(status):
                    if stage not in told:
                        told.add(stage)
                        context.note(clean(stage, lines=False))
            await asyncio.sleep(POLL_S)
            status = await client.status()
    finally:
        if bars is not None:
            bars.close()


def _stages(status: StatusReply) -> list[str]:
    stages = ["the daemon is starting"]
    if status.progress is not None:
        stages.append(status.progress.stage)
    for worker in status.workers:
        stage = worker.progress.stage if worker.progress is not None else worker.stage
        stages.append(f"{worker.name}: {stage or worker.state}")
    return stages
