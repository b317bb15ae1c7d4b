"""The blocking client: `AsyncClient` on an event loop in a thread of its own, so that it also works in notebooks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pingpong_bus.chain import Chain
from pingpong_bus.errors import DaemonUnavailable
from pingpong_bus.messages import ChainEvent, ChainResult, Explained, StatusReply, SubmitOptions
from pingpong_client.client import PING_S, RECONNECT_S, TIMEOUT_S, AsyncClient, LogProbabilities, Summaries
from pingpong_client.transport import Transport, ZmqTransport

T = TypeVar("T")


class Client:
    """`AsyncClient` for programs without an event loop: the same methods, arguments and errors; a context manager.

    ::

        with Client() as client:
            result = client.run(chain, {"topic": "tides"})

    One thread at a time; `on_away` is called in the event loop's thread.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        instance: str | None = None,
        timeout_s: float = TIMEOUT_S,
        ping_s: float = PING_S,
        reconnect_s: float = RECONNECT_S,
        on_away: Callable[[bool], None] | None = None,
        transport: Callable[[Path], Transport] = ZmqTransport,
    ) -> None:
        self._client = AsyncClient(
            socket,
            instance=instance,
            timeout_s=timeout_s,
            ping_s=ping_s,
            reconnect_s=reconnect_s,
            on_away=on_away,
            transport=transport,
        )
        self.socket = self._client.socket
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        try:
            self._do(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def away_s(self) -> float | None:
        """See `AsyncClient.away_s`."""
        return self._client.away_s

    def close(self) -> None:
        """Drop the connection; chains go on."""
        if self._loop is not None and self._thread is not None:
            self._do(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None

    def submit(
        self,
        chain: Chain,
        inputs: Mapping[str, str] | None = None,
        options: SubmitOptions | None = None,
        *,
        follow: bool = False,
        key: str | None = None,
    ) -> str:
        """See `AsyncClient.submit`."""
        return self._do(self._client.submit(chain, inputs, options, follow=follow, key=key))

    def explain(
        self, chain: Chain, inputs: Mapping[str, str] | None = None, options: SubmitOptions | None = None
    ) -> Explained:
        """See `AsyncClient.explain`."""
        return self._do(self._client.explain(chain, inputs, options))

    def run(
        self,
        chain: Chain,
        inputs: Mapping[str, str] | None = None,
        options: SubmitOptions | None = None,
        *,
        key: str | None = None,
    ) -> ChainResult:
        """See `AsyncClient.run`."""
        return self._do(self._client.run(chain, inputs, options, key=key))

    def wait(self, chain: str) -> ChainResult:
        """See `AsyncClient.wait`."""
        return self._do(self._client.wait(chain))

    def follow(self, chain: str) -> Iterator[ChainEvent]:
        """See `AsyncClient.follow`."""
        events = self._client.follow(chain)
        loop = self._running_loop()

        async def following() -> ChainEvent | None:
            return await anext(events, None)

        try:
            while (event := self._do(following())) is not None:
                yield event
                if self._loop is not loop:
                    raise DaemonUnavailable(f"the connection to {self.socket} was closed.")
        finally:
            if self._loop is loop:  # otherwise `close` has ended the events with their loop
                self._do(events.aclose())

    def attach(self, chain: str) -> ChainResult:
        """See `AsyncClient.attach`."""
        return self._do(self._client.attach(chain))

    def list(self, limit: int = 100) -> Summaries:
        """See `AsyncClient.list`."""
        return self._do(self._client.list(limit))

    def status(self) -> StatusReply:
        """See `AsyncClient.status`."""
        return self._do(self._client.status())

    def result(self, chain: str, *, prompt_ids: bool = False) -> ChainResult:
        """See `AsyncClient.result`."""
        return self._do(self._client.result(chain, prompt_ids=prompt_ids))

    def cancel(self, chain: str) -> None:
        """See `AsyncClient.cancel`."""
        self._do(self._client.cancel(chain))

    def reset_caches(self) -> None:
        """See `AsyncClient.reset_caches`."""
        self._do(self._client.reset_caches())

    def forget(self, chain: str) -> None:
        """See `AsyncClient.forget`."""
        self._do(self._client.forget(chain))

    def drain(self, group: str | None = None, *, deadline_s: float | None = None) -> None:
        """See `AsyncClient.drain`."""
        self._do(self._client.drain(group, deadline_s=deadline_s))

    def score(
        self, ids: Sequence[int], tokens: Sequence[int], *, grid: int | None = None, model: str = ""
    ) -> LogProbabilities:
        """See `AsyncClient.score`."""
        return self._do(self._client.score(ids, tokens, grid=grid, model=model))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting
            raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="pingpong-client", daemon=True)
            self._thread.start()
        return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
