"""The chains that are measured: random token ids of a given shape, or the five agents of the examples."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from pingpong_bus.chain import Agent, Chain, parse_chain

VARYING_TOKENS = 16
"""At the end of the first agent's ids: what would differ from request to request, such as a question."""

EXAMPLE = Path(__file__).parents[1] / "examples" / "five_agents.json"


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a chain in which each agent reads its prefix, the whole output of the one before, and its suffix."""

    name: str
    prefix: int
    """Tokens of each agent's own text."""
    output: int
    """Tokens that each agent but the last writes."""
    last_output: int
    agents: int = 5
    suffix: int = 16
    """Tokens after the upstream's output."""


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(name="smoke", prefix=200, output=16, last_output=4),
        Profile(name="cpu", prefix=1000, output=64, last_output=16),
        Profile(name="long-prefill", prefix=2000, output=96, last_output=24),
        Profile(name="gpu-4k", prefix=4096, output=256, last_output=64),
        Profile(name="gpu-12k", prefix=12288, output=256, last_output=64),
    )
}


def ids_chain(profile: Profile, *, seed: int = 0, vocabulary: int = 40_000) -> Chain:
    """A chain of random token ids; needs no tokenizer, and every agent writes exactly its `max_tokens`.

    Args:
        seed: of the ids: the same seed gives the same chain.
        vocabulary: ids are below it, and not below 100, where special tokens usually are.
    """
    draw = random.Random(f"{profile.prefix}:{profile.output}:{seed}")

    def ids(count: int) -> list[int]:
        return [draw.randrange(100, vocabulary) for _ in range(count)]

    agents = []
    for index in range(profile.agents):
        upstream = [f"{{{{agent{index - 1}}}}}"] if index else []
        agents.append(
            Agent(
                name=f"agent{index}",
                prompt_ids=[*ids(profile.prefix), *upstream, *ids(profile.suffix)],
                max_tokens=profile.output if index < profile.agents - 1 else profile.last_output,
                ignore_eos=True,
            )
        )
    return Chain(name=profile.name, agents=agents)


def text_chain(path: Path = EXAMPLE) -> Chain:
    """The chain of a file.

    Raises:
        ChainError: it is not a valid chain.
    """
    return parse_chain(path.read_bytes(), source=str(path))


def with_forced_length(chain: Chain) -> Chain:
    """The chain with nothing that could end an answer before `max_tokens`."""
    return _with_agents(chain, ignore_eos=True, stop=[], stop_token_ids=[])


def with_sampling(chain: Chain, *, temperature: float, seed: int) -> Chain:
    """The chain sampled at `temperature`, each agent from a seed of its own."""
    agents = [
        msgspec.structs.replace(agent, temperature=temperature, seed=seed + index)
        for index, agent in enumerate(chain.agents)
    ]
    return msgspec.structs.replace(chain, agents=agents)


def filling_chain(chain: Chain) -> Chain:
    """What fills prefix caches with the chain's static text and no more: every agent writes one token.

    Ids of the first agent end otherwise; given as text, all of its prompt is static.
    """
    first, *others = _with_agents(with_forced_length(chain), max_tokens=1).agents
    if first.prompt_ids:
        static, varying = first.prompt_ids[:-VARYING_TOKENS], first.prompt_ids[-VARYING_TOKENS:]
        first = msgspec.structs.replace(first, prompt_ids=[*static, *varying[::-1]])
    return msgspec.structs.replace(chain, agents=[first, *others])


def _with_agents(chain: Chain, **changes: object) -> Chain:
    agents = [msgspec.structs.replace(agent, **changes) for agent in chain.agents]
    return msgspec.structs.replace(chain, agents=agents)
