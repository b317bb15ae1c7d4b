"""One connection to a daemon: numbers requests, matches replies, sorts news by chain, and says how much was read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeVar

import msgspec

from pingpong_bus.codec import MAX_CONTROL_BYTES, decode_daemon_message, encode
from pingpong_bus.errors import (
    ChainNotFound,
    DaemonUnavailable,
    DataError,
    MessageError,
    PingpongError,
    error_from_code,
)
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attach,
    ChainEvent,
    ChainResult,
    ClientRequest,
    DaemonMessage,
    ErrorReply,
    GetStatus,
    Seen,
    Snapshot,
    StatusReply,
)
from pingpong_client.following import ENDED_STATES
from pingpong_client.transport import Transport, daemon_silent

UNREADABLE_REQUEST = 0
"""The request number of the daemon's reply to a frame in which it could not find one."""

SEEN_MESSAGES = 64
SEEN_BYTES = 1024 * 1024
"""What is read at most before the daemon is told: far below what it holds for a client, far above a doorbell each."""

Reply = TypeVar("Reply", bound=DaemonMessage)
News = asyncio.Queue[ChainEvent | ChainResult | PingpongError]


class ConnectionClosed(DaemonUnavailable):
    """This side has closed the connection, so nobody waits for the daemon to come back."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"the connection to {peer} was closed.")


class _Pending(msgspec.Struct):
    """A request that waits for its reply."""

    reply: asyncio.Future[DaemonMessage]
    follow: bool


class Connection:
    """Speaks with one daemon over one transport until that is lost; it is not opened twice.

    Args:
        timeout_s: how long the daemon may take to answer a request, or a ping.
        ping_s: how long a followed chain may be silent before the daemon is pinged.
    """

    def __init__(self, transport: Transport, *, timeout_s: float, ping_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._ping_s = ping_s
        self._next_request = 1
        self._pending: dict[int, _Pending] = {}
        self._followed: dict[str, News] = {}
        self._patient = 0
        self._messages = 0
        self._unconfirmed = 0
        self._unconfirmed_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.error: PingpongError | None = None
        """Why the connection is of no use any more."""
        self.heard_s: float | None = None
        """When the daemon was last heard, by time.monotonic; None before its first message."""

    async def open(self) -> None:
        """Connect.

        Raises:
            DaemonUnavailable: no daemon, or one that does not answer in time.
            MessageError: something else is listening there.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._transport.open()
        except TimeoutError:
            await self._transport.close()
            raise daemon_silent(self._transport.peer, self._timeout_s) from None
        except BaseException:
            await self._transport.close()
            raise
        self._tasks = [
            asyncio.create_task(self._read(), name="pingpong-client reader"),
            asyncio.create_task(self._ping(), name="pingpong-client ping"),
        ]

    async def close(self) -> None:
        """Drop the connection and end what waits for it; what the daemon has accepted goes on."""
        self.fail(ConnectionClosed(self._transport.peer))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            self._tasks = []
        await self._transport.close()

    async def request(
        self,
        build: Callable[[int], ClientRequest],
        expect: type[Reply],
        *,
        follow: bool = False,
        patient: bool = False,
    ) -> Reply:
        """Send a request and wait for its reply.

        Args:
            build: makes the request from its number.
            expect: the reply's type.
            follow: keep the events of the chain that the reply names, for `events`.
            patient: wait as long as the daemon answers pings, however long that is.

        Raises:
            PingpongError: what the daemon refused with.
            DataError: the request is larger than the daemon takes; it is not sent.
            DaemonUnavailable: it did not answer in time, or has gone.
            MessageError: its answer makes no sense.
        """
        if self.error is not None:
            raise self.error
        number = self._next_request
        self._next_request += 1
        frame = encode(build(number))
        if len(frame) > MAX_CONTROL_BYTES:
            raise DataError(
                f"the request is {len(frame)} bytes long, the daemon takes {MAX_CONTROL_BYTES}.",
                hint="Put less text into the chain and its inputs.",
            )
        pending = _Pending(asyncio.get_running_loop().create_future(), follow)
        self._pending[number] = pending
        try:
            await self._transport.send(frame)
            if patient:
                with self._waiting():
                    reply = await pending.reply
            else:
                async with asyncio.timeout(self._timeout_s):
                    reply = await pending.reply
        except TimeoutError:
            raise daemon_silent(self._transport.peer, self._timeout_s) from None
        finally:
            del self._pending[number]
        if isinstance(reply, ErrorReply):
            raise _error_of(reply)
        if not isinstance(reply, expect):
            raise MessageError(
                f"the daemon answered with {type(reply).__name__} where {expect.__name__} was due.",
                hint="Client and daemon may be of different versions.",
            )
        return reply

    async def ping(self) -> None:
        """Hear whether the daemon answers.

        Raises:
            DaemonUnavailable: it does not, or has gone.
        """
        await self.request(lambda number: GetStatus(request=number, version=PROTOCOL_VERSION), StatusReply)

    async def attach(self, chain: str) -> ChainResult:
        """Where a chain stands; unless it has ended, its news are kept from this snapshot on.

        Raises:
            ChainNotFound: there is none of that id.
        """
        reply = await self.request(
            lambda number: Attach(request=number, version=PROTOCOL_VERSION, chain=chain), Snapshot, follow=True
        )
        return reply.result

    def follows(self, chain: str) -> bool:
        """Whether news of this chain are being kept."""
        return chain in self._followed

    async def news(self, chain: str) -> AsyncGenerator[ChainEvent | ChainResult, None]:
        """Events and snapshots of a chain that is followed, in the order in which they came, without an end.

        Raises:
            DaemonUnavailable: the daemon has gone.
            ChainNotFound: the chain was forgotten.
        """
        queue = self._followed[chain]
        try:
            with self._waiting():
                while True:
                    item = await queue.get()
                    if isinstance(item, PingpongError):
                        raise item
                    yield item
        finally:
            self._followed.pop(chain, None)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._transport.receive()
                self.heard_s = time.monotonic()
                self._dispatch(decode_daemon_message(frame))
                await self._confirm(len(frame))
        except PingpongError as error:
            self.fail(error)

    async def _confirm(self, frame_bytes: int) -> None:
        """Tell the daemon now and then how much was read: it holds back what passes its limit until then."""
        self._messages += 1
        self._unconfirmed += 1
        self._unconfirmed_bytes += frame_bytes
        if self._unconfirmed >= SEEN_MESSAGES or self._unconfirmed_bytes >= SEEN_BYTES:
            self._unconfirmed = self._unconfirmed_bytes = 0
            await self._transport.send(encode(Seen(messages=self._messages)))

    def _dispatch(self, message: DaemonMessage) -> None:
        if isinstance(message, ChainEvent):
            if message.chain in self._followed:
                self._followed[message.chain].put_nowait(message)
            return
        if isinstance(message, ErrorReply) and message.request == UNREADABLE_REQUEST:
            raise _error_of(message)
        pending = self._pending.get(message.request)
        if pending is None or pending.reply.done():
            return  # it gave up waiting
        # Here and not in `request`: events of the chain may already stand behind this reply.
        if pending.follow and isinstance(message, Accepted):
            self._followed.setdefault(message.chain, News())
        elif pending.follow and isinstance(message, Snapshot):
            self._follow_from(message.result)
        pending.reply.set_result(message)

    def _follow_from(self, result: ChainResult) -> None:
        if result.state not in ENDED_STATES:
            self._followed.setdefault(result.id, News())
        if (queue := self._followed.get(result.id)) is not None:
            queue.put_nowait(result)

    async def _ping(self) -> None:
        """While somebody waits without a limit, notice a daemon that has stopped answering.

        Followed chains are attached to anew: the daemon drops a follower that did not read for long, such as a
        stopped process, and then sends it nothing more. The snapshot has what was lost.
        """
        while self.error is None:
            heard_s = self.heard_s
            await asyncio.sleep(self._ping_s)
            if self.heard_s != heard_s or not self._patient:
                continue
            try:
                for chain in list(self._followed):
                    await self._attach_again(chain)
                if not self._followed:
                    await self.ping()
            except PingpongError as error:
                self.fail(error)

    async def _attach_again(self, chain: str) -> None:
        try:
            await self.attach(chain)
        except ChainNotFound as error:
            if chain in self._followed:
                self._followed[chain].put_nowait(error)

    def fail(self, error: PingpongError) -> None:
        """End everything that waits, with this error; the first one counts."""
        if self.error is not None:
            return
        self.error = error
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)
        for queue in self._followed.values():
            queue.put_nowait(error)


def _error_of(reply: ErrorReply) -> PingpongError:
    return error_from_code(reply.code, reply.message, hint=reply.hint, field=reply.field)
