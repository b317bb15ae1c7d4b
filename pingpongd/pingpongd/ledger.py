"""What the open hops of a device group may come to hold in its engine. Pure.

A growing prompt pins memory that its upstream may still need, and an engine that runs out of it under paused sessions
never recovers. So a hop's *full length* is set aside before it opens: its prompt with all that it reads and all that
it may write, in whole blocks of the KV cache, and one of the engine's sequences. Both kinds of session count the same.

No chain can then wait for itself, or for another that waits for it: a hop opens only when every hop that it reads is
open too, or has finished, so whatever holds memory waits for nothing but hops that run; these end and give theirs
back. Where a hop is interrupted and cannot open again at once, that no longer holds, until the hops that read it and
have written nothing give theirs back as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pingpong_bus.chain import Chain
from pingpong_bus.messages import EngineLimits, Literals, PreparedAgent


class GroupLedger:
    """Keeps account of one engine's KV cache and sequences; anew for each engine."""

    def __init__(self, limits: EngineLimits) -> None:
        """Args:
        limits: of the engine; `kv_tokens`, `block_size` and `max_num_seqs` count.
        """
        self._block_size = limits.block_size
        self._blocks = limits.kv_tokens // limits.block_size
        self._seqs = limits.max_num_seqs
        self._used = 0
        self._held: dict[str, int] = {}

    def fits(self, tokens: int) -> bool:
        """Whether one more hop of this full length fits now.

        Args:
            tokens: most tokens of its prompt and output together; see `hop_tokens`.
        """
        return len(self._held) < self._seqs and self._used + self._blocks_of(tokens) <= self._blocks

    def ever_fits(self, tokens: int) -> bool:
        """Whether a hop of this full length fits when it is alone."""
        return self._seqs >= 1 and self._blocks_of(tokens) <= self._blocks

    def take(self, hop: str, tokens: int) -> bool:
        """Set a hop's full length aside; False, and nothing done, where it does not fit.

        Raises:
            ValueError: it holds memory already.
        """
        if hop in self._held:
            raise ValueError(f"hop {hop} holds memory already")
        if not self.fits(tokens):
            return False
        self._held[hop] = self._blocks_of(tokens)
        self._used += self._held[hop]
        return True

    def recount(self, hop: str, tokens: int) -> None:
        """Count a hop anew whose full length is known now; it may be more than fits. Harmless where it holds nothing.

        Args:
            hop: that holds memory.
            tokens: its prompt and the most that it may write.
        """
        if hop in self._held:
            self._used += self._blocks_of(tokens) - self._held[hop]
            self._held[hop] = self._blocks_of(tokens)

    def give_back(self, hop: str) -> None:
        """Free what a hop held; harmless where it holds nothing."""
        self._used -= self._held.pop(hop, 0)

    @property
    def held_tokens(self) -> int:
        """Tokens of the whole blocks that are set aside."""
        return self._used * self._block_size

    @property
    def free_tokens(self) -> int:
        """Tokens of the whole blocks that nobody holds."""
        return (self._blocks - self._used) * self._block_size

    @property
    def free_seqs(self) -> int:
        """Hops that could still open, were they short enough."""
        return self._seqs - len(self._held)

    @property
    def held(self) -> Mapping[str, int]:
        """Tokens of whole blocks, by the hop that holds them."""
        return MappingProxyType({hop: blocks * self._block_size for hop, blocks in self._held.items()})

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def hop_tokens(chain: Chain, prepared: Sequence[PreparedAgent], index: int, written: Mapping[int, int]) -> int:
    """Full length of an agent's hop: the most tokens that its prompt and output can come to.

    Args:
        chain: the chain.
        prepared: its tokenized prompts, per agent.
        index: of the agent.
        written: output tokens of the agents that have finished, by index; others count with their `max_tokens`.
    """
    total = chain.agents[index].max_tokens
    for segment in prepared[index].segments:
        if isinstance(segment, Literals):
            total += len(segment.ids)
        else:
            total += read_tokens(chain, prepared[index], segment.agent, written.get(segment.agent))
    return total


def read_tokens(chain: Chain, prompt: PreparedAgent, upstream: int, written: int | None = None) -> int:
    """The most tokens that an upstream's output takes in a prompt.

    Args:
        chain: the chain.
        prompt: of the agent that reads it.
        upstream: whose output it is.
        written: how long the output's log has become; None where it is not over.
    """
    most = chain.agents[upstream].most
    counted = prompt.counts.get(upstream, most)
    if written is None or most == counted:
        return counted if written is None else written
    return -(-written * counted // most)
