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
from pingpong_worker.text import DecodeStream, StopMatcher

TEXT_INTERVAL_S = 0.2
"""Text is sent at most this often; ids are in the log at once. A text wakes worker, supervisor and client, which have
no core of their own where every core is an engine's."""


class Answer:
    """Commits tokens, rings the doorbell, decodes text, and finds stop strings.

    Tokens that might be the beginning of a stop string are withheld until they cannot be: what stands in the log is
    never taken back.

    It is over once its log is closed, aborted or left, and does nothing more from then on.
    """

    def __init__(
        self, hop: str, writer: TokenLogWriter, publisher: Publisher, report: Callable[[WorkerMessage], None]
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.committed_ns = 0
        """When the last token was committed."""
        self.over = False
        self._hop = hop
        self._writer = writer
        self._publisher = publisher
        self._report = report
        self._matcher: StopMatcher | None = None
        self._decoder: DecodeStream | None = None
        self._undecoded: list[int] = []
        self._text = ""
        self._known_chars = 0
        """Characters, of those that come next, that an earlier hop has sent."""
        self._told = writer.count
        """Ids that the supervisor knows of; also where they have no text, for want of a tokenizer for one."""
        self._text_due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def decode_with(
        self, prompts: PromptCodec | None, sampling: Sampling, committed: Sequence[int] = (), known_chars: int = 0
    ) -> None:
        """Give text from now on; without a tokenizer there is none.

        Args:
            prompts: decodes.
            sampling: what was asked for, by the chain.
            committed: ids that an earlier hop has written: decoding and looking for stop strings go on behind them.
            known_chars: characters of text that it has sent.

        Raises:
            ConfigError: there are stop strings, and no tokenizer to find them with.
        """
        self._known_chars = known_chars
        if sampling.stop:
            if prompts is None:
                raise ConfigError("the model has no tokenizer, so stop strings cannot be found.", field="stop")
            self._matcher = StopMatcher(sampling.stop, prompts, max_tokens=sampling.max_tokens)
            self._add_text(self._matcher.resume(committed))
        elif prompts is not None:
            self._decoder = prompts.decode_stream()
            self._undecoded = list(committed)
        self._schedule_text()

    @property
    def tokens(self) -> int:
        """Tokens in the log."""
        return self._writer.count

    def take(self, tokens: OutputTokens) -> None:
        """Take what the engine gave; after this `finish_reason` says whether the answer is over."""
        if self.over:
            return
        ids, reason, stop_token = tokens.ids, tokens.finish_reason, tokens.stop_token
        if self._matcher is not None:
            ids, stopped = self._match(self._matcher, tokens)
            if stopped:
                reason, stop_token = "stop", None
        if reason is None:
            self._commit(ids)
            self._schedule_text()
        else:
            self._close(ids, "stop" if reason == "stop" else "length", stop_token)

    def abort(self) -> None:
        """End the log as incomplete, where it has not ended; text is sent for all that stands in it."""
        if self.over:
            return
        self.over = True
        try:
            self._finish_text()
        finally:
            self._writer.abort()
            self._publisher.ring(self._writer.stream, self._writer.count, [], LogState.ABORTED)

    def leave(self) -> None:
        """Leave the log open for another hop to go on in it; text is sent as far as it is certain."""
        if self.over:
            return
        self.over = True
        self._stop_timer()
        self._decode()
        self._send_text()

    def _match(self, matcher: StopMatcher, tokens: OutputTokens) -> tuple[list[int], bool]:
        """What the matcher lets through, and whether a stop string has ended the answer."""
        passed = matcher.feed(tokens.ids)
        ids = passed.ids
        self._add_text(passed.text)
        if not passed.stopped and tokens.finish_reason is not None:
            passed = matcher.finish()
            ids = ids + passed.ids
            self._add_text(passed.text)
        return ids, passed.stopped

    def _commit(self, ids: Sequence[int]) -> None:
        if ids:
            first = self._writer.append(ids)
            self.committed_ns = time.monotonic_ns()
            self._publisher.ring(self._writer.stream, first, ids, LogState.OPEN)
            if self._decoder is not None:
                self._undecoded.extend(ids)

    def _close(self, ids: Sequence[int], reason: FinishReason, stop_token: int | None) -> None:
        first = self._writer.close(reason, stop_token, ids)
        self.over = True
        if ids:
            self.committed_ns = time.monotonic_ns()
        self._publisher.ring(self._writer.stream, first, ids, LogState.CLOSED)
        if self._decoder is not None:
            self._undecoded.extend(ids)
        self.finish_reason = reason
        self.stop_token = stop_token
        self._finish_text()

    def _add_text(self, text: str) -> None:
        new = text[self._known_chars :]
        self._known_chars -= len(text) - len(new)
        self._text += new

    def _finish_text(self) -> None:
        """Send the text that is left."""
        self._stop_timer()
        self._decode()
        if self._decoder is not None:
            self._add_text(self._decoder.finish())
        self._send_text()

    def _schedule_text(self) -> None:
        if self._timer is None and (self._undecoded or self._text or self._writer.count > self._told):
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
            self._add_text(self._decoder.step(self._undecoded))
            self._undecoded = []

    def _send_text(self) -> None:
        count = self._writer.count
        if self._text or (count > self._told and not self.over):  # the end itself tells of the last ids
            self._report(HopText(hop=self._hop, upto=count, text=self._text))
            self._text, self._told = "", count
