"""A hop's prompt as far as it is known: literal tokens, and upstream outputs read from their logs as they grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from pingpong_bus.errors import ChainFailed
from pingpong_bus.messages import HopSegment, JoinedPrompt, Literals, StreamRef, StreamSegment
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import LogView, TokenLogReader
from pingpong_worker.prompt import Outputs, PromptCodec
from pingpong_worker.text_source import TextSource, TokenizerShelf, text_source

_NEWEST = 0.25
"""Weight of the newest time between tokens in their running mean."""
_StreamKey = tuple[int, int]
"""Slot and generation: a log, by whatever bell it is heard."""


class TokenClock:
    """The time that one id of a log takes, as a running mean.

    Attributes:
        token_ms: it; None while nothing is known.
    """

    def __init__(self) -> None:
        self.token_ms: float | None = None
        self._last = 0.0
        """When the last ids came; 0 while none have."""

    def arrived(self, tokens: int) -> None:
        """So many, one at least, have come now."""
        now = time.monotonic()
        if self._last:
            ms = (now - self._last) * 1e3 / tokens
            self.token_ms = ms if self.token_ms is None else self.token_ms + _NEWEST * (ms - self.token_ms)
        self._last = now


class GrowingPrompt:
    """Walks the segments in order.

    Attributes:
        ids: the prompt's known beginning; it only grows.
        complete: whether `ids` is the whole prompt.
        stream_tokens: how many of `ids` came from upstreams.
        changed: set whenever one of them changed; the reader of the prompt clears it.
    """

    def __init__(self, segments: Sequence[HopSegment], slab: Slab, subscriber: Subscriber) -> None:
        self.ids: list[int] = []
        self.complete = False
        self.stream_tokens = 0
        self.changed = asyncio.Event()
        self._segments = segments
        self._slab = slab
        self._subscriber = subscriber
        self._next = 0
        self._arrived = 0
        """Tokens taken from the stream at `_next`."""
        self._clock = TokenClock()
        literal = [at for at, segment in enumerate(segments) if isinstance(segment, Literals) and segment.ids]
        self._last_literal = max(literal, default=-1)
        self._outputs: dict[_StreamKey, list[int]] = {}
        self._texts: dict[int, str] = {}

    @property
    def literal_tail(self) -> bool:
        """Whether literal tokens follow behind `ids`."""
        return self._last_literal >= self._next

    @property
    def remaining(self) -> int | None:
        """The most tokens that upstreams may still write; None where one of them did not say."""
        total = 0
        for segment in self._segments[self._next :]:
            if isinstance(segment, StreamSegment):
                count, state = TokenLogReader(self._slab, segment.stream).peek()
                if not state.over:
                    if segment.expected == 0:
                        return None
                    total += max(0, segment.expected - count)
        return total

    @property
    def token_ms(self) -> float | None:
        """How long the upstream that is being read takes for a token, by the last of them; None where that is not
        known yet, and where others still write, whose tokens come beside it."""
        for segment in self._segments[self._next + 1 :]:
            if isinstance(segment, StreamSegment) and not TokenLogReader(self._slab, segment.stream).peek()[1].over:
                return None
        return self._clock.token_ms

    def take_known(self) -> None:
        """Take all that is there already, without waiting.

        A prompt whose upstreams are all closed is complete after this: it needs no append and no doorbell.

        Raises:
            ChainFailed: an upstream's output ended incomplete.
            StreamGone: an upstream's log was freed.
        """
        while self._next < len(self._segments):
            segment = self._segments[self._next]
            if isinstance(segment, Literals):
                self.ids.extend(segment.ids)
                self._advance()
                continue
            view = TokenLogReader(self._slab, segment.stream).read(self._arrived)
            self._take(segment.stream, view)
            if not view.state.over:
                return
        self.complete = True
        self.changed.set()

    async def read(self) -> None:
        """Read until the prompt is complete; raises what `take_known` raises."""
        self.take_known()
        while not self.complete:
            segment = self._segments[self._next]
            assert isinstance(segment, StreamSegment)  # noqa: S101  take_known stops at nothing else
            async with aclosing(self._follow(segment.stream, self._arrived)) as views:
                async for view in views:
                    self._take(segment.stream, view)
            self.take_known()

    async def read_joined(self, joined: JoinedPrompt, codec: PromptCodec, tokenizers: TokenizerShelf) -> None:
        """Wait for every upstream of a prompt that is tokenized as one text, then tokenize it in a thread."""
        sources: dict[int, TextSource] = {}
        for agent, stream in joined.outputs.items():
            sources[agent] = await text_source(joined.sources.get(agent), codec, tokenizers)
            async with aclosing(self._follow(stream, 0)) as views:
                async for view in views:
                    self._keep(stream, view)
        self.ids = await asyncio.to_thread(self._join, joined, codec, sources)
        self.complete = True
        self.changed.set()

    def outputs_of(self, joined: JoinedPrompt) -> Outputs:
        """The upstream outputs that a joined text needs, by agent; all have been read."""
        return self._texts or {agent: self._outputs[_key(stream)] for agent, stream in joined.outputs.items()}

    def _join(self, joined: JoinedPrompt, codec: PromptCodec, sources: Mapping[int, TextSource]) -> list[int]:
        for agent, stream in joined.outputs.items():
            source = sources[agent]
            self._texts[agent] = source.feed(self._outputs[_key(stream)]) + source.finish()
        return codec.join(joined, self._texts)

    def _follow(self, stream: StreamRef, start: int) -> AsyncGenerator[LogView, None]:
        if stream.bell:
            self._subscriber.connect(stream.bell)
        return self._subscriber.follow(stream, start)

    def _take(self, stream: StreamRef, view: LogView) -> None:
        self._keep(stream, view)
        if view.ids:
            self._clock.arrived(len(view.ids))
        self.ids.extend(view.ids)
        self.stream_tokens += len(view.ids)
        self._arrived += len(view.ids)
        if view.state is LogState.CLOSED:
            self._advance()
        self.changed.set()

    def _keep(self, stream: StreamRef, view: LogView) -> None:
        if view.state is LogState.ABORTED:
            raise ChainFailed(f"the output in slot {stream.slot} ended incomplete.")
        kept = self._outputs.setdefault(_key(stream), [])
        if view.first_index == len(kept):  # an output that is read twice is kept once
            kept.extend(view.ids)

    def _advance(self) -> None:
        self._next += 1
        self._arrived = 0
        self._clock = TokenClock()


def _key(stream: StreamRef) -> _StreamKey:
    return stream.slot, stream.generation
