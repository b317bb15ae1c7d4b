"""Chains whose shape and tokens are drawn at random from a seed, for tests of exactness. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.errors import UsageError

SUFFIX_TOKENS = (4, 32)
"""Tokens after the upstreams' outputs, from and to."""
_SPECIAL_IDS = 100
"""Below it special tokens usually are."""


class Range(msgspec.Struct, frozen=True):
    """Whole numbers from `least` to `most`, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read "50:3000", or one number.

        Raises:
            UsageError: it is neither, or not in order.
        """
        first, _, last = text.partition(":")
        try:
            found = cls(int(first), int(last or first))
        except ValueError:
            raise UsageError(f"{text!r} is no range such as 50:3000, and no number.") from None
        if not 1 <= found.least <= found.most:
            raise UsageError(f"{text!r} is no range: 1 ≤ first ≤ last.")
        return found

    def draw(self, source: random.Random) -> int:
        """One of its numbers, each as likely."""
        return source.randint(self.least, self.most)


class ChainShape(msgspec.Struct, frozen=True, kw_only=True):
    """What chains are drawn from."""

    agents: Range = Range(2, 4)
    prefix: Range = Range(50, 3000)
    """Tokens of each agent's own text."""
    output: Range = Range(16, 200)
    """Tokens that each agent writes."""
    last_output: Range | None = None
    """Of the last agent; None: as the others."""
    fan_in: float = 0.3
    """How likely an agent is to read one more than the agent before, where there is another."""


def random_chain(shape: ChainShape, index: int, *, seed: int = 0, pool: Sequence[int]) -> Chain:
    """The chain of number `index`: the same for the same shape, seed and pool.

    An agent's prompt is its prefix, the outputs of those that it reads, and a suffix. Every agent writes exactly its
    `max_tokens`.

    Args:
        pool: prefixes and suffixes are stretches of these ids, begun anywhere and wrapped round.
    """
    draw = random.Random(f"{seed}:{index}")

    def stretch(count: int) -> list[int]:
        start = draw.randrange(len(pool))
        return [pool[(start + at) % len(pool)] for at in range(count)]

    count = shape.agents.draw(draw)
    agents = []
    for at in range(count):
        output = shape.last_output if shape.last_output is not None and at == count - 1 else shape.output
        agents.append(
            Agent(
                name=f"agent{at}",
                prompt_ids=[
                    *stretch(shape.prefix.draw(draw)),
                    *(f"{{{{agent{upstream}}}}}" for upstream in _reads(draw, at, shape.fan_in)),
                    *stretch(draw.randint(*SUFFIX_TOKENS)),
                ],
                max_tokens=output.draw(draw),
                ignore_eos=True,
            )
        )
    return Chain(name=f"random-{seed}-{index}", agents=agents)


def _reads(draw: random.Random, at: int, fan_in: float) -> list[int]:
    """The agents that agent number `at` reads, the one before last: the others have ended by then."""
    if at == 0:
        return []
    another = [draw.randrange(at - 1)] if at > 1 and draw.random() < fan_in else []
    return [*another, at - 1]


def random_pool(vocabulary: int, *, seed: int = 0, count: int = 65_536) -> list[int]:
    """Ids drawn at random, for models without a tokenizer.

    Args:
        vocabulary: ids are below it.
    """
    draw = random.Random(f"pool:{seed}")
    return [draw.randrange(min(_SPECIAL_IDS, vocabulary - 1), vocabulary) for _ in range(count)]
