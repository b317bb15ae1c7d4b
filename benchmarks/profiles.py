"""The chains that are measured: random token ids of a given shape, or the five agents of the examples."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import msgspec

from pingpong_bus.chain import Agent, Chain, parse_chain, upstreams

VARYING_TOKENS = 16
"""At the end of the ids of agents that read no other: what would differ from request to request, such as a question."""

EXAMPLE = Path(__file__).parents[1] / "examples" / "five_agents.json"


Shape = Literal["line", "fan-in", "diamond"]
Document = Literal["none", "before", "after"]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a chain in which each agent reads its own text, outputs of earlier ones, and its suffix."""

    name: str
    prefix: int
    """Tokens of each agent's own text, or of the document that all share."""
    output: int
    """Tokens that each agent but the last writes."""
    last_output: int
    agents: int = 5
    suffix: int = 16
    """Tokens after the upstreams' outputs."""
    shape: Shape = "line"
    """Who reads whom. "line": each the one before. "fan-in": the last reads all others, which read nothing.
    "diamond": all but the first and the last read the first, and the last reads them."""
    document: Document = "none"
    """Whether `prefix` is one document, the same for all agents, and stands before or after a role text of each one's
    own. Only before it, what one agent has computed serves the others."""
    role: int = 64
    """Tokens of each agent's role text, where there is a document."""

    def reads(self, index: int) -> list[int]:
        """The agents that one reads."""
        if self.shape == "line" or index == 0:
            return [index - 1] if index else []
        if self.shape == "fan-in":
            return list(range(index)) if index == self.agents - 1 else []
        return list(range(1, index)) or [0] if index == self.agents - 1 else [0]


def described(profile: Profile) -> str:
    """A name that says what the shape is."""
    kind = "" if profile.shape == "line" else f"{profile.shape} of "
    own = {
        "none": f"prefix {profile.prefix}",
        "before": f"document {profile.prefix} before the role",
        "after": f"document {profile.prefix} after the role",
    }[profile.document]
    return f"{kind}{profile.agents} agents, {own}, output {profile.output}"


def reshaped(
    profile: Profile,
    *,
    prefix: int | None = None,
    output: int | None = None,
    agents: int | None = None,
    shape: Shape = "line",
    document: Document = "none",
) -> Profile:
    """The profile with other sizes, named for its shape if that makes it another; None leaves a size as it is.

    Args:
        output: of each agent; the last one writes a quarter of it.
    """
    changed = msgspec.structs.replace(
        profile,
        prefix=prefix or profile.prefix,
        output=output or profile.output,
        last_output=max(1, output // 4) if output else profile.last_output,
        agents=agents or profile.agents,
        shape=shape,
        document=document,
    )
    return profile if changed == profile else msgspec.structs.replace(changed, name=described(changed))


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

    document = ids(profile.prefix) if profile.document != "none" else []
    agents = []
    for index in range(profile.agents):
        if profile.document == "none":
            own = ids(profile.prefix)
        else:
            role = ids(profile.role)
            own = [*document, *role] if profile.document == "before" else [*role, *document]
        read = [f"{{{{agent{upstream}}}}}" for upstream in profile.reads(index)]
        agents.append(
            Agent(
                name=f"agent{index}",
                prompt_ids=[*own, *read, *ids(profile.suffix)],
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

    Ids of agents that read no other end otherwise; given as text, all of such a prompt is static.
    """
    filling = _with_agents(with_forced_length(chain), max_tokens=1)
    agents = [agent if upstreams(chain, at) else _asked_otherwise(agent) for at, agent in enumerate(filling.agents)]
    return msgspec.structs.replace(filling, agents=agents)


def _asked_otherwise(agent: Agent) -> Agent:
    """The agent with the varying end of its ids turned round."""
    if not agent.prompt_ids:
        return agent
    static, varying = agent.prompt_ids[:-VARYING_TOKENS], agent.prompt_ids[-VARYING_TOKENS:]
    return msgspec.structs.replace(agent, prompt_ids=[*static, *varying[::-1]])


def _with_agents(chain: Chain, **changes: object) -> Chain:
    agents = [msgspec.structs.replace(agent, **changes) for agent in chain.agents]
    return msgspec.structs.replace(chain, agents=agents)
