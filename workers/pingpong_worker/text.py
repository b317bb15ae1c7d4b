"""Tokens to text as they come, and the end of an answer at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DecodeStream(Protocol):
    """Decodes one answer, piece by piece; special tokens give no text."""

    @property
    def pending(self) -> bool:
        """True while the last tokens may be part of a character that is not complete yet: their text is held back."""
        ...

    def step(self, ids: Sequence[int]) -> str:
        """The text that these further ids add."""
        ...

    def finish(self) -> str:
        """What was held back; the stream ends with it."""
        ...


class TextCodec(Protocol):
    """The two directions between text and ids."""

    def decode_stream(self) -> DecodeStream:
        """A stream for one answer, from its first token on."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text inside a prompt: no control tokens, whatever it says, and no BOS."""
        ...
