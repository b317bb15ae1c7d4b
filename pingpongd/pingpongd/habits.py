"""What earlier runs of a chain have shown of its agents, for predictions of the next one. Pure.

Of agents whose tokens are guessed: how many an engine's step gives. Of steps between agents: how long they take, and
how much they give. It is kept by the names of chain and agent, and the latest run counts most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pingpong_bus.messages import DraftCounts
from pingpongd.shapes import CHARACTERS_PER_TOKEN, ChainShape

WEIGHT = 0.5
"""Of the latest run in the decayed means: a chain goes otherwise once earlier runs of it are known."""
_MOST = 4096
"""Agents and steps that are known, the latest."""


class _Key(NamedTuple):
    chain: str
    agent: str
    model: str


class Pace(NamedTuple):
    """Of an agent whose tokens are guessed; see `ChainShape.paces`."""

    tokens: float
    rows: float


class StepHabit(NamedTuple):
    """Of a step between agents."""

    ms: float
    characters: float


class Habits:
    """Decayed means, bounded in number."""

    def __init__(self) -> None:
        self._paces = OrderedDict[_Key, Pace]()
        self._steps = OrderedDict[_Key, StepHabit]()

    def learn_pace(self, chain: str, agent: str, model: str, counts: DraftCounts) -> None:
        """An agent has written with guesses; nothing is learned from an answer without steps."""
        if counts.steps <= 0:
            return
        seen = pace(counts)
        key = _Key(chain, agent, model)
        before = self._paces.get(key, seen)
        self._paces[key] = Pace(_mean(before.tokens, seen.tokens), _mean(before.rows, seen.rows))
        _bound(self._paces, key)

    def learn_step(self, chain: str, step: str, ms: float, characters: int) -> None:
        """A step has taken so long and given so much."""
        seen, key = StepHabit(max(0.0, ms), float(characters)), _Key(chain, step, "")
        before = self._steps.get(key, seen)
        self._steps[key] = StepHabit(_mean(before.ms, seen.ms), _mean(before.characters, seen.characters))
        _bound(self._steps, key)

    def applied(
        self, shape: ChainShape, chain: str, agents: Sequence[tuple[str, str]], guessed: Sequence[bool]
    ) -> ChainShape:
        """A chain's shape with what is known of its agents.

        Args:
            shape: without.
            chain: its name.
            agents: per agent, its name and model.
            guessed: per agent, whether its tokens are guessed; where no run is known, one is expected of each step.
        """
        keys = [_Key(chain, *agent) for agent in agents]
        paces = tuple(
            tuple(self._paces.get(key, (1.0, 1.0))) if guess else (1.0, 1.0)
            for key, guess in zip(keys, guessed, strict=True)
        )
        shape = msgspec.structs.replace(shape, paces=paces if any(pace != (1.0, 1.0) for pace in paces) else ())
        if not shape.steps:
            return shape
        steps, outputs, unknown = list(shape.steps), list(shape.outputs), set(shape.unknown_steps)
        for at, key in enumerate(keys):
            known = self._steps.get(_Key(chain, key.agent, ""))
            if steps[at] is not None and known is not None:
                unknown.discard(at)
                steps[at] = known.ms
                outputs[at] = max(1, round(known.characters / CHARACTERS_PER_TOKEN))
        return msgspec.structs.replace(
            shape, steps=tuple(steps), outputs=tuple(outputs), unknown_steps=tuple(sorted(unknown))
        )


def pace(counts: DraftCounts) -> Pace:
    """What an answer's steps gave and took up."""
    steps = max(1, counts.steps)
    return Pace(1.0 + counts.accepted / steps, 1.0 + counts.drafted / steps)


def _mean(before: float, latest: float) -> float:
    return before + WEIGHT * (latest - before)


def _bound(kept: OrderedDict[_Key, Pace] | OrderedDict[_Key, StepHabit], latest: _Key) -> None:
    kept.move_to_end(latest)
    while len(kept) > _MOST:
        kept.popitem(last=False)
