"""Work that a chain's devices did and that did not count, or had been done before. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pingpong_bus.messages import AgentResult, ChainResult
from pingpong_client.timeline_spans import HopSpans, Span, kept_from


class Wasted(msgspec.Struct, frozen=True):
    """Work that was done and did not count, or was done before."""

    prompt_tokens: int = 0
    """Computed again by a later hop of the agent, where the caches did not hold them."""
    resumed_tokens: int = 0
    """Output tokens that a later hop computed again, to go on behind them."""
    again_ms: float = 0.0
    """What appends and prefills of later hops took for both."""
    output_tokens: int = 0
    """Written and void, for the agent began anew."""
    output_ms: float = 0.0
    tail_tokens: int = 0
    """Read ahead, and computed again with the rest of the prompt: a prefix cache holds whole blocks only, and nothing
    of an append that was not through."""
    overtaken: int = 0
    """Appends that were not through when the prompt was complete."""
    overtaken_tokens: int = 0
    replayed_tokens: int = 0
    """Decoded again to come to the same bits."""
    rollbacks: int = 0
    """Times that ids of a joined text had been computed and turned out otherwise."""
    rollback_tokens: int = 0
    """Ids that were computed in vain by them."""

    @property
    def nothing(self) -> bool:
        """Whether there was none."""
        return self == Wasted()


def wasted(result: ChainResult, agent: AgentResult, hops: Sequence[HopSpans]) -> Wasted:
    """What an agent's hops did in vain.

    Args:
        result: the chain.
        agent: of it.
        hops: the agent's, in order.
    """
    entries = [hop.entry for hop in hops]
    kept, had, again = kept_from(entries), 0, 0
    for hop in hops:
        entry = hop.entry
        if hop.number and entry.first_token_ms is not None:
            again += max(0, min(had, entry.prompt_tokens) - entry.cached_tokens)
        had = max([had, *(span.sent for span in hop.spans if not span.overtaken)])
    spans = [span for hop in hops for span in hop.spans]
    overtaken = [span for span in spans if span.overtaken]
    void = [span for hop in hops[:kept] for span in hop.spans if span.kind == "decode"]  # a step's are characters
    replays = result.exactness != "fast"
    before = sum(entry.tokens_before for entry in entries if entry.first_token_ms is not None)
    return Wasted(
        prompt_tokens=again,
        resumed_tokens=0 if replays else before,
        again_ms=_ms([span for span in spans if span.again and span.kind != "decode"]),
        output_tokens=sum(span.tokens for span in void),
        output_ms=_ms(void),
        tail_tokens=sum(_tail(agent, hop) for hop in hops),
        overtaken=len(overtaken),
        overtaken_tokens=sum(span.tokens for span in overtaken),
        replayed_tokens=before if replays else 0,
        rollbacks=agent.seam.rollbacks if agent.seam is not None else 0,
        rollback_tokens=agent.seam.tokens if agent.seam is not None else 0,
    )


def _tail(agent: AgentResult, hop: HopSpans) -> int:
    """Tokens of a hop's appends that its prefill computed again."""
    entry = hop.entry
    # A streaming-input session keeps what it has computed, and says nothing of a cache.
    if entry.first_token_ms is None or agent.session == "streaming-input" or not entry.final_tokens:
        return 0
    return max(0, entry.prompt_tokens - entry.final_tokens - entry.cached_tokens)


def _ms(spans: Sequence[Span]) -> float:
    return sum(span.end_ms - span.start_ms for span in spans)


def total(parts: Sequence[Wasted]) -> Wasted:
    """What several agents wasted together."""
    names = Wasted.__struct_fields__
    return Wasted(**{name: sum(getattr(part, name) for part in parts) for name in names})
