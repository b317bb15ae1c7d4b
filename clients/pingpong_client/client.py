"""The asynchronous client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from pingpong_bus.chain import Chain, parse_chain, resolve_inputs
from pingpong_bus.errors import ChainFailed
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attach,
    Cancel,
    ChainEvent,
    ChainList,
    ChainResult,
    ChainSummary,
    ClientRequest,
    DaemonMessage,
    Done,
    GetResult,
    GetStatus,
    ListChains,
    ResetCaches,
    ResultReply,
    Snapshot,
    StatusReply,
    Submit,
    SubmitOptions,
)
from pingpong_client.address import socket_path
from pingpong_client.connection import Connection
from pingpong_client.transport import Transport, ZmqTransport

TIMEOUT_S = 10.0
PING_S = 2.0

Reply = TypeVar("Reply", bound=DaemonMessage)
Summaries = list[ChainSummary]  # inside the class, `list` is the method


class AsyncClient:
    """Talks to one daemon; an async context manager.

    ::

        async with AsyncClient() as client:
            result = await client.run(chain, {"topic": "tides"})

    It connects on entry. A connection that was lost raises `DaemonUnavailable` in whatever waits, and is made anew by
    the next call. One event loop, any number of tasks.

    Args:
        socket: the daemon's control socket or its folder; None: see `address.py`.
        instance: the daemon's instance name, instead of `socket`.
        timeout_s: how long the daemon may take to answer. A chain may take as long as it likes.
        ping_s: how long a chain may be silent before the daemon is asked whether it is still there.
        transport: makes the connection; for tests.

    Raises:
        UsageError: `socket` and `instance` are both given, or cannot be right.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        instance: str | None = None,
        timeout_s: float = TIMEOUT_S,
        ping_s: float = PING_S,
        transport: Callable[[Path], Transport] = ZmqTransport,
    ) -> None:
        self.socket = socket_path(socket, instance=instance)
        self._timeout_s = timeout_s
        self._ping_s = ping_s
        self._transport = transport
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connection; chains go on."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def submit(
        self,
        chain: Chain,
        inputs: Mapping[str, str] | None = None,
        options: SubmitOptions | None = None,
        *,
        follow: bool = False,
    ) -> str:
        """Hand a chain to the daemon and return its id once it is accepted.

        Args:
            inputs: values of the chain's inputs, over its defaults.
            follow: keep its events for `follow`.

        Raises:
            ChainError: the chain or an input is off; found before the daemon is asked.
            DataError: chain and inputs together are larger than a message may be.
            Overloaded: the daemon takes no work now.
            DaemonUnavailable: there is none.
        """
        # A struct built in Python has not been checked; as JSON it is, like a file.
        checked = parse_chain(msgspec.json.encode(chain))
        given = dict(inputs or {})
        resolve_inputs(checked, given)
        accepted = await self._ask(
            lambda number: Submit(
                request=number,
                version=PROTOCOL_VERSION,
                chain=checked,
                inputs=given,
                options=options or SubmitOptions(),
                follow=follow,
            ),
            Accepted,
            follow=follow,
            patient=True,  # a worker tokenizes the prompts first, those of chains before this one too
        )
        return accepted.chain

    async def run(
        self, chain: Chain, inputs: Mapping[str, str] | None = None, options: SubmitOptions | None = None
    ) -> ChainResult:
        """Submit a chain, wait for its end and return the result.

        Raises:
            ChainFailed: it failed or was cancelled; `result` has what there is.
            ChainError, Overloaded, DaemonUnavailable: as `submit`.
        """
        return finished(await self.wait(await self.submit(chain, inputs, options, follow=True)))

    async def wait(self, chain: str) -> ChainResult:
        """Wait for a chain's end and return its result, whatever its state.

        Raises:
            ChainNotFound: there is none of that id.
        """
        async with aclosing(self.follow(chain)) as events:
            async for _ in events:
                pass
        return await self.result(chain)

    async def follow(self, chain: str) -> AsyncGenerator[ChainEvent, None]:
        """The events of a chain, up to and with ``ended``.

        From its beginning after ``submit(..., follow=True)``, from the snapshot on after `attach`; otherwise from now.
        Without any for a chain that has ended.

        Raises:
            ChainNotFound: there is none of that id.
            DaemonUnavailable: the daemon has gone.
        """
        connection = await self._connected()
        if not connection.follows(chain):
            snapshot = await self.attach(chain)
            chain = snapshot.id
            connection = await self._connected()
        if connection.follows(chain):
            async with aclosing(connection.events(chain)) as events:
                async for event in events:
                    yield event

    async def attach(self, chain: str) -> ChainResult:
        """Where a chain stands; `follow` goes on from there.

        Raises:
            ChainNotFound: there is none of that id.
        """
        reply = await self._ask(
            lambda number: Attach(request=number, version=PROTOCOL_VERSION, chain=chain), Snapshot, follow=True
        )
        return reply.result

    async def list(self) -> Summaries:
        """All chains that the daemon remembers."""
        reply = await self._ask(lambda number: ListChains(request=number, version=PROTOCOL_VERSION), ChainList)
        return reply.chains

    async def status(self) -> StatusReply:
        """The daemon, its workers and slots."""
        return await self._ask(lambda number: GetStatus(request=number, version=PROTOCOL_VERSION), StatusReply)

    async def result(self, chain: str, *, prompt_ids: bool = False) -> ChainResult:
        """What a chain has given, so far if it still runs.

        Args:
            prompt_ids: with the ids of every agent's prompt.

        Raises:
            ChainNotFound: there is none of that id.
        """
        reply = await self._ask(
            lambda number: GetResult(request=number, version=PROTOCOL_VERSION, chain=chain, prompt_ids=prompt_ids),
            ResultReply,
        )
        return reply.result

    async def cancel(self, chain: str) -> None:
        """End a chain; one that has ended stays as it is.

        Raises:
            ChainNotFound: there is none of that id.
        """
        await self._ask(lambda number: Cancel(request=number, version=PROTOCOL_VERSION, chain=chain), Done)

    async def reset_caches(self) -> None:
        """Empty the prefix cache of every group.

        Raises:
            Overloaded: a chain runs.
        """
        await self._ask(lambda number: ResetCaches(request=number, version=PROTOCOL_VERSION), Done)

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._connection is not None and self._connection.error is None:
                return self._connection
            await self.close()
            connection = Connection(self._transport(self.socket), timeout_s=self._timeout_s, ping_s=self._ping_s)
            await connection.open()
            self._connection = connection
            return connection

    async def _ask(
        self,
        build: Callable[[int], ClientRequest],
        expect: type[Reply],
        *,
        follow: bool = False,
        patient: bool = False,
    ) -> Reply:
        connection = await self._connected()
        return await connection.request(build, expect, follow=follow, patient=patient)


def finished(result: ChainResult) -> ChainResult:
    """The result of a chain that has finished.

    Raises:
        ChainFailed: it ended any other way.
    """
    if result.state == "finished":
        return result
    if result.state == "cancelled":
        why = "" if result.error in ("", "cancelled") else f": {result.error.removesuffix('.')}"
        raise ChainFailed(f"the chain {result.id} was cancelled{why}.")
    raise ChainFailed(
        f"the chain {result.id} {result.state}: {result.error or 'no reason was given'}",
        hint=f"`pingpong-client result {result.id}` shows what there is.",
    )
