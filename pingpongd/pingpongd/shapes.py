"""What placement looks at: a chain and the groups, boiled down to lengths, digests and figures. Pure."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import EngineFigures, JitterCause, Literals, OutputOf, PreparedAgent, SubmitOptions

RUNG_TOKENS = 64
"""Prefixes are told apart at multiples of this: what two prompts share is known to within so many tokens. A whole
number of KV blocks of every engine that is supported."""
LARGEST = 2000
"""A chain whose `ChainShape.size` is larger is not predicted for: the event loop would wait for it."""
APPEND_TOKENS = 32
"""Of an upstream's output, what is typically left to finalize: the last append that did not come together."""

CHARACTERS_PER_TOKEN = 4
"""Of text that a step between agents gives, as far as lengths are predicted."""
STEP_MS = 10.0
"""What a step is taken to take of which no earlier run is known."""

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
    degraded: bool = False
    """Whether its tokens come late now, so that another group is better."""
    slowdown: float = 1.0
    """What its tokens take now over what they should."""
    cause: JitterCause | None = None
    """Of what makes them late."""
    full: bool = False
    """Whether the chain's longest hop does not fit its engine now."""
    model: str = ""
    """The model that its engine serves, by its name in the configuration; empty: the default one."""


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
    """Per agent and earlier agent, the tokens with which both prompts begin, the earlier one's output counted. Empty
    where the chain is larger than `LARGEST`."""
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
    models: tuple[str, ...] = ()
    """Per agent, the model that runs it, as `GroupView.model` has it; empty: the default one runs all."""
    steps: tuple[float | None, ...] = ()
    """Per agent, None; of a step between agents, which takes no group, the milliseconds that it is expected to take.
    Empty: there is none."""
    unknown_steps: tuple[int, ...] = ()
    """Steps between agents of which no earlier run is known: what `steps` says of them is a guess."""
    paces: tuple[tuple[float, float], ...] = ()
    """Per agent, the tokens that a step of the engine is expected to give it, from 1, and the rows that it takes up in
    such a step: more than one of each where tokens are guessed. Empty: one of each."""

    @property
    def size(self) -> int:
        """Of what walking through it takes, some 15 µs each: an agent, five parts of prompts, or a hundred pairs."""
        count = len(self.upstreams)
        return count + sum(map(len, self.parts)) // 5 + count * count // 100

    def is_step(self, index: int) -> bool:
        """Whether it is a step between agents."""
        return bool(self.steps) and self.steps[index] is not None

    def model(self, index: int) -> str:
        """The model that runs an agent."""
        return self.models[index] if self.models else ""

    def pace(self, index: int) -> tuple[float, float]:
        """See `paces`."""
        return self.paces[index] if self.paces else (1.0, 1.0)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The models that its agents need, each once, in the order of their first agents."""
        return tuple(dict.fromkeys(self.model(at) for at in range(len(self.upstreams)) if not self.is_step(at)))

    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Per agent, the agents that it reads: through steps, those that the steps read, too."""
        if not self.steps:
            return self.upstreams
        found: list[tuple[int, ...]] = []
        for reads in self.upstreams:
            through = {source for at in reads for source in (found[at] if self.is_step(at) else (at,))}
            found.append(tuple(sorted(through)))
        return tuple(found)

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
    models: Sequence[str] = (),
    steps: Sequence[float | None] = (),
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
        models: per agent, see `ChainShape.models`.
        steps: per agent, see `ChainShape.steps`.
    """
    cell = b"" if grid is None else f"grid{grid}/".encode()
    rungs = tuple(_rungs(_prefix(agent, grid), cell) for agent in prepared)
    expected = tuple(outputs) if outputs is not None else (0,) * len(prepared)
    shape = ChainShape(
        upstreams=tuple(tuple(found) for found in upstreams),
        prefixes=tuple(found[-1] for found in rungs),
        rungs=rungs,
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
        models=tuple(models) if any(models) else (),
        steps=tuple(steps) if any(one is not None for one in steps) else (),
    )
    return shape if shape.size > LARGEST else msgspec.structs.replace(shape, shared=_all_shared(prepared, shape))


def submitted_shape(
    chain: Chain,
    options: SubmitOptions,
    upstreams: Sequence[Sequence[int]],
    prepared: Sequence[PreparedAgent],
    grid: int | None,
) -> ChainShape:
    """The shape of a chain as it was submitted; see `chain_shape`."""
    shape = chain_shape(
        upstreams,
        prepared,
        grid,
        outputs=_expected_outputs(chain, upstreams),
        start=chain.start,
        isolated=options.isolate,
        append_tokens=options.append_tokens,
        models=["" if agent.is_step else agent.model or "" for agent in chain.agents],
        steps=[STEP_MS if agent.is_step else None for agent in chain.agents],
    )
    steps = tuple(at for at, agent in enumerate(chain.agents) if agent.is_step)
    return msgspec.structs.replace(shape, unknown_steps=steps) if steps else shape


def _expected_outputs(chain: Chain, upstreams: Sequence[Sequence[int]]) -> list[int]:
    """Per agent, the tokens that it may write; of a step those that readers are expected to find of it."""
    found: list[int] = []
    for agent, reads in zip(chain.agents, upstreams, strict=True):
        found.append(_step_tokens(agent, [found[at] for at in reads]) if agent.is_step else agent.max_tokens)
    return found


def _step_tokens(step: Agent, read: Sequence[int]) -> int:
    most = -(-step.max_chars // CHARACTERS_PER_TOKEN)
    # What is taken out of a text is no longer than it; what a call answers may be.
    return max(1, min(most, sum(read))) if step.extract is not None and read else most


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


class _Text(NamedTuple):
    """Literal tokens."""

    ids: Sequence[int]
    marks: list[int]
    """A hash of every `RUNG_TOKENS` that they begin with: where two texts part is then found in a few steps."""


def _text(ids: Sequence[int]) -> _Text:
    data = array("I", ids)
    pieces = (hash(data[at : at + RUNG_TOKENS].tobytes()) for at in range(0, len(ids) - RUNG_TOKENS + 1, RUNG_TOKENS))
    return _Text(ids, list(accumulate(pieces, lambda before, piece: hash((before, piece)))))


def _all_shared(prepared: Sequence[PreparedAgent], shape: ChainShape) -> tuple[tuple[int, ...], ...]:
    """See `ChainShape.shared`."""
    if shape.isolated:
        return tuple((0,) * index for index in range(len(prepared)))
    prompts = [
        [*(_text(part.ids) if isinstance(part, Literals) else part for part in agent.segments), OutputOf(agent=index)]
        for index, agent in enumerate(prepared)
    ]
    return tuple(
        tuple(_shared(prompt, other, shape.outputs) for other in prompts[:index])
        for index, prompt in enumerate(prompts)
    )


def _shared(prompt: Sequence[_Text | OutputOf], other: Sequence[_Text | OutputOf], outputs: Sequence[int]) -> int:
    """Tokens with which two agents' prompts begin alike, each with its output."""
    total = 0
    for mine, theirs in zip(prompt, other, strict=False):
        if isinstance(mine, _Text) and isinstance(theirs, _Text):
            common = _common(mine, theirs)
            total += common
            if common < max(len(mine.ids), len(theirs.ids)):
                break
        elif isinstance(mine, OutputOf) and mine == theirs:
            total += outputs[mine.agent]
        else:
            break
    return total


def _common(first: _Text, second: _Text) -> int:
    """How many ids two texts begin with alike."""
    known = range(min(len(first.marks), len(second.marks)))
    at = RUNG_TOKENS * bisect_left(known, True, key=lambda mark: first.marks[mark] != second.marks[mark])
    most = min(len(first.ids), len(second.ids))
    while at < most and first.ids[at] == second.ids[at]:
        at += 1
    return at
