"""A prompt whose outputs are joined as text, as far as it is known: tokenized while its upstreams write.

Its ids are those of `PromptCodec.join`: the template's text with its control tokens, everything else without, and an
output tokenized with the text around it. So an id is known only once no text to come can change it (`token_cuts.py`),
a word or two behind what the upstream has written. That this holds is not taken on trust: when all is known the whole
text is tokenized at once and compared, beside the engine's first step, before any token of the answer is passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pingpong_bus.chain import OutputPart, TextPart
from pingpong_bus.errors import ChainFailed
from pingpong_bus.messages import JoinedPrompt, StreamRef
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import LogView, TokenLogReader
from pingpong_worker.growing_prompt import TokenClock
from pingpong_worker.prompt import PromptCodec
from pingpong_worker.seam_tokens import SeamTokens
from pingpong_worker.text_source import TextSource, TokenizerShelf, text_source

_INLINE_CHARS = 2000
"""More text, with what waits before it, is tokenized in a thread: the event loop's tokens must not wait for it."""
_INLINE_IDS = 128
"""More ids are decoded there."""


class SeamPrompt:
    """Walks the parts in order; what `GrowingPrompt` is for prompts that are joined as ids.

    Attributes:
        complete: whether `ids` is the whole prompt.
        stream_tokens: how many ids of upstream logs have been read.
        changed: set whenever something of it changed; the reader of the prompt clears it.
        texts: the outputs that have ended, by agent, as the prompt holds them.

    Args:
        joined: the prompt; one that can be cut (`JoinedPrompt.ahead`).
        codec: of the model that reads.
        tokenizers: of the models that wrote.
        slab: of the logs.
        subscriber: hears their bells.
    """

    def __init__(
        self, joined: JoinedPrompt, codec: PromptCodec, tokenizers: TokenizerShelf, slab: Slab, subscriber: Subscriber
    ) -> None:
        self.complete = False
        self.stream_tokens = 0
        self.changed = asyncio.Event()
        self.texts: dict[int, str] = {}
        self._joined = joined
        self._codec = codec
        self._tokenizers = tokenizers
        self._slab = slab
        self._subscriber = subscriber
        self._parts: list[TextPart | OutputPart] = []
        self._last_text = -1
        self._next = 0
        self._tokens = SeamTokens(codec)
        self._clock = TokenClock()
        self._whole: list[int] | None = None
        """Its ids as they were proved."""
        self._proof: asyncio.Future[list[int]] | None = None

    @property
    def ids(self) -> Sequence[int]:
        """The prompt's known beginning; it only grows, unless `prove` says otherwise."""
        return self._tokens.ids if self._whole is None else self._whole

    @property
    def literal_tail(self) -> bool:
        """Whether text that is known already follows behind `ids`."""
        return self._last_text >= self._next

    @property
    def remaining(self) -> int | None:
        """The most ids that upstream logs may still get; None where one of them did not say."""
        total = 0
        for part in self._parts[self._next :]:
            if isinstance(part, OutputPart):
                count, state = TokenLogReader(self._slab, self._joined.outputs[part.agent]).peek()
                if not state.over:
                    expected = self._joined.expected.get(part.agent, 0)
                    if expected == 0:
                        return None
                    total += max(0, expected - count)
        return total

    @property
    def token_ms(self) -> float | None:
        """How long the upstream that is being read takes for an id of its log; see `GrowingPrompt.token_ms`."""
        for part in self._parts[self._next + 1 :]:
            if isinstance(part, OutputPart) and not self._is_over(part.agent):
                return None
        return self._clock.token_ms

    async def begin(self) -> None:
        """Take what is there without an upstream; all of it where every upstream has ended.

        Raises:
            ChainError: the template refuses the prompt.
            ChainFailed: an upstream's output ended incomplete.
            ConfigError: the tokenizer of an upstream's model cannot be loaded.
            StreamGone: an upstream's log was freed.
        """
        self._parts = await asyncio.to_thread(self._codec.parts, self._joined)
        texts = [at for at, part in enumerate(self._parts) if isinstance(part, TextPart) and part.text]
        self._last_text = max(texts, default=-1)
        if all(map(self._is_over, self._joined.outputs)):
            await self.read()
        else:
            await self._take_text()

    async def read(self) -> None:
        """Read until the prompt is complete; raises what `begin` raises, which is called before."""
        await self._take_text()
        while self._next < len(self._parts):
            part = self._parts[self._next]
            assert isinstance(part, OutputPart)  # noqa: S101  text has been taken
            await self._take_output(part.agent)
            self._advance()
            await self._take_text()
        if self.complete:
            return
        if self._tokens.waiting > _INLINE_CHARS:
            await asyncio.to_thread(self._tokens.finish)
        else:  # at once: the answer waits for it
            self._tokens.finish()
        self.complete = True
        self._proof = asyncio.get_running_loop().run_in_executor(None, self._tokens.whole)
        self.changed.set()

    async def prove(self) -> int | None:
        """Hold `ids` of the complete prompt against those of its whole text; of anything else they become these.

        Returns:
            How many of them were right, from the first one on; None where all were.
        """
        assert self._proof is not None  # noqa: S101  made when the prompt was complete
        whole, early = await asyncio.shield(self._proof), self.ids
        self._whole = whole
        if whole == early:
            return None
        pairs = enumerate(zip(early, whole, strict=False))
        return next((at for at, (old, new) in pairs if old != new), min(len(early), len(whole)))

    async def _take_text(self) -> None:
        """Take text that is known, up to the next output."""
        while self._next < len(self._parts):
            part = self._parts[self._next]
            if not isinstance(part, TextPart):
                return
            self._advance()  # first: while a thread takes the last text, `ids` may be all that there will be
            await self._take(part.text, control=part.control)
            self.changed.set()

    async def _take_output(self, agent: int) -> None:
        """Take an output as it grows, until it has ended."""
        stream = self._joined.outputs[agent]
        source = await text_source(self._joined.sources.get(agent), self._codec, self._tokenizers)
        texts: list[str] = []
        async with aclosing(self._follow(stream)) as views:
            async for view in views:
                closed = view.state is LogState.CLOSED
                if view.state is LogState.ABORTED:
                    raise ChainFailed(f"the output in slot {stream.slot} ended incomplete.")
                if view.ids:
                    self._clock.arrived(len(view.ids))
                if len(view.ids) > _INLINE_IDS:
                    text = await asyncio.to_thread(_decoded, source, view.ids, closed)
                else:
                    text = _decoded(source, view.ids, closed)
                await self._take(text, control=False)
                texts.append(text)
                self.stream_tokens += len(view.ids)
                self.changed.set()
        self.texts[agent] = "".join(texts)

    async def _take(self, text: str, *, control: bool) -> None:
        """Tokenize the prompt's next characters."""
        if self._tokens.waiting + len(text) > _INLINE_CHARS:
            await asyncio.to_thread(self._tokens.feed, text, control=control)
        else:
            self._tokens.feed(text, control=control)

    def _follow(self, stream: StreamRef) -> AsyncGenerator[LogView, None]:
        if stream.bell:
            self._subscriber.connect(stream.bell)
        return self._subscriber.follow(stream, 0)

    def _is_over(self, agent: int) -> bool:
        return TokenLogReader(self._slab, self._joined.outputs[agent]).peek()[1].over

    def _advance(self) -> None:
        self._next += 1
        self._clock = TokenClock()


def _decoded(source: TextSource, ids: Sequence[int], closed: bool) -> str:
    return source.feed(ids) + (source.finish() if closed else "")
