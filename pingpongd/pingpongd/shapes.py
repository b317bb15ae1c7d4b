"""What placement looks at: a chain and the groups, boiled down to lengths, digests and figures. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from pingpong_bus.chain import Chain
from pingpong_bus.messages import EngineFigures, Literals, OutputOf, PreparedAgent, SubmitOptions

RUNG_TOKENS = 64
"""Prefixes are told apart at multiples of this: what two prompts share is known to within so many tokens. A whole
number of KV blocks of every engine that is supported."""
APPEND_TOKENS = 32
"""Of an upstream's output, what is typically left to finalize: the last append that did not come together."""

Part = int | OutputOf
"""Literal tokens, by their number, or the output of an earlier agent."""


class GroupView(msgspec.Struct, frozen=True):
    """A group as placement sees it."""

    name: str
    hops: int
    """Hops that it runs now, and that wait for it."""
    held: frozenset[str] = frozenset()
    """Digests of the prefixes that its prefix cache holds; see `ChainShape.rungs`."""
    overlap: bool = False
    """Whether its engine holds appends to a budget beside decodes, so that agents may overlap on it."""
    figures: EngineFigures | None = None
    """What its engine was measured to take; None where it was not measured."""
    paced: bool = True
    """Whether its scheduler is ours; else stock vLLM holds appends to a number of tokens a step, where `overlap`."""


class ChainShape(msgspec.Struct, frozen=True):
    """A chain as placement sees it. The fields with defaults are what predictions are made from."""

    upstreams: tuple[tuple[int, ...], ...]
    """Per agent, the agents it reads."""
    prefixes: tuple[tuple[str, int], ...]
    """Per agent, digest and length in tokens of the literal ids its prompt begins with; on a grid of their whole cells,
    for only these are computed ahead and cached."""
    rungs: tuple[tuple[tuple[str, int], ...], ...] = ()
    """Per agent, digest and length of every `RUNG_TOKENS` of that prefix, and of the whole prefix at last."""
    shared: tuple[tuple[int, ...], ...] = ()
    """Per agent and earlier agent, the tokens with which both prompts begin, the earlier one's output counted."""
    parts: tuple[tuple[Part, ...], ...] = ()
    """Per agent, what its prompt is made of."""
    outputs: tuple[int, ...] = ()
    """Per agent, the tokens that it is expected to write: its `max_tokens`."""
    joined: tuple[bool, ...] = ()
    """Per agent, whether nothing of its prompt can be read ahead."""
    start: Literal["first_token", "immediate"] = "first_token"
    grid: int | None = None
    """The cell in tokens of exactness "grid": then every hop has its group to itself."""
    isolated: bool = False
    """Nothing of it is found in any prefix cache."""
    append_tokens: int = APPEND_TOKENS

    def prompt_tokens(self, index: int) -> int:
        """Length of an agent's prompt, with the expected outputs of its upstreams."""
        return sum(part if isinstance(part, int) else self.outputs[part.agent] for part in self.parts[index])


def chain_shape(
    upstreams: Sequence[Sequence[int]],
    prepared: Sequence[PreparedAgent],
    grid: int | None = None,
    *,
    outputs: Sequence[int] | None = None,
    start: Literal["first_token", "immediate"] = "first_token",
    isolated: bool = False,
    append_tokens: int | None = None,
) -> ChainShape:
    """Boil a prepared chain down to what placement looks at.

    Args:
        upstreams: per agent, the agents it reads.
        prepared: per agent, its prompt.
        grid: the cell that its prompts are cut at: only such prompts share prefix-cache entries.
        outputs: per agent, the most tokens that it may write; None: 0.
        start: when agents are dispatched that read ahead.
        isolated: it finds nothing in any prefix cache.
        append_tokens: that an append waits for; None: the default.
    """
    cell = b"" if grid is None else f"grid{grid}/".encode()
    rungs = tuple(_rungs(_prefix(agent, grid), cell) for agent in prepared)
    expected = tuple(outputs) if outputs is not None else (0,) * len(prepared)
    return ChainShape(
        upstreams=tuple(tuple(found) for found in upstreams),
        prefixes=tuple(found[-1] for found in rungs),
        rungs=rungs,
        shared=tuple(
            tuple(0 if isolated else _shared(agent, prepared[at], at, expected) for at in range(index))
            for index, agent in enumerate(prepared)
        ),
        parts=tuple(
            tuple(len(part.ids) if isinstance(part, Literals) else part for part in agent.segments)
            for agent in prepared
        ),
        outputs=expected,
        joined=tuple(agent.joined for agent in prepared),
        start=start,
        grid=grid,
        isolated=isolated,
        append_tokens=append_tokens or APPEND_TOKENS,
    )


def submitted_shape(
    chain: Chain,
    options: SubmitOptions,
    upstreams: Sequence[Sequence[int]],
    prepared: Sequence[PreparedAgent],
    grid: int | None,
) -> ChainShape:
    """The shape of a chain as it was submitted; see `chain_shape`."""
    return chain_shape(
        upstreams,
        prepared,
        grid,
        outputs=[agent.max_tokens for agent in chain.agents],
        start=chain.start,
        isolated=options.isolate,
        append_tokens=options.append_tokens,
    )


def _prefix(agent: PreparedAgent, grid: int | None) -> list[int]:
    first = agent.segments[0] if agent.segments else None
    ids = first.ids if isinstance(first, Literals) and not agent.joined else []
    return ids[: len(ids) - len(ids) % (grid or 1)]


def _rungs(ids: Sequence[int], cell: bytes) -> tuple[tuple[str, int], ...]:
    """Digests of the growing prefix; the last is of all of it."""
    found, digest, data = [], hashlib.sha256(cell), array("I", ids).tobytes()
    width = len(data) // len(ids) if ids else 4
    for end in range(RUNG_TOKENS, len(ids), RUNG_TOKENS):
        digest.update(data[(end - RUNG_TOKENS) * width : end * width])
        found.append((digest.copy().hexdigest(), end))
    digest.update(data[len(found) * RUNG_TOKENS * width :])
    return (*found, (digest.hexdigest(), len(ids)))


def _shared(agent: PreparedAgent, other: PreparedAgent, at: int, outputs: Sequence[int]) -> int:
    """Tokens with which an agent's prompt and that of an earlier one, `at`, begin; the latter with its output."""
    total = 0
    for mine, theirs in zip(agent.segments, [*other.segments, OutputOf(agent=at)], strict=False):
        if isinstance(mine, Literals) and isinstance(theirs, Literals):
            common = _common(mine.ids, theirs.ids)
            total += common
            if common < max(len(mine.ids), len(theirs.ids)):
                break
        elif isinstance(mine, OutputOf) and mine == theirs:
            total += outputs[mine.agent]
        else:
            break
    return total


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two lists begin with alike."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:  # the longest equal prefix lies in low..high-1
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
