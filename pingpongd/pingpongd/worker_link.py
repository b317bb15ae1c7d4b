"""The socket that workers talk to: who is who, requests and their answers, frames that make no sense."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from pingpong_bus import codec
from pingpong_bus.errors import EngineError, EngineLost, MessageError, error_from_code
from pingpong_bus.messages import (
    Calibrate,
    Calibrated,
    NextScored,
    PrefixCacheReset,
    Prepare,
    Prepared,
    RequestFailed,
    ResetPrefixCache,
    ScoreNext,
    SupervisorMessage,
    WorkerMessage,
)
from pingpongd.peers import peer_of
from pingpongd.refusals import Refusals
from pingpongd.sending import bind_router, send_now
from pingpongd.worker_handle import Worker

_REQUEST_SECONDS = 120.0
_QUIET_SECONDS = 0.05
_MOST_WAITS = 20
_FRAMES_IN_A_ROW = 64

Answer = Prepared | PrefixCacheReset | NextScored | Calibrated
Request = Callable[[int], Prepare | ResetPrefixCache | ScoreNext | Calibrate]
"""Makes a request of its number."""


class WorkerLink:
    """The supervisor's end of all conversations with workers."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        """Bind the socket.

        Raises:
            ConfigError: it cannot be bound.
        """
        self._socket = bind_router(context, endpoint, linger_ms=0, queued_frames=0)
        self._workers: dict[bytes, Worker] = {}
        self._heard: Counter[bytes] = Counter()
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[bytes, asyncio.Future[Answer]]] = {}
        self.refusals = Refusals("workers")
        """Frames that made no sense, or came from no worker of ours."""

    def attach(self, worker: Worker) -> None:
        """Take messages of the worker's present start."""
        self._workers[worker.identity] = worker

    def detach(self, worker: Worker) -> None:
        """Take no more of them."""
        self._workers.pop(worker.identity, None)
        self._heard.pop(worker.identity, None)

    async def receive(
        self,
        handle: Callable[[Worker, WorkerMessage], None],
        unreadable: Callable[[Worker, MessageError], None],
    ) -> None:
        """Take messages for ever.

        Args:
            handle: called with each; it may raise MessageError for one that has no place here.
            unreadable: called for a worker's frame that is no message.
        """
        for number in itertools.count(1):
            frames = await self._socket.recv_multipart(copy=False)
            self._take(frames, handle, unreadable)
            if number % _FRAMES_IN_A_ROW == 0:
                await asyncio.sleep(0)  # a receive that finds a message does not yield, and there may be a flood

    def _take(
        self,
        frames: Sequence[zmq.Frame],
        handle: Callable[[Worker, WorkerMessage], None],
        unreadable: Callable[[Worker, MessageError], None],
    ) -> None:
        identity, peer = frames[0].bytes, peer_of(frames[0])
        worker = self._workers.get(identity)
        if worker is None or worker.process is None:
            self.refusals.add("it is from no worker of ours", peer=peer)
            return
        if len(frames) != 2 or peer is None or peer.pid != worker.process.pid:
            self.refusals.add(f'{len(frames) - 1} frames under the name of worker "{worker.name}"', peer=peer)
            return
        self._heard[identity] += 1
        try:
            message = codec.decode_worker_message(frames[1].buffer)
        except MessageError as error:
            self.refusals.add(error.message, peer=peer)
            unreadable(worker, error)
            return
        try:
            handle(worker, message)
        except MessageError as error:
            self.refusals.add(error.message, peer=peer)

    def send(self, worker: Worker, message: SupervisorMessage) -> bool:
        """Send without waiting; returns whether there is anybody to send to."""
        return send_now(self._socket, worker.identity, codec.encode(message))

    async def ask(self, worker: Worker, request: Request) -> Answer:
        """Send a request and wait for its answer.

        Raises:
            EngineLost: the worker is gone.
            EngineError: it does not answer.
            PingpongError: what it has found wrong with the request.
        """
        number = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = (worker.identity, future)
        try:
            if not self.send(worker, request(number)):
                raise lost(worker, "nobody is at its end of the socket")
            async with asyncio.timeout(_REQUEST_SECONDS):
                return await future
        except TimeoutError:
            raise EngineError(
                f'worker "{worker.name}" did not answer within {_REQUEST_SECONDS:g} s.', hint="Look at its log lines."
            ) from None
        finally:
            del self._asked[number]

    def answer(self, worker: Worker, message: Answer | RequestFailed) -> None:
        """A request is answered; nobody may wait for it any more."""
        identity, future = self._asked.get(message.request, (b"", None))
        if future is None or identity != worker.identity or future.done():
            return
        if isinstance(message, RequestFailed):
            future.set_exception(error_from_code(message.code, message.message, hint=message.hint, field=message.field))
        else:
            future.set_result(message)

    def fail(self, worker: Worker, why: str) -> None:
        """No request to this start of the worker will be answered."""
        for identity, future in list(self._asked.values()):
            if identity == worker.identity and not future.done():
                future.set_exception(lost(worker, why))

    async def quiet(self, worker: Worker) -> None:
        """Wait until what a dead worker has sent was heard: its last message, the reason, may still be on its way."""
        for _ in range(_MOST_WAITS):
            heard = self._heard[worker.identity]
            await asyncio.sleep(_QUIET_SECONDS)
            if self._heard[worker.identity] == heard:
                return

    def close(self) -> None:
        """Close the socket; nothing more is sent or heard."""
        self._socket.close()


def lost(worker: Worker, why: str) -> EngineLost:
    """The error of whatever needed this worker."""
    return EngineLost(f'worker "{worker.name}" is gone: {why}.', hint="See `pingpong-client status`.")
