"""Whether a chain can run at all, and whether it may wait. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.errors import ChainError, Overloaded
from pingpong_bus.messages import EngineLimits, Literals, PreparedAgent
from pingpongd.ledger import read_tokens

_NAMED = 2
"""Of the outputs that an agent reads, so many are named where they are too long."""


class Room(msgspec.Struct, frozen=True):
    """What the daemon has for chains."""

    slots_total: int
    slot_tokens: int
    max_queued: int


def check_fits(
    chain: Chain, prepared: Sequence[PreparedAgent], limits: Sequence[Sequence[EngineLimits]], room: Room
) -> None:
    """Refuse a chain that can never run, with the numbers.

    Args:
        chain: the chain.
        prepared: its tokenized prompts, per agent.
        limits: per agent, of the engines it may be placed on; the tightest counts. Of a step, none.
        room: of the daemon.

    Raises:
        ChainError: naming the agent and the field.
    """
    if len(chain.agents) > room.slots_total:
        raise ChainError(
            f"the chain has {len(chain.agents)} agents and the daemon has {room.slots_total} token logs.",
            field="agents",
            hint="Split the chain, or raise `slots` in the configuration.",
        )
    for index, (agent, prompt) in enumerate(zip(chain.agents, prepared, strict=True)):
        if agent.most > room.slot_tokens:
            field = _most_field(agent)
            raise ChainError(
                f"{field} is {agent.most} and a token log holds {room.slot_tokens}.",
                field=f"agents[{index}].{field}",
                hint=f"Lower {field}, or raise `slot_tokens` in the configuration.",
            )
        if agent.is_step:
            continue
        literal, _ = prompt_bounds(chain, prompt)
        for limit in limits[index]:
            _check_engine(index, agent, literal, _read(chain, prompt), limit)


def _read(chain: Chain, prompt: PreparedAgent) -> list[tuple[Agent, int]]:
    """Whose outputs an agent reads, with the most tokens that each takes, the longest first."""
    found: Counter[int] = Counter()
    for segment in prompt.segments:
        if not isinstance(segment, Literals):
            found[segment.agent] += read_tokens(chain, prompt, segment.agent)
    return [(chain.agents[upstream], tokens) for upstream, tokens in found.most_common()]


def _check_engine(
    index: int, agent: Agent, literal: int, reads: Sequence[tuple[Agent, int]], limit: EngineLimits
) -> None:
    """Refuse an agent that is too long for an engine, and blame what makes it so."""
    upstream = sum(tokens for _, tokens in reads)
    kv_tokens = limit.kv_tokens // limit.block_size * limit.block_size  # a sequence holds whole blocks
    total = literal + upstream + agent.max_tokens
    if total <= min(limit.max_model_len, kv_tokens):
        return
    if limit.max_model_len <= kv_tokens:
        most, holder, more = (
            limit.max_model_len,
            "the engine takes",
            "raise `max_model_len` (in `[vllm]`, or in `vllm` of its model or group)",
        )
    else:
        most = kv_tokens
        holder = "the engine's KV cache holds"
        more = "give the KV cache more memory"
    read = f" + up to {upstream} read from {_named(reads)}" if upstream else ""
    needs = (
        f'agent "{agent.name}" needs up to {total} tokens ({literal} of prompt{read} + {agent.max_tokens} '
        f"max_tokens) and {holder} {most}."
    )
    # One token has to be left to write.
    if literal >= most:
        field, hint = _prompt_field(agent), f"Shorten the prompt, or {more}."
    elif literal + upstream >= most:
        lower = " and ".join(f'{_most_field(one)} of "{one.name}"' for one, _ in reads[:_NAMED])
        field, hint = _prompt_field(agent), f"Lower {lower}, shorten the prompt, or {more}."
    else:
        field, hint = "max_tokens", f"Lower max_tokens, shorten the prompt or the outputs it reads, or {more}."
    raise ChainError(needs, field=f"agents[{index}].{field}", hint=hint)


def _named(reads: Sequence[tuple[Agent, int]]) -> str:
    """What is read, by name."""
    shown = [f'{"step" if one.is_step else "agent"} "{one.name}"' for one, _ in reads[:_NAMED]]
    return " and ".join([*shown, *([f"{len(reads) - _NAMED} others"] if len(reads) > _NAMED else [])])


def _most_field(agent: Agent) -> str:
    """The field that bounds what an agent or a step writes."""
    return "max_chars" if agent.is_step else "max_tokens"


def _prompt_field(agent: Agent) -> str:
    """The field that holds the agent's prompt."""
    kinds = ("messages", "raw_prompt", "prompt_ids")
    return next((kind for kind in kinds if getattr(agent, kind) is not None), "prompt")


def prompt_bounds(chain: Chain, prompt: PreparedAgent) -> tuple[int, int]:
    """(literal tokens, most tokens read from upstreams) of a prompt."""
    literal = upstream = 0
    for segment in prompt.segments:
        if isinstance(segment, Literals):
            literal += len(segment.ids)
        else:
            upstream += read_tokens(chain, prompt, segment.agent)
    return literal, upstream


def check_queue(queued: int, room: Room) -> None:
    """Refuse a chain where too many wait already.

    Raises:
        Overloaded: with the number.
    """
    if queued >= room.max_queued:
        raise Overloaded(f"{queued} chains are waiting already.", hint="Submit again later, or raise `max_queued`.")
