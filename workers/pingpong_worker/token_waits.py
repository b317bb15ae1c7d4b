"""Counts how long answers wait for their tokens, by what the engine has to do meanwhile.

Steps of one cell are alike: as many answers are decoded, over as much context, beside the same kind of other work. So
whoever reads the counts can tell tokens that come late from steps that have more to compute. Memory is bounded: there
are at most `MAX_CELLS` cells between two takings. Pure.
"""

from __future__ import annotations

from typing import Final

from pingpong_bus.messages import StepCounts, StepKind
from pingpong_bus.step_times import StepTimes

MAX_CELLS: Final = 64
"""A second has a few; tokens of more are not counted, which is better than to count them where they do not belong."""
_SHORTEST_CONTEXT = 1024

_Cell = tuple[StepKind, int, int]


class TokenWaits:
    """One histogram a cell, since they were last taken."""

    def __init__(self) -> None:
        self._cells: dict[_Cell, StepTimes] = {}
        self._total_ms: dict[_Cell, float] = {}

    def add(self, kind: StepKind, decodes: int, context: int, waited_ms: float, tokens: int) -> None:
        """Tokens of one answer have come, together.

        Where they are several, each has taken its share: an engine may give several a step, and outputs of several
        steps are merged where nobody took them. What is the longest wait is the whole of it.

        Args:
            kind: what else was in flight.
            decodes: answers that are being decoded.
            context: of all of them, in tokens.
            waited_ms: since the answer's tokens before.
            tokens: how many came; at least 1.
        """
        cell = (kind, decodes_label(decodes), context_label(context))
        times = self._cells.get(cell)
        if times is None:
            if len(self._cells) == MAX_CELLS:
                return
            times = self._cells[cell] = StepTimes()
            self._total_ms[cell] = 0.0
        times.add(waited_ms / tokens, tokens)
        times.worst_ms = max(times.worst_ms, waited_ms)
        self._total_ms[cell] += waited_ms

    def take(self) -> list[StepCounts]:
        """All counts; counting begins anew."""
        counts = [
            StepCounts(
                kind=kind,
                decodes=decodes,
                context=context,
                buckets=times.buckets(),
                worst_ms=times.worst_ms,
                total_ms=self._total_ms[kind, decodes, context],
            )
            for (kind, decodes, context), times in self._cells.items()
        ]
        self._cells.clear()
        self._total_ms.clear()
        return counts


def decodes_label(decodes: int) -> int:
    """The least number of answers that share a cell with this one: 1, 2, 3 (to 4), 5 (to 8), 9 (to 16) ..."""
    return 1 if decodes <= 1 else (1 << ((decodes - 1).bit_length() - 1)) + 1


def context_label(context: int) -> int:
    """The least context that shares a cell with this one: 0 (to 1,023), 1,024, 2,048, 4,096 ... tokens."""
    return 0 if context < _SHORTEST_CONTEXT else 1 << (context.bit_length() - 1)
