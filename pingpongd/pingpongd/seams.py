"""Where outputs enter prompts as text rather than as the ids that were sampled, and what that text is made of. Pure.

============================ =================================================================================
an output is joined as text  where its reader says ``"join": "text"``, it is a step's, others read it stripped,
                             or a model of another tokenizer wrote it
a prompt is joined as text   where one of the outputs that it reads is
============================ =================================================================================

How many tokens a text takes is not known before it is written. At submission it is counted with an estimate
(`most_ids`): what comes out longer runs all the same as far as the engine takes it, and fails with the numbers before
the engine is asked where it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pingpong_bus.chain import Chain
from pingpong_bus.errors import ChainError
from pingpong_bus.messages import OutputSource, PreparedAgent, TokenizerSource
from pingpong_bus.references import expanded_length

MORE_IDS = 1.5
"""Ids that a text is counted with for each id that a model of another tokenizer wrote. Of 400 pieces of English prose
and 400 of Python, of 1,000 characters each, 99 in 100 came to at most 1.48 times as many ids from any to any of the
tokenizers of SmolLM2, SmolLM2 cut to 20,000 ids, Mistral v1 and Tekken. In scripts that one of two was not made for, it
is up to six times."""
CHARACTERS_AN_ID = 2
"""Characters of a step's output that are counted as one id: prose has four, digits and scripts without spaces one."""

Reads = Sequence[Sequence[int]]
"""Per agent, the agents it reads."""


def text_prompts(chain: Chain, reads: Reads, tokenizers: Sequence[str | None]) -> list[int]:
    """The agents whose prompts are joined as text, by index, rising.

    Args:
        chain: validated.
        reads: per agent, the agents it reads.
        tokenizers: per agent, a digest of its model's tokenizer; None where the model has none. Of steps it counts not.

    Raises:
        ChainError: an agent that has to read text cannot.
    """
    found = []
    for index, agent in enumerate(chain.agents):
        why = "a step takes text" if agent.is_step else why_text(chain, index, reads[index], tokenizers)
        if not why:
            continue
        if agent.prompt_ids is not None:
            raise ChainError(
                f"prompt_ids takes ids, and {why}.",
                field=f"agents[{index}].prompt_ids",
                hint="Write it as raw_prompt, or as prompt or messages.",
            )
        if tokenizers[index] is None and not agent.is_step:
            raise ChainError(
                f"its model has no tokenizer, and {why}.",
                field=f"agents[{index}].model",
                hint="Choose a model that has one.",
            )
        for at in reads[index]:
            if not chain.agents[at].is_step and tokenizers[at] is None:
                name = chain.agents[at].name
                raise ChainError(
                    f'the model of "{name}" has no tokenizer, so that what it writes is no text, and {why}.',
                    field=f"agents[{index}]",
                    hint=f'Let a model with a tokenizer run "{name}".',
                )
        if not agent.is_step:
            found.append(index)
    return found


def why_text(chain: Chain, index: int, reads: Sequence[int], tokenizers: Sequence[str | None]) -> str:
    """Why an agent's prompt is joined as text, in a clause; empty where it is not. See `text_prompts`."""
    if not reads:
        return ""
    for at in reads:
        upstream = chain.agents[at]
        if upstream.is_step:
            return f'"{upstream.name}" is a step, whose output is text'
        if upstream.strip is not None:
            return f'what others read of "{upstream.name}" is stripped, which makes it text'
        if tokenizers[at] != tokenizers[index]:
            return f'"{upstream.name}" is written by a model of another tokenizer'
    return 'it asks for "join": "text"' if chain.agents[index].join == "text" else ""


def output_sources(
    chain: Chain,
    index: int,
    reads: Sequence[int],
    tokenizers: Sequence[str | None],
    tokenizer_of: Callable[[int], TokenizerSource],
    prepared: Sequence[PreparedAgent],
) -> dict[int, OutputSource]:
    """How an agent's upstream logs become text, by agent; those that its own worker can just decode are left out.

    Args:
        chain: the chain.
        index: the agent.
        reads: the agents it reads.
        tokenizers: as for `text_prompts`.
        tokenizer_of: where the tokenizer of an agent's model is loaded from.
        prepared: the prompts, per agent: some end inside a block that is to be left out.
    """
    found: dict[int, OutputSource] = {}
    for at in reads:
        upstream = chain.agents[at]
        if upstream.is_step:
            found[at] = OutputSource(characters=True)
            continue
        foreign = tokenizers[at] != tokenizers[index]
        if foreign or upstream.strip is not None:
            inside = prepared[at].thinking if upstream.strip is not None else None
            found[at] = OutputSource(
                tokenizer=tokenizer_of(at) if foreign else None, strip=upstream.strip, inside=inside
            )
    return found


def most_ids(
    chain: Chain, reads: Reads, tokenizers: Sequence[str | None], reader: str | None, inputs: Mapping[str, str]
) -> list[int]:
    """Per agent, with how many ids its output counts in a prompt that is joined as text; an estimate, see above.

    Args:
        chain: validated: agents read earlier ones.
        reads: per agent, the agents it reads.
        tokenizers: as for `text_prompts`.
        reader: the tokenizer of the prompt.
        inputs: values of the chain's inputs.
    """
    lengths = {name: len(value) for name, value in inputs.items()}
    found: list[int] = []
    for at, agent in enumerate(chain.agents):
        if not agent.is_step:
            most = agent.max_tokens if tokenizers[at] == reader else math.ceil(agent.max_tokens * MORE_IDS)
        else:
            most = math.ceil(agent.max_chars / CHARACTERS_AN_ID)
        if agent.extract is not None:
            # What it takes out is hardly longer than what it takes it from.
            taken = math.ceil(expanded_length(agent.input or "", lengths) / CHARACTERS_AN_ID)
            taken += math.ceil(len(agent.extract.otherwise or "") / CHARACTERS_AN_ID)
            most = min(most, taken + sum(found[read] for read in reads[at]))
        found.append(most)
    return found
