"""Which tokenizer an engine's model has, and which ids end its answers."""

from __future__ import annotations

from typing import Any

from pingpong_bus.messages import TokenizerSource
from pingpong_worker.prompt_tokenizer import tokenizer_digest


def tokenizer_source(model_config: Any) -> TokenizerSource:
    """The tokenizer of a `ModelConfig` of vLLM: the model's own, or what raw arguments name."""
    return TokenizerSource(
        str(model_config.tokenizer), model_config.tokenizer_revision, bool(model_config.trust_remote_code)
    )


def end_ids_of(model_config: Any, source: TokenizerSource) -> tuple[frozenset[int], str | None]:
    """The model's end-of-sequence ids, from all places that name them, and a digest of its tokenizer.

    The digest is None where the model has none that can be loaded, and empty where it has one of a slow kind.
    """
    from transformers import AutoTokenizer

    found: set[int] = set()
    for value in (
        model_config.try_get_generation_config().get("eos_token_id"),
        getattr(model_config.hf_text_config, "eos_token_id", None),
    ):
        found.update([value] if isinstance(value, int) else value or ())
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.model, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError):  # a model for prompts given as ids only
        return frozenset(found), None
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found), tokenizer_digest(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else ""
