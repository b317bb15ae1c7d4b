"""Runs one hop: reads the prompt as it grows, appends it to an engine session, and writes the answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Literal

from pingpong_bus.errors import BusError, ChainFailed, ConfigError, EngineLost, PingpongError
from pingpong_bus.messages import (
    AppendRecord,
    DraftCounts,
    HopAppended,
    HopChecked,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopSpec,
    HopText,
    SeamCounts,
    SessionKind,
    WorkerMessage,
)
from pingpong_bus.slab import LogState
from pingpong_bus.token_log import LogView, TokenLogReader, TokenLogWriter
from pingpong_worker.answer import Answer
from pingpong_worker.chunk_policy import Append, AppendPace, Finalize, PromptProgress, Wait, decide
from pingpong_worker.engine import OutputTokens, Session
from pingpong_worker.growing_prompt import GrowingPrompt
from pingpong_worker.metered_session import MeteredSession
from pingpong_worker.prompt import Outputs
from pingpong_worker.resuming import Replay, committed_ids, replays, sampling_after
from pingpong_worker.seam_prompt import SeamPrompt
from pingpong_worker.surroundings import Surroundings

LET_GO_S = 1.0
"""How long an engine may take to free what a hop holds in it; the hop is over then all the same."""
_log = logging.getLogger("pingpong_worker")

Ending = Literal["aborted", "lost", "released"]
"""How a hop ends that is cancelled."""


class Feed:
    """One hop, from its first prompt token to the close of its log.

    Attributes:
        ending: what a cancellation means: "aborted" where somebody asked for the hop's end, "lost" where the worker
            goes, "released" where another worker is to go on with it. Set it before cancelling; without it, "aborted"
            is meant.
        left_open: whether the hop is over with its log open, for another to go on in it.
    """

    def __init__(self, spec: HopSpec, surroundings: Surroundings) -> None:
        self.spec = spec
        self.ending: Ending | None = None
        self.left_open = False
        self._around = surroundings
        self._prompt = _prompt(spec, surroundings)
        self._answer: Answer | None = None
        self._kind: SessionKind = spec.session or "prefix-cache"
        self._seam = SeamCounts(rollbacks=0, tokens=0) if isinstance(self._prompt, SeamPrompt) else None
        self._drafts: DraftCounts | None = None
        """How guessing its tokens has gone."""
        self._sent = 0
        """Prompt tokens given to the engine."""
        self._digest = hashlib.sha256()
        self._pace = AppendPace()
        self._over = False

    @property
    def output_tokens(self) -> int:
        """Tokens in its log so far, those of an earlier hop among them."""
        return self._answer.tokens if self._answer else 0

    @property
    def new_tokens(self) -> int:
        """Tokens that this hop itself has written so far."""
        return max(0, self.output_tokens - (self.spec.resume.tokens if self.spec.resume else 0))

    async def run(self) -> HopEnded:
        """Run to the end; a failure is an answer too.

        Cancelled, it ends its session, leaves or aborts its log as `ending` says, and lets the cancellation through.
        """
        try:
            return await self._run()
        except PingpongError as error:
            return self.ended("lost" if self.left_open else "failed", error)

    def abandon(self) -> None:
        """Be over at once: for a hop that was cancelled, and whose engine does not let go of it.

        Whatever the rest of its task still does, it touches no log and reports nothing.
        """
        with suppress(BusError):  # nothing to end, where the log is gone already
            self._end_log(lost=False)
        self._over = True

    def finished(self) -> HopEnded | None:
        """The report of an answer; None where there is none, or none yet."""
        answer = self._answer
        if answer is None or answer.finish_reason is None:
            return None
        return HopEnded(
            hop=self.spec.hop,
            state="finished",
            at_ns=answer.committed_ns or time.monotonic_ns(),
            output_tokens=answer.tokens,
            finish_reason=answer.finish_reason,
            stop_token=answer.stop_token,
            session=self._kind,
            drafts=self._drafts,
            seam=self._seam,
        )

    def ended(self, state: Ending | Literal["failed"], error: PingpongError | None = None) -> HopEnded:
        """The report of an end without an answer."""
        return HopEnded(
            hop=self.spec.hop,
            state=state,
            at_ns=time.monotonic_ns(),
            output_tokens=self.output_tokens,
            session=self._kind,
            drafts=self._drafts,
            seam=self._seam,
            code=error.code if error else "",
            message=str(error) if error else "",
        )

    async def check(self) -> HopChecked:
        """Tokenize the joined text as a whole and compare; for a hop that has finished and has `match`."""
        match = self.spec.match
        if match is None or self._around.prompts is None:
            return HopChecked(hop=self.spec.hop, prompt_token_match=None)
        prompt = self._prompt
        outputs: Outputs = prompt.texts if isinstance(prompt, SeamPrompt) else prompt.outputs_of(match)
        ids = await asyncio.to_thread(self._around.prompts.tokenize_whole, match, outputs)
        return HopChecked(hop=self.spec.hop, prompt_token_match=ids == prompt.ids)

    async def _run(self) -> HopEnded:
        around, spec = self._around, self.spec
        log = TokenLogReader(around.slab, spec.output).read()
        if log.state is LogState.CLOSED:
            return await self._tell(log)
        writer = TokenLogWriter(around.slab, spec.output)
        self._answer = answer = Answer(spec.hop, writer, around.publisher, self._report)
        lost = False
        try:
            committed = committed_ids(around.slab, spec.output, spec.resume)
            known_chars = spec.resume.text_chars if spec.resume else 0
            answer.decode_with(around.prompts, spec.sampling, committed, known_chars)
            self._report(HopOpened(hop=spec.hop, at_ns=time.monotonic_ns()))
            await self._begin_prompt()
            if len(committed) < spec.sampling.max_tokens:
                await self._ask(answer, committed)
            else:  # only the end was not written any more
                self._report(self._finalized(self._rest()))
                answer.take(OutputTokens([], "length"))
        except EngineLost:
            lost = True
            raise
        finally:
            self._end_log(lost=lost)
        finished = self.finished()
        assert finished is not None  # noqa: S101 - `_decode` returns once the answer is over
        return finished

    async def _tell(self, log: LogView) -> HopEnded:
        """Report an answer that an earlier hop has closed, and whose worker died before it could say so."""
        spec, prompts = self.spec, self._around.prompts
        self._report(HopOpened(hop=spec.hop, at_ns=time.monotonic_ns()))
        await self._begin_prompt(whole=True)
        self._report(self._finalized(self._rest()))
        if prompts is not None:
            stream = prompts.decode_stream()
            text = stream.step(log.ids) + stream.finish()
            if unsent := text[spec.resume.text_chars if spec.resume else 0 :]:
                self._report(HopText(hop=spec.hop, upto=log.count, text=unsent))
        return HopEnded(
            hop=spec.hop,
            state="finished",
            at_ns=time.monotonic_ns(),
            output_tokens=log.count,
            finish_reason=log.finish_reason,
            stop_token=log.stop_token,
            session=self._kind,
        )

    async def _begin_prompt(self, *, whole: bool = False) -> None:
        """Take what is known of the prompt. One that is tokenized as a whole is waited for; so is, with `whole` and
        where the hop is resumed, one that has been complete before."""
        prompt, joined, around = self._prompt, self.spec.joined, self._around
        whole = whole or self.spec.resume is not None
        if isinstance(prompt, SeamPrompt):
            await prompt.begin()
            if whole:
                await prompt.read()
                await prompt.prove()
        elif joined is not None:
            if around.prompts is None:
                raise ConfigError("the model has no tokenizer, so text cannot be joined.", field="prompt")
            await prompt.read_joined(joined, around.prompts, around.tokenizers)
        elif whole:
            await prompt.read()
        else:
            prompt.take_known()

    async def _ask(self, answer: Answer, committed: Sequence[int]) -> None:
        """Give the prompt to the engine as it grows, and write its answer."""
        spec, engine = self.spec, self._around.engine
        opened = engine.open(
            spec.hop,
            cache_salt=spec.cache_salt,
            sampling=spec.sampling,
            kind=spec.session if self._seam is None else "prefix-cache",  # the other takes nothing back
            pace=spec.pace,
            grid=spec.grid,
            drafts=spec.drafts if spec.speculate else None,
            keep=spec.keep,
        )
        session = MeteredSession(opened, self._around.meter)
        self._kind = session.kind
        try:
            if not self._prompt.complete:
                await self._grow(session)
            if not await self._decode(session, answer, committed):
                # What was proved wrong is proved right now; the engine keeps what it has of it in its prefix cache.
                await self._decode(session, answer, committed)
        finally:
            await self._let_go(session)

    async def _let_go(self, session: Session) -> None:
        """End the session; an engine that does not answer must not hold up the hop's report."""
        try:
            async with asyncio.timeout(LET_GO_S):
                await session.abort()
        except TimeoutError:
            _log.error("the engine does not let go of hop %s", self.spec.hop)

    def _end_log(self, *, lost: bool) -> None:
        """End or leave the log, where the answer has not ended it."""
        answer = self._answer
        if answer is None or answer.over:
            return
        if self.ending in ("lost", "released") or (lost and self.ending is None):
            self.left_open = True
            answer.leave()
        else:
            answer.abort()

    def _report(self, message: WorkerMessage) -> None:
        if not self._over:
            self._around.report(message)

    async def _grow(self, session: Session) -> None:
        """Append as the policy says, until the prompt is complete."""
        prompt = self._prompt
        append_tokens = self.spec.chunks.append_tokens
        # A prefix cache holds whole blocks, or whole cells on a grid: what an append computes behind the last one is
        # computed again.
        block = self._around.engine.limits.block_size if session.kind == "prefix-cache" else 1
        align = self.spec.grid or block
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
            token_ms=prompt.token_ms,
        )

    async def _append(self, session: Session, tokens: int) -> None:
        """One append. Its ids count as sent from its first moment: cancelled, they stay part of the prompt."""
        prompt = self._prompt
        ids = self._send(tokens)
        sent, arrived, begun, done = self._sent, prompt.stream_tokens, time.monotonic_ns(), 0
        try:
            await session.append(ids)
            done = time.monotonic_ns()
            self._pace = AppendPace(tokens, prompt.stream_tokens - arrived, (done - begun) / 1e6)
        finally:
            record = AppendRecord(at_ns=begun, done_ns=done, tokens=tokens, sent=sent)
            self._report(HopAppended(hop=self.spec.hop, append=record))

    async def _decode(self, session: Session, answer: Answer, committed: Sequence[int]) -> bool:
        """Hand over the rest of the prompt, and what is committed behind it, and write what comes back.

        What is replayed stands in the log and was published: it is only compared. False, with nothing written and the
        session as it was for what of the prompt is right, where ids were sent that are not the prompt's.
        """
        rest = self._rest()
        finalized = self._finalized(rest)
        replaying = replays(self.spec)
        replay = Replay(committed if replaying else ())
        behind = () if replaying else committed
        sampling = sampling_after(self.spec.sampling, len(behind))
        first, right = True, None
        async with aclosing(session.finalize([*rest, *behind], sampling)) as outputs:
            if self._seam is None:
                self._report(finalized)
            async for tokens in outputs:
                if first and isinstance(self._prompt, SeamPrompt):
                    if (right := await self._prompt.prove()) is not None:
                        break
                    self._report(finalized)
                self._drafts = tokens.drafts or self._drafts
                if (new := replay.take(tokens)) is not None:
                    answer.take(new)
                if first:
                    first = False
                    at = answer.committed_ns or time.monotonic_ns()
                    cached = min(tokens.cached_tokens or 0, finalized.prompt_tokens)
                    self._report(HopFirstToken(hop=self.spec.hop, at_ns=at, cached_tokens=cached))
                if answer.over:
                    return True
        if right is not None:
            self._take_back(session, right)
            return False
        raise ChainFailed("the engine's answer ended without a reason.")

    def _take_back(self, session: Session, right: int) -> None:
        """Take back the ids of a joined prompt that were sent, but for the first `right`."""
        seam = self._seam or SeamCounts(rollbacks=0, tokens=0)
        right = max(0, min(right, len(self._prompt.ids) - 1))  # an answer needs a token to follow
        self._seam = SeamCounts(rollbacks=seam.rollbacks + 1, tokens=seam.tokens + self._sent - right)
        _log.warning("hop %s: %d ids of a joined prompt were taken back", self.spec.hop, self._sent - right)
        session.roll_back(right)
        self._sent, self._digest = 0, hashlib.sha256()
        self._send(right)

    def _rest(self) -> Sequence[int]:
        """What of the prompt no append has sent; counted as sent."""
        final = len(self._prompt.ids) - self._sent
        if final == 0:
            raise ChainFailed("the prompt came out empty: it holds nothing but outputs, and they are empty.")
        return self._send(final)

    def _finalized(self, rest: Sequence[int]) -> HopFinalized:
        return HopFinalized(
            hop=self.spec.hop,
            at_ns=time.monotonic_ns(),
            prompt_tokens=self._sent,
            prompt_digest=self._digest.hexdigest(),
            final_tokens=len(rest),
        )

    def _send(self, tokens: int) -> Sequence[int]:
        """The next `tokens` of the prompt, counted as sent and entered into the digest."""
        ids = self._prompt.ids[self._sent : self._sent + tokens]
        self._sent += tokens
        packed = array("I", ids)
        if sys.byteorder == "big":
            packed.byteswap()
        self._digest.update(packed)
        return ids


def _prompt(spec: HopSpec, around: Surroundings) -> GrowingPrompt | SeamPrompt:
    joined = spec.joined
    if joined is None or not joined.ahead or around.prompts is None:
        return GrowingPrompt(spec.segments, around.slab, around.subscriber)
    return SeamPrompt(joined, around.prompts, around.tokenizers, around.slab, around.subscriber)


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
