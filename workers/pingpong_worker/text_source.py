"""From the ids of an upstream's log to the text that a joined prompt holds of it, whoever wrote them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pingpong_bus.errors import ChainFailed, ConfigError
from pingpong_bus.messages import OutputSource, TokenizerSource
from pingpong_bus.think_blocks import ThinkFilter
from pingpong_worker.text import DecodeStream, TextCodec

LoadCodec = Callable[[TokenizerSource], TextCodec]
"""Loads a tokenizer; called in a thread. May raise ConfigError."""
_SURROGATES = range(0xD800, 0xE000)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenizerShelf:
    """The tokenizers of other models, each loaded once, off the event loop.

    Args:
        load: loads one.
    """

    def __init__(self, load: LoadCodec) -> None:
        self._load = load
        self._loading: dict[TokenizerSource, asyncio.Future[TextCodec]] = {}

    async def get(self, source: TokenizerSource) -> TextCodec:
        """The tokenizer; seconds the first time.

        Raises:
            ConfigError: it cannot be loaded. It is tried again the next time.
        """
        loading = self._loading.get(source)
        if loading is None:
            # Not a task of whoever asks first: that may be cancelled while others wait.
            loading = asyncio.get_running_loop().run_in_executor(None, self._load, source)
            self._loading[source] = loading
            loading.add_done_callback(lambda done: self._loaded(source, done))
        return await asyncio.shield(loading)

    def _loaded(self, source: TokenizerSource, done: asyncio.Future[TextCodec]) -> None:
        if done.cancelled() or done.exception() is not None:
            del self._loading[source]


def no_other_tokenizers(source: TokenizerSource) -> TextCodec:
    """The `LoadCodec` of a worker that was given none."""
    raise ConfigError(
        f'the tokenizer of "{source.model}" is not at hand here.', field="models", hint="This is a fault of the daemon."
    )


class TextSource:
    """The text of one log.

    Args:
        source: how its ids become text.
        codec: of the tokenizer that wrote them; None where they are characters.
    """

    def __init__(self, source: OutputSource, codec: TextCodec | None) -> None:
        self._stream = _Characters() if codec is None else codec.decode_stream()
        self._blocks = None if source.strip is None else ThinkFilter(inside=source.inside)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that the log's next ids add; characters that are not whole yet, and what may be part of a block,
        are held back.

        Raises:
            ChainFailed: an id of a step's log is no character.
        """
        # One by one: what a decoder with byte fallback makes of broken characters hangs on how ids come together.
        text = "".join(self._stream.step((token,)) for token in ids)
        return text if self._blocks is None else self._blocks.feed(text)

    def finish(self) -> str:
        """The log is closed: what was held back."""
        text = self._stream.finish()
        return text if self._blocks is None else self._blocks.feed(text) + self._blocks.finish()


class _Characters(DecodeStream):
    """Of a step's log, whose "ids" are code points."""

    @property
    def pending(self) -> bool:
        return False

    def step(self, ids: Sequence[int]) -> str:
        try:
            # Halves of pairs, which JSON can spell, have no UTF-8, and tokenizers take none.
            return "".join(_REPLACEMENT if token in _SURROGATES else chr(token) for token in ids)
        except (ValueError, OverflowError):
            raise ChainFailed(
                "a step's log holds what is no character.", hint="This is a fault of the daemon."
            ) from None

    def finish(self) -> str:
        return ""


async def text_source(source: OutputSource | None, codec: TextCodec, tokenizers: TokenizerShelf) -> TextSource:
    """What makes text of a log.

    Args:
        source: how; None: by the reader's own tokenizer, and all of it.
        codec: the reader's.
        tokenizers: of other models.

    Raises:
        ConfigError: the tokenizer that wrote it cannot be loaded.
    """
    how = source or OutputSource()
    if how.characters:
        return TextSource(how, None)
    return TextSource(how, codec if how.tokenizer is None else await tokenizers.get(how.tokenizer))
