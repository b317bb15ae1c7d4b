"""Whether tokens of agents are guessed, and why not where somebody asks for it. Pure.

The first that says something counts: the agent, the chain, the submission, the daemon's `[speculation]`. What a guess
may change is the shape of a step, so exactness "grid" rules it out: asked for together they are refused, and a chain
at "grid" that does not ask runs without. Agents that sample are not guessed for: the daemon promises that a seed draws
the same tokens again, and how many draws a step takes hangs on what was guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pingpong_bus.chain import Agent, Chain, Exactness
from pingpong_bus.errors import ChainError, UsageError
from pingpong_bus.messages import EngineLimits, SubmitOptions


def asks(agent: Agent, chain: Chain, options: SubmitOptions) -> bool | None:
    """What is said of an agent; None where nobody says anything."""
    said = (agent.speculate, chain.speculate, options.speculate)
    return next((one for one in said if one is not None), None)


def speculates(chain: Chain, index: int, options: SubmitOptions, level: Exactness, *, enabled: bool) -> bool:
    """Whether an agent's tokens are to be guessed, where its engine can.

    Args:
        chain: its chain.
        index: the agent.
        options: of the submission.
        level: of exactness that the chain is kept at.
        enabled: what holds where nobody says anything.
    """
    agent = chain.agents[index]
    if agent.is_step or agent.temperature > 0 or level == "grid":
        return False
    said = asks(agent, chain, options)
    # Streaming-input sessions cannot: who names one gets it, unless guessing is asked for as well.
    return (enabled and options.session != "streaming-input") if said is None else said


def check_speculation(
    chain: Chain, options: SubmitOptions, level: Exactness, engines: Mapping[str, Sequence[tuple[str, EngineLimits]]]
) -> None:
    """Refuse what is asked for and cannot be.

    Args:
        chain: the chain.
        options: of its submission.
        level: of exactness that it is to be kept at.
        engines: by model, "" for the default one, the groups that may run it with their engines' limits.

    Raises:
        ChainError: tokens are to be guessed at exactness "grid", or of an agent that samples and asks for it itself, or
            by engines none of which can; and the chain says so.
        UsageError: the same, where the submission alone says so.
    """
    for index, agent in enumerate(chain.agents):
        if agent.is_step or not asks(agent, chain, options):
            continue
        field = f"agents[{index}].speculate" if agent.speculate else "speculate"
        fault = UsageError if agent.speculate is None and chain.speculate is None else ChainError
        if agent.temperature > 0:
            if not agent.speculate:
                continue  # it is not what the chain or the submission is after
            raise fault(
                f'tokens of agent "{agent.name}" cannot be guessed: it samples, and a seed would not draw the same '
                "tokens again.",
                field=field,
                hint="Leave speculate out, or set temperature 0.",
            )
        if level == "grid":
            raise fault(
                'exactness "grid" cannot be kept: a step that checks guessed tokens has another shape than one that '
                f'gives a single token, and for agent "{agent.name}" guessing is asked for.',
                field=field,
                hint='Leave speculate out, or take exactness "fast".',
            )
        able = engines.get(agent.model or "", ())
        if not able or any(limits.speculation for _, limits in able):
            continue
        group, limits = able[0]
        why = limits.speculation_refusal.rstrip(".")
        enable = "" if why else ", or set `[speculation] enabled = true` in the daemon's configuration"
        raise fault(
            f'tokens of agent "{agent.name}" are to be guessed, and the engine of group "{group}" does not guess: '
            f"{why or '`[speculation] enabled` is not set'}.",
            field=field,
            hint=f"Leave speculate out{enable}.",
        )
