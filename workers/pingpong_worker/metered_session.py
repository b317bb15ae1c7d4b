"""A session whose work is metered, whatever engine it belongs to."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pingpong_bus.messages import Sampling, SessionKind
from pingpong_worker.engine import OutputTokens, Session, TellsProgress
from pingpong_worker.step_meter import StepMeter, Submission


class MeteredSession:
    """Speaks the `Session` protocol; passes everything on, and tells the meter."""

    def __init__(self, session: Session, meter: StepMeter) -> None:
        self._session = session
        self._meter = meter
        self._sent = 0
        """Prompt tokens handed over."""
        self._uncomputed = 0
        """Of them, those of appends that were cancelled: finalize waits for them too."""
        self._submission: Submission | None = None
        """What the engine has of it."""
        if isinstance(session, TellsProgress):
            session.on_computed = self._progressed

    @property
    def kind(self) -> SessionKind:
        """See `Session.kind`."""
        return self._session.kind

    async def append(self, ids: Sequence[int]) -> int | None:
        """See `Session.append`."""
        self._sent += len(ids)
        self._uncomputed += len(ids)
        submission = self._submitted(is_append=True)
        try:
            computed = await self._session.append(ids)
            self._meter.output(submission, time.monotonic(), computed=computed)
            self._uncomputed = 0
            return computed
        finally:
            self._meter.ended(submission, time.monotonic())

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        """See `Session.finalize`."""
        self._sent += len(ids)
        self._uncomputed += len(ids)
        submission = self._submitted(is_append=False)
        counted = 0
        try:
            async with aclosing(self._session.finalize(ids, sampling)) as outputs:
                async for tokens in outputs:
                    computed = self._computed(tokens)
                    steps = None if tokens.drafts is None else tokens.drafts.steps - counted
                    counted += len(tokens.ids) if steps is None else steps  # a token a step, until it is guessed for
                    self._meter.output(
                        submission, time.monotonic(), tokens=len(tokens.ids), steps=steps, computed=computed
                    )
                    yield tokens
        finally:
            self._meter.ended(submission, time.monotonic())

    def roll_back(self, tokens: int) -> None:
        """See `Session.roll_back`."""
        self._session.roll_back(tokens)
        self._sent = min(self._sent, tokens)
        self._uncomputed = min(self._uncomputed, self._sent)

    async def abort(self) -> None:
        """See `Session.abort`."""
        await self._session.abort()

    def _submitted(self, *, is_append: bool) -> Submission:
        now = time.monotonic()
        self._submission = self._meter.submitted(self._uncomputed, now, is_append=is_append, context=self._sent)
        return self._submission

    def _progressed(self, tokens: int) -> None:
        if self._submission is not None:
            self._meter.progressed(self._submission, max(0, self._sent - tokens))

    def _computed(self, tokens: OutputTokens) -> int | None:
        """Prompt tokens that were computed for a first output; None where unknown, and for others."""
        if tokens.cached_tokens is None:
            return None
        if self.kind == "streaming-input" and self._uncomputed < self._sent:
            return self._uncomputed  # what it had found in the cache was for its first chunk
        return self._sent - tokens.cached_tokens
