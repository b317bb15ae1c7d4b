"""Prompts: from a chain's texts to token ids, cut where outputs of earlier agents belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pingpong_bus.chain import Chain
from pingpong_bus.messages import JoinedPrompt, PreparedAgent
from pingpong_worker.text import TextCodec


class PromptCodec(TextCodec, Protocol):
    """What a worker asks of a model's tokenizer and chat template."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer of this model."""
        ...

    def prepare(self, chain: Chain, inputs: dict[str, str], limits_vocabulary: int) -> list[PreparedAgent]:
        """Render and tokenize the prompts of all agents.

        Args:
            chain: validated.
            inputs: a value for each of the chain's inputs.
            limits_vocabulary: the engine takes ids below it.

        Raises:
            ChainError: naming the field that cannot be made a prompt.
        """
        ...

    def join(self, joined: JoinedPrompt, outputs: Mapping[int, Sequence[int]]) -> list[int]:
        """The ids of a prompt tokenized as one text.

        Args:
            joined: the prompt.
            outputs: the whole output of every agent it reads, by index in the chain.

        Raises:
            ChainError: the template refuses these texts.
        """
        ...
