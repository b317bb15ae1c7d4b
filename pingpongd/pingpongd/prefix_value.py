"""How often the static beginnings of agents' prompts come back: what an engine's cache should keep them for. Pure.

An agent of a chain is known by its chain's name and its own. What its prompts begin with alike from one run to the next
is static, whatever the chain file says: an input that changes ends it. Of runs that have come the chain's pace is
estimated, older ones counting less: as if it had been looked at for an hour without a run before the first one, so that
two runs within a second are not taken for thousands an hour.

A beginning that was seen once is expected no more often than any other text, and nothing is kept for it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pingpong_bus.messages import KeptPrefix
from pingpong_worker.prefix_retention import HALF_LIFE_S

_UNSEEN_S = 3600.0
"""Without a run, before the first one."""
_LEAST = 0.05
"""Times an hour; of less nothing is kept."""
_MOST_AGENTS = 4096
_MOST_RUNGS = 200_000
"""Of all agents together, 36 bytes each; those that did not come for longest are forgotten first."""
_DIGITS = 16
"""Of a digest, in hexadecimal."""

Rungs = Sequence[tuple[str, int]]
"""Digest and length in tokens of a growing prefix; see `ChainShape.rungs`."""


@dataclass(slots=True)
class _Agent:
    digests: list[int]
    """Of the last run's rungs."""
    first: float
    last: float
    static: int = 0
    """Tokens with which its last two prompts began alike."""
    returns: float = 0.0
    """Runs after the first one, faded to `last`."""


class PrefixValue:
    """Belongs to one supervisor; what it knows ends with it, as what its engines' caches hold does."""

    def __init__(self) -> None:
        self._agents: OrderedDict[Hashable, _Agent] = OrderedDict()
        self._rungs = 0

    def __len__(self) -> int:
        """Agents that are known."""
        return len(self._agents)

    def came(self, agent: Hashable, rungs: Rungs, now: float) -> None:
        """An agent's chain begins to run.

        Args:
            agent: its chain's name, its own, and what else tells its prompts from others'.
            rungs: of the literal ids that its prompt begins with.
            now: in seconds.
        """
        digests = [int(digest[:_DIGITS], 16) for digest, _ in rungs]
        known = self._agents.pop(agent, None)
        self._rungs += len(digests) - (len(known.digests) if known is not None else 0)
        common = _common(known.digests, digests) if known is not None else 0
        if known is None or common == 0 or rungs[common - 1][1] == 0:
            known = _Agent(digests, now, now)
        else:
            known.returns = known.returns * _fade(now - known.last) + 1.0
            known.digests, known.last, known.static = digests, now, rungs[common - 1][1]
        self._agents[agent] = known
        while len(self._agents) > _MOST_AGENTS or self._rungs > _MOST_RUNGS:
            _, gone = self._agents.popitem(last=False)
            self._rungs -= len(gone.digests)

    def kept(self, agent: Hashable, now: float) -> KeptPrefix | None:
        """What is expected of the beginning of an agent's prompts; None where it is not expected to come back.

        Args:
            agent: as in `came`.
            now: in seconds.
        """
        known = self._agents.get(agent)
        if known is None or not known.static:
            return None
        # The sum of what each past second counts, now.
        looked_at_s = HALF_LIFE_S / math.log(2.0) * (1.0 - _fade(now - known.first)) + _UNSEEN_S
        reuse = known.returns * _fade(now - known.last) / (looked_at_s / 3600.0)
        return KeptPrefix(tokens=known.static, reuse=reuse) if reuse >= _LEAST else None


def _fade(seconds: float) -> float:
    return math.exp2(-max(0.0, seconds) / HALF_LIFE_S)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many rungs two ladders begin with alike."""
    for count, (mine, theirs) in enumerate(zip(first, second, strict=False)):
        if mine != theirs:
            return count
    return min(len(first), len(second))
