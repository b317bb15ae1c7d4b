"""What a chain was, seen from its end: how much was written, how guesses and steps went, whether it ran as planned."""

from __future__ import annotations

import msgspec

from pingpongd.chain_record import ChainRecord
from pingpongd.habits import pace
from pingpongd.shapes import CHARACTERS_PER_TOKEN, ChainShape


def written_tokens(record: ChainRecord) -> tuple[int, ...]:
    """The tokens that each agent has written; of a step, about what its reader finds."""
    return tuple(
        -(-len(agent.output_ids) // CHARACTERS_PER_TOKEN) if record.shape.is_step(at) else len(agent.output_ids)
        for at, agent in enumerate(record.agents)
    )


def step_ms(record: ChainRecord, index: int) -> float:
    """What a step has taken; in series it may have waited for agents that it does not read."""
    agent = record.agents[index]
    began_ns = agent.entries[-1].started_ns if agent.entries else record.ready_ns(index)
    return max(0.0, (agent.last_token_ns - began_ns) / 1e6)


def as_it_went(record: ChainRecord) -> ChainShape:
    """A finished chain's shape with what nobody could know before."""
    shape = record.shape
    paces = tuple((1.0, 1.0) if agent.drafts is None else pace(agent.drafts) for agent in record.agents)
    steps = tuple(step_ms(record, at) if shape.is_step(at) else None for at in range(len(record.agents)))
    return msgspec.structs.replace(
        shape,
        outputs=written_tokens(record),
        paces=paces if any(one != (1.0, 1.0) for one in paces) else (),
        steps=steps if shape.steps else (),
        unknown_steps=(),
    )


def expected_tokens(record: ChainRecord) -> tuple[int, ...]:
    """What each agent has written, of those that have ended, or may write."""
    return tuple(
        written if agent.finish_reason is not None else expected
        for agent, written, expected in zip(record.agents, written_tokens(record), record.shape.outputs, strict=True)
    )


def ran_as_planned(record: ChainRecord) -> bool:
    """Whether a chain that has finished ran as it was predicted to: nothing was lost, moved or began anew."""
    assert record.plan is not None  # noqa: S101 - it ran
    clean = all(
        agent.hops == 1 and not agent.resumed and not agent.losses and agent.worker == group
        for at, (agent, group) in enumerate(zip(record.agents, record.plan.groups, strict=True))
        if not record.shape.is_step(at)
    )
    return clean and not record.recovered and not record.state.moved


def ran_rerouted(record: ChainRecord) -> bool:
    """Whether it ran as planned but for what was done about groups whose tokens came late."""
    clean = all(hop.state in ("moved", "finished") for agent in record.agents for hop in agent.entries)
    return clean and record.rerouted and not record.recovered
