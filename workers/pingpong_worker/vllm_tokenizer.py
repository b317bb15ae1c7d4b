"""Which tokenizer an engine's model has, and which ids end its answers."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
    """Where an engine's tokenizer comes from: the model's own, or what raw arguments name."""

    name: str
    """A folder, or a Hugging Face name."""
    revision: str | None
    trust_remote_code: bool


def tokenizer_source(model_config: Any) -> TokenizerSource:
    """The tokenizer of a `ModelConfig` of vLLM."""
    return TokenizerSource(
        str(model_config.tokenizer), model_config.tokenizer_revision, bool(model_config.trust_remote_code)
    )


def end_ids_of(model_config: Any, source: TokenizerSource) -> tuple[frozenset[int], bool]:
    """The model's end-of-sequence ids, from all places that name them, and whether it has a tokenizer."""
    from transformers import AutoTokenizer

    found: set[int] = set()
    for value in (
        model_config.try_get_generation_config().get("eos_token_id"),
        getattr(model_config.hf_text_config, "eos_token_id", None),
    ):
        found.update([value] if isinstance(value, int) else value or ())
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError):  # a model for prompts given as ids only
        return frozenset(found), False
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found), True
