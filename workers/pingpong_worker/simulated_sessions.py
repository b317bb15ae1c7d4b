"""Sessions of the simulated engine, of both kinds."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Final

from pingpong_bus.errors import EngineError, EngineLost
from pingpong_bus.messages import DecodePace, KeptPrefix, Sampling, SessionKind
from pingpong_worker.engine import OutputTokens
from pingpong_worker.simulated_messages import Chunk, Computed, Sampled

if TYPE_CHECKING:
    from pingpong_worker.simulated_engine import SimulatedEngine

_APPEND: Final = Sampling(max_tokens=1, ignore_eos=True)

_serials = itertools.count()

Inbox = asyncio.Queue[Computed | Sampled | EngineLost]
"""What becomes of one request."""


class SimulatedSession(ABC):
    """What both kinds of session share: the prompt so far, and the answer's stream."""

    kind: SessionKind

    def __init__(
        self,
        engine: SimulatedEngine,
        session_id: str,
        cache_salt: str | None,
        pace: DecodePace | None = None,
        grid: int | None = None,
        keep: KeptPrefix | None = None,
    ) -> None:
        self._engine = engine
        self._pace = pace or DecodePace()
        self._grid = grid
        self._keep = keep
        # Not the session's id alone: outputs may still be on their way for one of that id which was aborted before.
        self._id = f"{session_id}@{next(_serials)}"
        # What was computed on a grid is found by what is on the same grid alone.
        self._salt = cache_salt if grid is None else f"{cache_salt or ''}/grid{grid}"
        self._prompt: list[int] = []
        self._inbox: Inbox = asyncio.Queue()

    @abstractmethod
    async def append(self, ids: Sequence[int]) -> int | None:
        """See `Session.append`."""

    @abstractmethod
    def roll_back(self, tokens: int) -> None:
        """See `Session.roll_back`."""

    @abstractmethod
    def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        """See `Session.finalize`."""

    async def abort(self) -> None:
        """Forget the session's request."""
        self._engine.forget(self._id)

    async def _receive(self) -> Computed | Sampled:
        reply = await self._inbox.get()
        if isinstance(reply, EngineLost):
            raise reply
        return reply

    async def _answer(self) -> AsyncGenerator[OutputTokens, None]:
        cached: int | None = None
        while True:
            reply = await self._receive()
            if isinstance(reply, Computed):
                continue  # of an append that finalize overtook
            first, cached = cached is None, reply.cached_tokens
            yield OutputTokens(
                [reply.token] if reply.token is not None else [],
                reply.finish_reason,
                reply.stop_token,
                cached if first else None,
            )
            if reply.finish_reason is not None:
                return


class PrefixSession(SimulatedSession):
    """Re-submits the growing prompt; the prefix cache holds what is computed."""

    kind: SessionKind = "prefix-cache"

    def __init__(
        self,
        engine: SimulatedEngine,
        session_id: str,
        cache_salt: str | None,
        pace: DecodePace | None = None,
        grid: int | None = None,
        keep: KeptPrefix | None = None,
    ) -> None:
        super().__init__(engine, session_id, cache_salt, pace, grid, keep)
        self._submissions = 0
        self._request = ""

    async def append(self, ids: Sequence[int]) -> int | None:
        """Submit the prompt so far for one token that nobody reads; cancelled, it is aborted."""
        self._prompt.extend(ids)
        self._submit(_APPEND, append=True)
        try:
            reply = await self._receive()
            return len(self._prompt) - reply.cached_tokens if isinstance(reply, Sampled) else None
        finally:
            await self.abort()

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        """Submit the whole prompt for its answer."""
        self._prompt.extend(ids)
        self._submit(sampling)
        try:
            async for tokens in self._answer():
                yield tokens
        finally:
            await self.abort()

    def roll_back(self, tokens: int) -> None:
        """See `Session.roll_back`."""
        del self._prompt[tokens:]

    async def abort(self) -> None:
        """Abort the submission that is in flight, if any."""
        self._engine.forget(self._request)

    def _submit(self, sampling: Sampling, *, append: bool = False) -> None:
        self._engine.check_prompt(self._prompt, sampling.max_tokens, self._grid)
        self._submissions += 1
        self._request = f"{self._id}#{self._submissions}"
        self._inbox = asyncio.Queue()
        self._engine.submit(
            Chunk(self._request, self._prompt, self._salt, sampling, append, self._pace, self._grid, self._keep),
            self._inbox,
        )


class StreamingSession(SimulatedSession):
    """One request that pauses between chunks and keeps what it has computed."""

    kind: SessionKind = "streaming-input"

    async def append(self, ids: Sequence[int]) -> int | None:
        """Give the request its next tokens; cancelled, they still count."""
        first = not self._prompt
        self._submit(ids, None)
        await self._receive()
        return None if first else len(ids)

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        """Give the request its last tokens and read the answer."""
        self._submit(ids, sampling)
        try:
            async for tokens in self._answer():
                yield tokens
        finally:
            await self.abort()

    def roll_back(self, tokens: int) -> None:
        """See `Session.roll_back`: its request keeps all that it was given."""
        if tokens < len(self._prompt):
            raise EngineError("a streaming-input session takes nothing back.")

    def _submit(self, ids: Sequence[int], sampling: Sampling | None) -> None:
        self._prompt.extend(ids)
        self._engine.check_prompt(self._prompt, sampling.max_tokens if sampling else 1)
        chunk = Chunk(self._id, list(ids), self._salt, sampling, pace=self._pace, keep=self._keep)
        self._engine.submit(chunk, self._inbox)
