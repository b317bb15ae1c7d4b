"""A hop's answer on its way out: into its token log and, as text, to the supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import FinishReason, HopText, Sampling, WorkerMessage
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState
from pingpong_bus.token_log import TokenLogWriter
from pingpong_worker.engine import OutputTokens
from pingpong_worker.prompt import PromptCodec
from pingpong_worker.text import Committed, DecodeStream, StopMatcher

TEXT_INTERVAL_S = 0.2
"""Text is sent at most this often; ids are in the log at once. A text wakes worker, supervisor and client, which have
no core of their own where every core is an engine's."""


class Answer:
    """Commits tokens, rings the doorbell, decodes text, and finds stop strings.

    Tokens that might be the beginning of a stop string are withheld until they cannot be: what stands in the log is
    never taken back.
    """

    def __init__(
        self, hop: str, writer: TokenLogWriter, publisher: Publisher, report: Callable[[WorkerMessage], None]
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.committed_ns = 0
        """When the last token was committed."""
        self._hop = hop
        self._writer = writer
        self._publisher = publisher
        self._report = report
        self._matcher: StopMatcher | None = None
        self._decoder: DecodeStream | None = None
        self._undecoded: list[int] = []
        self._text = ""
        self._text_due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def decode_with(self, prompts: PromptCodec | None, sampling: Sampling) -> None:
        """Give text from now on; without a tokenizer there is none.

        Raises:
            ConfigError: there are stop strings, and no tokenizer to find them with.
        """
        if sampling.stop:
            if prompts is None:
                raise ConfigError("the model has no tokenizer, so stop strings cannot be found.", field="stop")
            self._matcher = StopMatcher(sampling.stop, prompts, max_tokens=sampling.max_tokens)
        elif prompts is not None:
            self._decoder = prompts.decode_stream()

    @property
    def tokens(self) -> int:
        """Tokens committed."""
        return self._writer.count

    def take(self, tokens: OutputTokens) -> None:
        """Take what the engine gave; after this `finish_reason` says whether the answer is over."""
        reason, stop_token = tokens.finish_reason, tokens.stop_token
        if self._matcher is None:
            self._commit(tokens.ids)
        elif self._match(self._matcher, tokens):
            reason, stop_token = "stop", None
        if reason is None:
            self._schedule_text()
        else:
            self._close("stop" if reason == "stop" else "length", stop_token)

    def abort(self) -> None:
        """End the log as incomplete, where it has not ended; text is sent for all that stands in it."""
        if self.finish_reason is not None:
            return
        try:
            self._finish_text()
        finally:
            self._writer.abort()
            self._publisher.ring(self._writer.stream, self._writer.count, [], LogState.ABORTED)

    def _match(self, matcher: StopMatcher, tokens: OutputTokens) -> bool:
        """Commit what the matcher lets through; returns whether a stop string has ended the answer."""
        passed = matcher.feed(tokens.ids)
        if not passed.stopped and tokens.finish_reason is not None:
            self._pass(passed)
            passed = matcher.finish()
        self._pass(passed)
        return passed.stopped

    def _pass(self, passed: Committed) -> None:
        self._commit(passed.ids)
        self._text += passed.text

    def _commit(self, ids: Sequence[int]) -> None:
        if ids:
            first = self._writer.append(ids)
            self.committed_ns = time.monotonic_ns()
            self._publisher.ring(self._writer.stream, first, ids, LogState.OPEN)
            if self._decoder is not None:
                self._undecoded.extend(ids)

    def _close(self, reason: FinishReason, stop_token: int | None) -> None:
        self._writer.close(reason, stop_token)
        self._publisher.ring(self._writer.stream, self._writer.count, [], LogState.CLOSED)
        self.finish_reason = reason
        self.stop_token = stop_token
        self._finish_text()

    def _finish_text(self) -> None:
        """Send the text that is left."""
        self._stop_timer()
        self._decode()
        if self._decoder is not None:
            self._text += self._decoder.finish()
        self._send_text()

    def _schedule_text(self) -> None:
        if self._timer is None and (self._undecoded or self._text):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._text_due, loop.time()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._text_due = asyncio.get_running_loop().time() + TEXT_INTERVAL_S
        self._decode()
        self._send_text()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _decode(self) -> None:
        if self._decoder is not None and self._undecoded:
            self._text += self._decoder.step(self._undecoded)
            self._undecoded = []

    def _send_text(self) -> None:
        if self._text:
            self._report(HopText(hop=self._hop, upto=self._writer.count, text=self._text))
            self._text = ""
