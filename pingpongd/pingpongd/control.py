"""The control socket: what clients ask, and the events that they follow.

Nobody is trusted: whoever may not use the daemon is turned away, what makes no sense is counted and answered, and what
one client asks for or leaves unread is bounded (`client_ledger.py`). ZeroMQ takes one frame of each client in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

import structlog
import zmq
import zmq.asyncio

from pingpong_bus import codec
from pingpong_bus.errors import ConfigError, DataError, MessageError, Overloaded, PingpongError, UsageError
from pingpong_bus.messages import (
    Accepted,
    Attach,
    Cancel,
    ChainEvent,
    ChainList,
    ChainResult,
    ClientRequest,
    DaemonMessage,
    Done,
    Drain,
    ErrorReply,
    Explain,
    Forget,
    GetResult,
    GetStatus,
    ListChains,
    ResetCaches,
    ResultReply,
    Score,
    Scored,
    Seen,
    Snapshot,
    StatusReply,
    Submit,
)
from pingpongd.chain_service import ChainService
from pingpongd.client_ledger import Client, ClientLedger, ClientLimits
from pingpongd.connections import Connections
from pingpongd.followers import Followers
from pingpongd.peers import Doorkeeper, Peer, descriptor_of, peer_of
from pingpongd.refusals import Refusals
from pingpongd.runtime_dir import RuntimeDir
from pingpongd.sending import bind, make_router, send_now

_log = structlog.get_logger()
_SEE_LOG = "Its log has the event request_failed."
_COME_BACK = "Read what the daemon has sent and wait for its answers, then ask again."
_RECEIVED_FRAMES = 4
"""Of one client, waiting to be taken: what floods us waits in its own process."""
_SUBMISSIONS = 32
"""Of one client, checked and tokenized at a time; its others wait, and nobody else's do."""
_SMALL_BYTES = 1024
"""A request up to this is decoded even from a client over its limits: it may be a `Seen`."""
_LONGEST_TEXT = 4000
"""Characters of an error on the wire: it may quote what a client sent."""

StatusOf = Callable[[int], StatusReply]
DrainCall = Callable[[str | None, float | None], Awaitable[None]]


class Control:
    """Serves clients on a ROUTER socket.

    Args:
        runtime: where the socket is made, and opened to the client group.
        context: of the process.
        limits: of one client, and of all.
        doorkeeper: says who may come in, instead of the one that fits `runtime`.

    Raises:
        ConfigError: the socket cannot be bound, or not be given to the client group.
    """

    def __init__(
        self,
        runtime: RuntimeDir,
        context: zmq.asyncio.Context,
        limits: ClientLimits | None = None,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        self._doorkeeper = doorkeeper or Doorkeeper(runtime.client_group)
        self._ledger = ClientLedger(limits)
        self._refusals = Refusals("control.sock")
        self._socket = make_router(
            context,
            linger_ms=1000,
            queued_frames=self._ledger.limits.unread_messages + 2 * self._ledger.limits.refusals,
            received_frames=_RECEIVED_FRAMES,
        )
        self._followers = Followers()
        self._turns: WeakKeyDictionary[Client, asyncio.Semaphore] = WeakKeyDictionary()
        self._scores: WeakKeyDictionary[Client, asyncio.Lock] = WeakKeyDictionary()
        """One client's are asked of an engine one at a time."""
        self._strangers: set[int] = set()
        """Descriptors of those who were told that they may not come in."""
        self._tasks: set[asyncio.Task[None]] = set()
        path = runtime.control.removeprefix("ipc://")
        self._connections = Connections(self._socket, path, self._refusals, self._gone)
        try:
            bind(self._socket, runtime.control, own_user_only=False)
            runtime.open_to_clients()
        except ConfigError:
            self.close()
            raise

    @property
    def refused_frames(self) -> int:
        """Frames and connections that made no sense or came from strangers, since the start."""
        return self._refusals.count

    @property
    def clients(self) -> int:
        """Clients that have an account."""
        return len(self._ledger)

    def publish(self, event: ChainEvent) -> None:
        """Send an event to the clients that follow its chain."""
        if followers := self._followers.of(event.chain):
            frame = codec.encode(event)
            for client in followers:
                if not self._send(client, frame):
                    self._followers.remove(client, event.chain)
                    _log.info("follower_dropped", chain=event.chain)
        if event.kind == "ended":
            self._followers.drop_chain(event.chain)

    async def serve(self, chains: ChainService, status: StatusOf, drain: DrainCall) -> None:
        """Answer requests until cancelled.

        Args:
            chains: what is asked about.
            status: makes the answer to a GetStatus of that request number.
            drain: carries out a Drain of that group and deadline.
        """
        self._connections.watch()
        try:
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                self._connections.update()
                self._take(frames, chains, status, drain)
                self._close_if_gone(frames[0].bytes)
                await asyncio.sleep(0)  # a receive that need not wait gives nobody else a turn
        finally:
            for task in list(self._tasks):
                task.cancel()

    def close(self) -> None:
        """Close the socket; what was sent still has a second to leave."""
        self._connections.close()
        self._socket.close()

    # --------------------------------------------------------------------------------------------------- at the door

    def _take(self, frames: list[zmq.Frame], chains: ChainService, status: StatusOf, drain: DrainCall) -> None:
        """Look at one message, and start to answer it if there is no reason not to."""
        client, message = frames[0].bytes, frames[-1]
        connection, peer = descriptor_of(message), peer_of(message)
        if connection is None or peer is None or not self._doorkeeper.allowed(peer.uid, peer.gid):
            self._turn_away(client, connection, peer)
            return
        why = self._ledger.admit(client, connection, peer.uid)
        if why:
            self._refuse(client, codec.request_number(message.buffer), Overloaded(why, hint=_COME_BACK), peer)
            return
        size = sum(len(frame) for frame in frames[1:])
        if (why := self._ledger.refusal(client, size)) and size > _SMALL_BYTES:
            self._refuse(client, codec.request_number(message.buffer), Overloaded(why, hint=_COME_BACK), peer)
            return
        try:
            if len(frames) != 2:
                raise MessageError(f"{len(frames) - 1} frames where one was expected.")
            request = codec.decode_client_request(message.buffer)
        except MessageError as error:
            self._refuse(client, codec.request_number(message.buffer), error, peer)
            return
        if isinstance(request, Seen):
            self._ledger.seen(client, request.messages)
        elif why:
            self._refuse(client, request.request, Overloaded(why, hint=_COME_BACK), peer)
        else:
            account = self._ledger.begin(client, size)
            task = asyncio.create_task(self._answer(client, account, size, request, chains, status, drain))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _turn_away(self, client: bytes, connection: int | None, peer: Peer | None) -> None:
        """Tell a stranger once; one who goes on is cut off. Bytes that are hardly ZeroMQ's are only dropped."""
        self._refusals.add("it is from a stranger", peer=peer)
        if connection is None:
            return
        if connection in self._strangers:
            self._connections.shut(connection)
            return
        self._strangers.add(connection)
        error = UsageError("you may not use this daemon.", hint="Ask its owner to let you into its client_group.")
        send_now(self._socket, client, codec.encode(_error_reply(0, error)))

    def _refuse(self, client: bytes, request: int, error: PingpongError, peer: Peer | None) -> None:
        """Count a message that is not served, and say so."""
        self._refusals.add(str(error), peer=peer)
        frame = codec.encode(_error_reply(request, error))
        if client in self._ledger:
            self._send(client, frame, refusal=True)
        else:
            send_now(self._socket, client, frame)

    def _close_if_gone(self, client: bytes) -> None:
        """What a client has sent before it left is served; after that, no account of it is left."""
        account = self._ledger.account(client)
        if account is not None and account.requests == 0 and account.connection not in self._connections:
            self._gone(account.connection)

    def _gone(self, connection: int) -> None:
        """A connection is lost: nothing is kept for it. What its client has submitted goes on."""
        self._strangers.discard(connection)
        for client in self._ledger.gone(connection):
            self._followers.drop_client(client)

    # -------------------------------------------------------------------------------------------------------- answers

    async def _answer(
        self,
        client: bytes,
        account: Client,
        size: int,
        request: ClientRequest,
        chains: ChainService,
        status: StatusOf,
        drain: DrainCall,
    ) -> None:
        number = 0 if isinstance(request, Seen) else request.request
        try:
            await self._handle(client, account, request, chains, status, drain)
        except PingpongError as error:
            _log.warning("request_refused", request=type(request).__name__, code=error.code, error=str(error))
            self._send(client, codec.encode(_error_reply(number, error)), refusal=True)
        except Exception:  # noqa: BLE001 - logged with its trace
            # A fault of ours: the client is told, and the daemon's log has the trace.
            _log.exception("request_failed", request=type(request).__name__)
            fault = PingpongError("a fault in the daemon.", hint=_SEE_LOG)
            self._send(client, codec.encode(_error_reply(number, fault)), refusal=True)
        finally:
            self._ledger.end(account, size)
            self._close_if_gone(client)

    async def _handle(
        self,
        client: bytes,
        account: Client,
        request: ClientRequest,
        chains: ChainService,
        status: StatusOf,
        drain: DrainCall,
    ) -> None:
        match request:
            case Submit():
                await self._submit(client, account, request, chains)
            case Explain():
                await self._explain(client, account, request, chains)
            case Attach(chain=chain):
                self._snapshot(client, request.request, await chains.snapshot(chain), chains)
            case ListChains(limit=limit):
                self._reply(client, ChainList(request=request.request, chains=await chains.summaries(limit)))
            case GetStatus():
                self._reply(client, status(request.request))
            case GetResult(chain=chain, prompt_ids=prompt_ids):
                result = await chains.result(chain, prompt_ids=prompt_ids)
                self._reply(client, ResultReply(request=request.request, result=result))
            case Cancel(chain=chain):
                chains.cancel(chain)
                self._reply(client, Done(request=request.request))
            case Forget(chain=chain):
                await chains.forget(chain)
                self._reply(client, Done(request=request.request))
            case ResetCaches():
                await chains.reset_caches()
                self._reply(client, Done(request=request.request))
            case Drain(group=group, deadline_s=deadline_s):
                await drain(group, deadline_s)
                self._reply(client, Done(request=request.request))
            case Score():
                await self._score(client, account, request, chains)
            case Seen():
                pass

    async def _submit(self, client: bytes, account: Client, request: Submit, chains: ChainService) -> None:
        async with self._turns.setdefault(account, asyncio.Semaphore(_SUBMISSIONS)):
            chain = await chains.submit(request)
        try:
            # Nothing waits between the answer and the registration: no event comes before it, or gets lost.
            self._reply(client, Accepted(request=request.request, chain=chain))
            if request.follow and chains.is_live(chain):
                self._follow(client, chain)
            elif request.follow:  # its key names one that has ended
                result = await chains.snapshot(chain)
                data = {"state": result.state, "error": result.error}
                ended = ChainEvent(chain=chain, kind="ended", at_ms=result.e2e_ms or 0.0, data=data)
                self._send(client, codec.encode(ended))
        finally:
            chains.start_waiting()

    async def _explain(self, client: bytes, account: Client, request: Explain, chains: ChainService) -> None:
        async with self._turns.setdefault(account, asyncio.Semaphore(_SUBMISSIONS)):
            if self._ledger.account(client) is account:  # else it has gone meanwhile
                self._reply(client, await chains.explain(request))

    async def _score(self, client: bytes, account: Client, request: Score, chains: ChainService) -> None:
        async with self._scores.setdefault(account, asyncio.Lock()):
            if self._ledger.account(client) is not account:
                return  # it has gone meanwhile, and takes the rest of what it asked for along
            found = await chains.score(request.ids, request.tokens, request.grid, request.model)
        self._reply(client, Scored(request=request.request, logprobs=found))

    def _snapshot(self, client: bytes, request: int, result: ChainResult, chains: ChainService) -> None:
        """Answer an Attach: not a turn of the event loop may lie between the snapshot and the registration."""
        if self._reply(client, Snapshot(request=request, result=result)) and chains.is_live(result.id):
            self._follow(client, result.id)

    def _follow(self, client: bytes, chain: str) -> None:
        if client in self._ledger:  # else it has gone in the meantime
            self._followers.add(client, chain)

    def _reply(self, client: bytes, message: DaemonMessage) -> bool:
        """Answer a request; where the answer cannot be sent, say why instead. Whether it was sent."""
        frame = codec.encode(message)
        if len(frame) > codec.MAX_CONTROL_BYTES:
            raise DataError(
                f"the answer is {len(frame)} bytes long, a message holds {codec.MAX_CONTROL_BYTES}.",
                hint="Ask without prompt ids.",
            )
        if client in self._ledger and not self._ledger.may_send(client, len(frame)):
            raise Overloaded("this client has not read what it was sent.", hint=_COME_BACK)
        return self._send(client, frame)

    def _send(self, client: bytes, frame: bytes, *, refusal: bool = False) -> bool:
        """Queue a frame now; False where the client is gone or does not read."""
        if not self._ledger.may_send(client, len(frame), refusal=refusal):
            return False
        if not send_now(self._socket, client, frame):
            return False
        self._ledger.sent(client, len(frame))
        return True


def _error_reply(request: int, error: PingpongError) -> ErrorReply:
    return ErrorReply(
        request=request,
        code=error.code,
        message=error.message[:_LONGEST_TEXT],
        hint=error.hint[:_LONGEST_TEXT],
        field=error.field[:_LONGEST_TEXT],
    )
