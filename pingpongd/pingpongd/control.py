"""The control socket: what clients ask, and the events that they follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
import zmq.asyncio

from pingpong_bus import codec
from pingpong_bus.errors import MessageError, PingpongError
from pingpong_bus.messages import (
    Accepted,
    Attach,
    Cancel,
    ChainEvent,
    ChainList,
    ClientRequest,
    DaemonMessage,
    Done,
    ErrorReply,
    GetResult,
    GetStatus,
    ListChains,
    ResetCaches,
    ResultReply,
    Snapshot,
    StatusReply,
    Submit,
)
from pingpongd.chain_state import ENDED
from pingpongd.chains import Chains
from pingpongd.sending import bind_router, send_now

_log = structlog.get_logger()
_SEE_LOG = "Its log has the event request_failed."
_QUEUED_FRAMES = 10_000  # per client; one that does not read loses its events, and hurts nobody else


class Control:
    """Serves clients on a ROUTER socket."""

    def __init__(self, endpoint: str, context: zmq.asyncio.Context) -> None:
        self._socket = bind_router(context, endpoint, linger_ms=1000, queued_frames=_QUEUED_FRAMES)
        self._followers: dict[str, set[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def publish(self, event: ChainEvent) -> None:
        """Send an event to the clients that follow its chain."""
        for client in list(self._followers.get(event.chain, ())):
            if not self._send(client, event):
                self._followers[event.chain].discard(client)
                _log.info("follower_dropped", chain=event.chain)
        if event.kind == "ended":
            self._followers.pop(event.chain, None)

    async def serve(self, chains: Chains, status: Callable[[int], StatusReply]) -> None:
        """Answer requests until cancelled.

        Args:
            chains: what is asked about.
            status: makes the answer to a GetStatus of that request number.
        """
        try:
            while True:
                frames = await self._socket.recv_multipart()
                client = frames[0]
                try:
                    if len(frames) != 2:
                        raise MessageError(f"{len(frames) - 1} frames where one was expected.")
                    request = codec.decode_client_request(frames[1])
                except MessageError as error:
                    _log.warning("client_message_refused", error=str(error))
                    self._send(client, _error_reply(0, error))
                    continue
                task = asyncio.create_task(self._answer(client, request, chains, status))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in list(self._tasks):
                task.cancel()

    def close(self) -> None:
        """Close the socket; what was sent still has a second to leave."""
        self._socket.close()

    async def _answer(
        self, client: bytes, request: ClientRequest, chains: Chains, status: Callable[[int], StatusReply]
    ) -> None:
        try:
            reply = await self._handle(client, request, chains, status)
        except PingpongError as error:
            _log.info("request_refused", request=type(request).__name__, code=error.code, error=str(error))
            reply = _error_reply(request.request, error)
        except Exception:  # noqa: BLE001 - logged with its trace
            # A fault of ours: the client is told, and the daemon's log has the trace.
            _log.exception("request_failed", request=type(request).__name__)
            self._send(client, _error_reply(request.request, PingpongError("a fault in the daemon.", hint=_SEE_LOG)))
            return
        if reply is not None:
            self._send(client, reply)

    async def _handle(
        self, client: bytes, request: ClientRequest, chains: Chains, status: Callable[[int], StatusReply]
    ) -> DaemonMessage | None:
        match request:
            case Submit():
                record = await chains.submit(request)
                if request.follow:
                    self._followers[record.id] = {client}
                self._send(client, Accepted(request=request.request, chain=record.id))
                chains.start_waiting()  # after the answer, so that no event comes before it
                return None
            case Attach(chain=chain):
                record = chains.find(chain)
                if record.state.stage not in ENDED:
                    self._followers.setdefault(chain, set()).add(client)
                return Snapshot(request=request.request, result=record.result())
            case ListChains():
                return ChainList(request=request.request, chains=chains.summaries())
            case GetStatus():
                return status(request.request)
            case GetResult(chain=chain, prompt_ids=prompt_ids):
                return ResultReply(request=request.request, result=chains.find(chain).result(prompt_ids=prompt_ids))
            case Cancel(chain=chain):
                chains.cancel(chain)
                return Done(request=request.request)
            case ResetCaches():
                await chains.reset_caches()
                return Done(request=request.request)

    def _send(self, client: bytes, message: DaemonMessage) -> bool:
        """Send without waiting; False where the client is gone or does not read."""
        return send_now(self._socket, client, codec.encode(message))


def _error_reply(request: int, error: PingpongError) -> ErrorReply:
    return ErrorReply(request=request, code=error.code, message=error.message, hint=error.hint, field=error.field)
