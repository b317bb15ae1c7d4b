"""The tokenizer of a model that another worker runs: to read what that model wrote."""

from __future__ import annotations

from typing import Any

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import TokenizerSource
from pingpong_worker.text import DecodeStream, WindowDecodeStream


class OutputDecoder:
    """A `TextCodec` of a Hugging Face tokenizer.

    Args:
        tokenizer: of the `tokenizers` library.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._silent = frozenset(token for token, entry in added.items() if entry.special)

    @classmethod
    def load(cls, source: TokenizerSource) -> OutputDecoder:
        """Load a tokenizer; takes seconds.

        Raises:
            ConfigError: there is none, or none that can be used.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                source.model, revision=source.revision, trust_remote_code=source.trust_remote_code
            )
        except (OSError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise ConfigError(
                f'the tokenizer of "{source.model}", which wrote what is read here, cannot be loaded: {first_line}',
                field="models",
                hint="Its files must be readable by the workers of all models.",
            ) from error
        if not tokenizer.is_fast:
            raise ConfigError(
                f'"{source.model}" has no fast tokenizer (tokenizer.json).',
                field="models",
                hint="Choose a model that has one.",
            )
        return cls(tokenizer.backend_tokenizer)

    def decode_stream(self) -> DecodeStream:
        """See `TextCodec`."""
        return WindowDecodeStream(self._decode, self._silent)

    def encode_text(self, text: str) -> list[int]:
        """See `TextCodec`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
