"""Runs one hop: reads the prompt as it grows, appends it to an engine session, and writes the answer."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pingpong_bus.errors import ChainFailed, ConfigError, PingpongError
from pingpong_bus.messages import (
    AppendRecord,
    HopAppended,
    HopChecked,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopSpec,
    SessionKind,
    WorkerMessage,
)
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import TokenLogWriter
from pingpong_worker.answer import Answer
from pingpong_worker.chunk_policy import Append, AppendPace, Finalize, PromptProgress, Wait, decide
from pingpong_worker.engine import Engine, Session
from pingpong_worker.growing_prompt import GrowingPrompt
from pingpong_worker.prompt import PromptCodec


@dataclass(frozen=True)
class Surroundings:
    """What all hops of a worker share."""

    engine: Engine
    prompts: PromptCodec | None
    """None where the model has no tokenizer."""
    slab: Slab
    subscriber: Subscriber
    publisher: Publisher
    report: Callable[[WorkerMessage], None]
    """Sends a message to the supervisor; never blocks."""


class Feed:
    """One hop, from its first prompt token to the close of its log."""

    def __init__(self, spec: HopSpec, surroundings: Surroundings) -> None:
        self.spec = spec
        self._around = surroundings
        self._report = surroundings.report
        self._prompt = GrowingPrompt(spec.segments, surroundings.slab, surroundings.subscriber)
        self._answer: Answer | None = None
        self._kind: SessionKind = spec.session or "prefix-cache"
        self._sent = 0
        """Prompt tokens given to the engine."""
        self._digest = hashlib.sha256()
        self._pace = AppendPace()

    @property
    def output_tokens(self) -> int:
        """Tokens written so far."""
        return self._answer.tokens if self._answer else 0

    async def run(self) -> HopEnded:
        """Run to the end; a failure is an answer too.

        Cancelled, it ends its session and its log, and lets the cancellation through.
        """
        try:
            return await self._run()
        except PingpongError as error:
            return self._ended_with(error)

    async def check(self) -> HopChecked:
        """Tokenize the joined text as a whole and compare; for a hop that has finished and has `match`."""
        match = self.spec.match
        if match is None or self._around.prompts is None:
            return HopChecked(hop=self.spec.hop, prompt_token_match=None)
        ids = await asyncio.to_thread(self._around.prompts.tokenize_whole, match, self._prompt.outputs_of(match))
        return HopChecked(hop=self.spec.hop, prompt_token_match=ids == self._prompt.ids)

    async def _run(self) -> HopEnded:
        around, spec = self._around, self.spec
        writer = TokenLogWriter(around.slab, spec.output)
        self._answer = answer = Answer(spec.hop, writer, around.publisher, self._report)
        try:
            answer.decode_with(around.prompts, spec.sampling)
            self._report(HopOpened(hop=spec.hop, at_ns=time.monotonic_ns()))
            if spec.joined is not None:
                if around.prompts is None:
                    raise ConfigError("the model has no tokenizer, so text cannot be joined.", field="prompt")
                await self._prompt.read_joined(spec.joined, around.prompts.join)
            else:
                self._prompt.take_known()
            session = around.engine.open(
                spec.hop, cache_salt=spec.cache_salt, sampling=spec.sampling, kind=spec.session
            )
            self._kind = session.kind
            try:
                if not self._prompt.complete:
                    await self._grow(session)
                await self._decode(session, answer)
            finally:
                await session.abort()
        finally:
            answer.abort()
        return HopEnded(
            hop=spec.hop,
            state="finished",
            at_ns=answer.committed_ns or time.monotonic_ns(),
            output_tokens=answer.tokens,
            finish_reason=answer.finish_reason,
            stop_token=answer.stop_token,
            session=self._kind,
        )

    async def _grow(self, session: Session) -> None:
        """Append as the policy says, until the prompt is complete."""
        prompt = self._prompt
        append_tokens = self.spec.chunks.append_tokens
        # A prefix cache holds whole blocks: what an append computes behind the last one is computed again.
        align = self._around.engine.limits.block_size if session.kind == "prefix-cache" else 1
        reading = asyncio.create_task(prompt.read())
        reading.add_done_callback(lambda _: prompt.changed.set())
        appending: asyncio.Task[None] | None = None
        try:
            while True:
                prompt.changed.clear()
                if reading.done():
                    reading.result()
                if appending is not None and appending.done():
                    appending.result()
                    appending = None
                match decide(self._progress(appending is not None), self._pace, append_tokens, align):
                    case Finalize():
                        return
                    case Append(tokens):
                        appending = asyncio.create_task(self._append(session, tokens))
                        appending.add_done_callback(lambda _: prompt.changed.set())
                    case Wait():
                        await prompt.changed.wait()
        finally:
            await _cancel([reading] if appending is None else [reading, appending])

    def _progress(self, in_flight: bool) -> PromptProgress:
        prompt = self._prompt
        return PromptProgress(
            pending=len(prompt.ids) - self._sent,
            sent=self._sent,
            in_flight=in_flight,
            complete=prompt.complete,
            literal_tail=prompt.literal_tail,
            remaining=prompt.remaining,
        )

    async def _append(self, session: Session, tokens: int) -> None:
        """One append. Its ids count as sent from its first moment: cancelled, they stay part of the prompt."""
        prompt = self._prompt
        ids = self._send(tokens)
        sent, arrived, begun, done = self._sent, prompt.stream_tokens, time.monotonic_ns(), 0
        try:
            await session.append(ids)
            done = time.monotonic_ns()
            self._pace = AppendPace(tokens, prompt.stream_tokens - arrived)
        finally:
            record = AppendRecord(at_ns=begun, done_ns=done, tokens=tokens, sent=sent)
            self._report(HopAppended(hop=self.spec.hop, append=record))

    async def _decode(self, session: Session, answer: Answer) -> None:
        """Hand over the rest of the prompt and write what comes back."""
        final = len(self._prompt.ids) - self._sent
        if final == 0:
            raise ChainFailed("the prompt came out empty: it holds nothing but outputs, and they are empty.")
        ids = self._send(final)
        finalized = HopFinalized(
            hop=self.spec.hop,
            at_ns=time.monotonic_ns(),
            prompt_tokens=self._sent,
            prompt_digest=self._digest.hexdigest(),
            final_tokens=final,
        )
        first = True
        async with aclosing(session.finalize(ids, self.spec.sampling)) as outputs:
            self._report(finalized)
            async for tokens in outputs:
                answer.take(tokens)
                if first:
                    first = False
                    at = answer.committed_ns or time.monotonic_ns()
                    cached = tokens.cached_tokens or 0
                    self._report(HopFirstToken(hop=self.spec.hop, at_ns=at, cached_tokens=cached))
                if answer.finish_reason is not None:
                    return
        raise ChainFailed("the engine's answer ended without a reason.")

    def _send(self, tokens: int) -> Sequence[int]:
        """The next `tokens` of the prompt, counted as sent and entered into the digest."""
        ids = self._prompt.ids[self._sent : self._sent + tokens]
        self._sent += tokens
        packed = array("I", ids)
        if sys.byteorder == "big":
            packed.byteswap()
        self._digest.update(packed)
        return ids

    def _ended_with(self, error: PingpongError) -> HopEnded:
        return HopEnded(
            hop=self.spec.hop,
            state="failed",
            at_ns=time.monotonic_ns(),
            output_tokens=self.output_tokens,
            session=self._kind,
            code=error.code,
            message=str(error),
        )


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they are over; what they raised was seen already, or is moot now."""
    for task in tasks:
        task.cancel()
    interruption: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:  # the hop is aborted just now: that, too, only once they are over
            interruption = error
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if interruption is not None:
        raise interruption
