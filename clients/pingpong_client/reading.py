"""Reading a chain's events to its end, over as many connections as it takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pingpong_bus.errors import DaemonUnavailable, Overloaded
from pingpong_bus.messages import ChainEvent
from pingpong_client.connection import Connection
from pingpong_client.following import Following
from pingpong_client.link import DaemonLink


async def read_events(link: DaemonLink, following: Following) -> AsyncGenerator[ChainEvent, None]:
    """What is to be given of a chain, up to and with ``ended``.

    Raises:
        ChainNotFound: the chain is not there any more.
        DaemonUnavailable: the daemon has gone, and did not come back in time.
    """
    while not following.ended:
        try:
            async with aclosing(_read_one_connection(await link.connected(), following)) as events:
                async for event in events:
                    yield event
        except Overloaded:
            raise
        except DaemonUnavailable as error:
            await link.restored(error, hint=attach_hint(following.chain))


def attach_hint(chain: str) -> str:
    """The way out for somebody whose daemon did not come back under a chain."""
    return f"Once it runs again, `pingpong-client attach {chain}` follows the chain to its end."


async def _read_one_connection(connection: Connection, following: Following) -> AsyncGenerator[ChainEvent, None]:
    chain = following.chain
    if not connection.follows(chain):  # it is a new one
        for event in following.take(await connection.attach(chain)):
            yield event
        if following.ended:
            return
    asked = False
    async with aclosing(connection.news(chain)) as news:
        async for item in news:
            for event in following.take(item):
                yield event
            if following.ended:
                return
            if following.stale and not asked:
                await connection.attach(chain)  # its snapshot comes with the news
            asked = following.stale
