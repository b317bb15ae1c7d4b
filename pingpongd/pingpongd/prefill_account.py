"""What of an agent's prefill was hidden behind others' decoding, and what was waited for. Pure."""

from __future__ import annotations

import msgspec

from pingpong_bus.messages import AgentResult


class PrefillTimes(msgspec.Struct, frozen=True):
    """Of one finished agent."""

    reads: bool
    """Whether it had to wait for an agent that it reads from."""
    hidden_ms: float
    """Its appends, as far as they were computed while an upstream still wrote; where two overlap it counts once."""
    exposed_ms: float
    """From the moment at which it ran and nothing but its own work was left, to its first token: its TTFT, less what it
    waited for a group."""
    ahead_tokens: int
    """Prompt tokens that were computed before the prompt was complete."""


def prefill_times(agent: AgentResult) -> PrefillTimes:
    """Split an agent's prefill; all zero for one without a first token."""
    if agent.first_token_ms is None or agent.ttft_ms is None:
        return PrefillTimes(False, 0.0, 0.0, 0)
    ready_ms = agent.first_token_ms - agent.ttft_ms
    hidden_ms, upto_ms, ahead = 0.0, 0.0, 0
    for append in sorted(agent.appends, key=lambda it: it.at_ms):
        ends_ms = append.done_ms if append.done_ms is not None else agent.finalized_ms
        if ends_ms is None:
            continue
        begins_ms, ends_ms = max(append.at_ms, upto_ms), min(ends_ms, ready_ms)
        hidden_ms += max(0.0, ends_ms - begins_ms)
        upto_ms = max(upto_ms, ends_ms)
        if append.done_ms is not None:
            ahead = max(ahead, append.sent)
    return PrefillTimes(
        reads=ready_ms > 0,
        hidden_ms=hidden_ms,
        exposed_ms=max(0.0, agent.first_token_ms - max(ready_ms, _began_ms(agent))),
        ahead_tokens=min(ahead, agent.prompt_tokens),
    )


def _began_ms(agent: AgentResult) -> float:
    """When the hop began that gave the first token."""
    for hop in agent.hops:
        if hop.first_token_ms is not None:
            return hop.started_ms
    return agent.opened_ms or 0.0
