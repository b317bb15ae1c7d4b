"""The way to one daemon, over as many connections as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pingpong_bus.errors import DaemonUnavailable, Overloaded
from pingpong_client.connection import Connection, ConnectionClosed
from pingpong_client.transport import START_HINT, Transport

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 2.0

T = TypeVar("T")


class DaemonLink:
    """Connects, and after a loss connects again.

    Args:
        transport: makes the transport of a connection.
        peer: what errors call the daemon's end.
        reconnect_s: how long after the daemon was last heard it is waited for; 0: not at all.
        on_away: called with True when the daemon is being waited for, and with False when it is back.
    """

    def __init__(
        self,
        transport: Callable[[], Transport],
        peer: str,
        *,
        timeout_s: float,
        ping_s: float,
        reconnect_s: float,
        on_away: Callable[[bool], None],
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._timeout_s = timeout_s
        self._ping_s = ping_s
        self._reconnect_s = reconnect_s
        self._on_away = on_away
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._restoring = asyncio.Lock()
        self._closing = asyncio.Event()
        self._heard_s: float | None = None
        self._away = False

    @property
    def away_s(self) -> float | None:
        """Seconds since the daemon was last heard, while it is waited for; otherwise None."""
        heard_s = self._last_heard_s()
        return time.monotonic() - heard_s if self._away and heard_s is not None else None

    async def connected(self) -> Connection:
        """The connection, made anew where it was lost.

        Raises:
            DaemonUnavailable, MessageError: as `Connection.open`.
        """
        async with self._connecting:
            if self._connection is not None and self._connection.error is None:
                return self._connection
            await self._drop()
            connection = Connection(self._transport(), timeout_s=self._timeout_s, ping_s=self._ping_s)
            await connection.open()
            self._connection = connection
            if self._heard_s is None:
                self._heard_s = time.monotonic()
            return connection

    async def close(self) -> None:
        """Drop the connection, and end what waits for a new one."""
        self._closing.set()
        self._closing = asyncio.Event()  # of those that wait from now on
        await self._drop()

    async def persist(self, work: Callable[[Connection], Awaitable[T]], *, hint: str = START_HINT) -> T:
        """Do work that may be done twice, until it is done on a connection that lives so long.

        Args:
            hint: the way out, where the daemon does not come back.

        Raises:
            DaemonUnavailable: the daemon has gone and did not come back in time; at once where it was never there.
        """
        while True:
            try:
                return await work(await self.connected())
            except Overloaded:
                raise
            except DaemonUnavailable as error:
                await self.restored(error, hint=hint)

    async def restored(self, error: DaemonUnavailable, *, hint: str = START_HINT) -> None:
        """Wait until the daemon answers again.

        Raises:
            DaemonUnavailable: `error`, where nothing is to be waited for; another, where it did not come back in time.
        """
        if isinstance(error, ConnectionClosed) or self._reconnect_s <= 0:
            raise error
        closing = self._closing
        async with self._restoring:  # whoever else waits finds it done
            heard_s = self._last_heard_s()
            if heard_s is None:
                raise error
            if closing.is_set():
                raise ConnectionClosed(self._peer)
            if await self._answers():
                return
            try:
                async with asyncio.timeout(max(heard_s + self._reconnect_s - time.monotonic(), 0.0)):
                    await self._wait_for_daemon(closing)
            except TimeoutError:
                raise DaemonUnavailable(
                    f"the daemon at {self._peer} has gone and did not come back within {self._reconnect_s:g} s.",
                    hint=hint,
                ) from None

    async def _wait_for_daemon(self, closing: asyncio.Event) -> None:
        self._away = True
        self._on_away(True)
        try:
            delay_s = FIRST_DELAY_S
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await closing.wait()
                        raise ConnectionClosed(self._peer)
                with contextlib.suppress(DaemonUnavailable):
                    await self.connected()
                if await self._answers():
                    break
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        finally:
            self._away = False
        self._on_away(False)

    async def _answers(self) -> bool:
        """Whether there is a connection with a daemon behind it that answers, and is not merely there."""
        connection = self._connection
        if connection is None or connection.error is not None:
            return False
        try:
            await connection.ping()
        except DaemonUnavailable as error:
            connection.fail(error)
            return False
        return True

    def _last_heard_s(self) -> float | None:
        """By time.monotonic; None where it never was."""
        heard = [self._heard_s, self._connection.heard_s if self._connection is not None else None]
        return max((at_s for at_s in heard if at_s is not None), default=None)

    async def _drop(self) -> None:
        self._heard_s = self._last_heard_s()
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
