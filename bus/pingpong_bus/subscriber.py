"""Follows logs that other processes write.

A doorbell is only a hint to look; the log is the truth. Whatever happens to frames, a follower sees every token once
and in order, at the latest `SWEEP_SECONDS` after its commit: one timer for all followers compares the commit
words with what they saw last. What such a look finds first counts as repaired, unless its doorbell rings before the
next look: then it was only on its way.

The socket is a plain one, drained from the event loop's reader callback: per frame that is cheaper than
`zmq.asyncio`, which makes a future and polls for each receive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import zmq

from pingpong_bus.codec import MAX_BELL_BYTES, bell_topic, decode_bell
from pingpong_bus.errors import BusError, MessageError
from pingpong_bus.messages import BusState, StreamRef
from pingpong_bus.slab import Slab, pack_word
from pingpong_bus.token_log import LogView, TokenLogReader

SWEEP_SECONDS = 0.01
"""How long a token can go unnoticed when its doorbell is lost. Each sweep wakes the process, beside an engine that may
want the core: at 5 ms that was 0.6 % of it."""
_DRAIN_FRAMES = 256
"""Frames taken in one callback, so that a storm of doorbells does not starve the loop."""


class _Watch:
    """One follower: the commit word it saw last, and the future it sleeps on."""

    __slots__ = ("asleep", "at", "seen")

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self.asleep: asyncio.Future[None] | None = None


class Subscriber:
    """Doorbells of any number of publishers, and the followers that they wake; belongs to one event loop.

    Args:
        context: its ZeroMQ context; an asyncio one will do.
        slab: where the logs are; closed after the subscriber.

    Attributes:
        garbage_frames: frames that were no doorbells, or rang for no slot of this slab.
    """

    def __init__(self, context: zmq.Context[Any], slab: Slab) -> None:
        self.garbage_frames = 0
        self._slab = slab
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BELL_BYTES)
        self._endpoints: set[str] = set()
        self._watches: dict[tuple[int, int], set[_Watch]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._chunks = self._repairs = self._lag_ns = 0
        self._unheard: set[tuple[int, int]] = set()
        """Logs in which the latest look has found tokens without a doorbell."""

    def state(self) -> BusState:
        """What was heard so far."""
        return BusState(chunks=self._chunks, repairs=self._repairs, lag_ms=self._lag_ns / 1e6)

    def connect(self, endpoint: str) -> None:
        """Hear the publisher at `endpoint`, now or whenever it appears; a second call does nothing.

        Raises:
            BusError: it is no endpoint.
        """
        if endpoint in self._endpoints:
            return
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise BusError(f"The doorbell {endpoint!r} cannot be reached: {error}.") from error
        self._endpoints.add(endpoint)
        self._drain_soon()

    async def follow(self, stream: StreamRef, start: int = 0) -> AsyncGenerator[LogView, None]:
        """Every new batch of a log's tokens, from index `start` on.

        The last view is the one whose state is CLOSED or ABORTED; it may be without tokens.

        Raises:
            StreamGone: the slot was freed or given to another log.
            BusError: the subscriber was closed.
        """
        reader = TokenLogReader(self._slab, stream)
        watch = self._watch(stream)
        try:
            while True:
                view = reader.read(start)
                watch.seen = pack_word(stream.generation, view.state, view.count)
                if view.ids or view.state.over:
                    start += len(view.ids)
                    yield view
                if view.state.over:
                    return
                await self._sleep(watch)
        finally:
            self._unwatch(stream, watch)

    def ring(self, slot: int, generation: int) -> bool:
        """Wake those who follow this log and have not seen its last commit; whether there were any."""
        woken = False
        for watch in self._watches.get((slot, generation), ()):
            woken |= self._wake_if_moved(watch)
        return woken

    async def close(self) -> None:
        """Close the socket; whoever still follows a log gets a `BusError`."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for watches in self._watches.values():
            for watch in watches:
                if watch.asleep is not None and not watch.asleep.done():
                    watch.asleep.set_exception(_closed_error())
        self._socket.close()

    def _watch(self, stream: StreamRef) -> _Watch:
        if self._closed:
            raise _closed_error()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.FD, self._drain)
        watch = _Watch(self._slab.word_index(stream.slot))
        watches = self._watches.setdefault((stream.slot, stream.generation), set())
        if not watches:
            self._socket.subscribe(bell_topic(stream.slot, stream.generation))
            self._drain_soon()
        watches.add(watch)
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(SWEEP_SECONDS, self._sweep)
        return watch

    def _unwatch(self, stream: StreamRef, watch: _Watch) -> None:
        key = (stream.slot, stream.generation)
        watches = self._watches[key]
        watches.remove(watch)
        if not watches:
            del self._watches[key]
            if not self._closed:
                self._socket.unsubscribe(bell_topic(*key))
                self._drain_soon()

    async def _sleep(self, watch: _Watch) -> None:
        if self._closed:
            raise _closed_error()
        if self._slab.words[watch.at] != watch.seen:
            await asyncio.sleep(0)  # a writer that is always ahead shall not keep this loop to itself
            return
        assert self._loop is not None  # noqa: S101  set by _watch
        watch.asleep = self._loop.create_future()
        try:
            await watch.asleep
        finally:
            watch.asleep = None

    def _wake_if_moved(self, watch: _Watch) -> bool:
        asleep = watch.asleep
        if asleep is None or asleep.done() or self._slab.words[watch.at] == watch.seen:
            return False
        asleep.set_result(None)
        return True

    def _sweep(self) -> None:
        self._sweep_timer = None
        self._repairs += len(self._unheard)
        self._unheard.clear()
        if not self._watches or self._loop is None:
            return
        for key, watches in self._watches.items():
            for watch in watches:
                if self._wake_if_moved(watch):
                    self._unheard.add(key)
        self._sweep_timer = self._loop.call_later(SWEEP_SECONDS, self._sweep)

    def _drain(self) -> None:
        """Take what the socket has; until it says that it has nothing, its descriptor reports no new frame."""
        if self._closed:
            return
        for _ in range(_DRAIN_FRAMES):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                chunk = decode_bell(frame)
            except MessageError:
                self.garbage_frames += 1
                continue
            if chunk.slot >= self._slab.slots:
                self.garbage_frames += 1
                continue
            self._chunks += 1
            self._lag_ns += max(0, time.monotonic_ns() - chunk.at_ns) if chunk.at_ns else 0
            self._unheard.discard((chunk.slot, chunk.generation))
            if self.ring(chunk.slot, chunk.generation):
                break  # whoever woke up goes first: to learn that the socket is empty costs a system call
        self._drain_soon()

    def _drain_soon(self) -> None:
        """The socket's descriptor is edge-triggered, and any call on the socket may swallow its edge."""
        if self._loop is not None:
            self._loop.call_soon(self._drain)


def _closed_error() -> BusError:
    return BusError("The subscriber was closed.")
