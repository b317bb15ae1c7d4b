"""What a group's tokens usually take, by what else its engine has to do. Pure: step counts in, usual times out.

Steps of one cell (`StepCounts`) are alike, so each cell has a usual time of its own. It is learnt from the group's own
past, in seconds in which nothing was late; old seconds count less and less. While a cell is new, its usual is guessed:
from what the engine was measured to take (corrected by what known cells take over that), from a peer, another group of
the same kind that knows the cell, or from a context near by. A guess is only an alarm's ground where it is missed by
far.

A group that has been slow from its first second on has no better past to be judged by; its peers have. Where one knows
the same cell, the usual is never taken to be more than `PEER_ROOM` times theirs.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from pingpong_bus.messages import EngineFigures, StepCounts, StepKind
from pingpong_bus.step_times import upper_ms
from pingpongd.engine_cost import EngineCost

LATE: Final = 1.5
"""A token is late that takes more than so many times the usual."""
PEER_ROOM: Final = 1.2
MOST_CELLS: Final = 128
"""Of a group, those that were seen latest; each takes some kilobytes at most."""
_MEMORY_TOKENS = 50_000.0
"""A cell's past counts as at most so many tokens, some ten minutes of decoding: then it is halved."""
_KNOWN_TOKENS, _KNOWN_SECONDS = 100.0, 5
"""A cell is known from so many tokens in so many seconds on."""
_OCTAVE = 8
"""Buckets an octave; see `step_times.py`."""
_LEAST_SPREAD = 0.02
_PACE_MEMORY = 0.02
"""What one second counts of how much a cell's pace differs between seconds."""
_WORST_MEMORY = 0.9998
"""What the past's worst is multiplied by at each second: half of it is left after an hour."""
_BEYOND_MEASURED = 1.5
"""Figures are no guess for contexts larger than so many times the largest that was measured."""
_NEIGHBOUR_ROOM = 1.6
_SHORTEST = 1024
"""Tokens of context at which the second cell begins."""

Cell = tuple[StepKind, int, int]
"""Kind, answers and context, as in `StepCounts`."""


class Usual(msgspec.Struct, frozen=True):
    """What a token of a cell should take."""

    ms: float
    known: bool
    """Learnt from the group's own past; else guessed."""
    room: float = 1.0
    """How much more than `ms` may be no fault of the group's, for the guess is a rough one."""
    spread: float = 0.0
    """Standard deviation of the logarithm of one token's time in a second."""
    pace_spread: float = 0.0
    """The same of the median of a second."""
    late: float = 0.0
    """The part of the tokens that are late all the same, 0 to 1."""


def cell_of(counts: StepCounts) -> Cell:
    """The cell that counts belong to."""
    return counts.kind, counts.decodes, counts.context


def quantile_ms(buckets: Mapping[int, float], share: float) -> float:
    """The time below which this share of all lies, interpolated within its bucket; 0 where there are none."""
    left = share * sum(buckets.values())
    for bucket, count in sorted(buckets.items()):
        if count >= left:
            part = left / count if count else 0.5
            return upper_ms(bucket) * 2 ** ((part - 1.0) / _OCTAVE)
        left -= count
    return upper_ms(max(buckets)) if buckets else 0.0


class _CellPast:
    """What was learnt of one cell."""

    __slots__ = ("_late", "_median", "_spread", "buckets", "pace_variance", "seconds", "tokens")

    def __init__(self) -> None:
        self.buckets: dict[int, float] = {}
        self.tokens = 0.0
        self.seconds = 0
        self.pace_variance = 0.0
        self._median: float | None = None
        self._spread = self._late = 0.0

    @property
    def known(self) -> bool:
        return self.tokens >= _KNOWN_TOKENS and self.seconds >= _KNOWN_SECONDS

    def learn(self, counts: StepCounts) -> None:
        count = sum(counts.buckets.values())
        if self.known and count >= counts.decodes:
            deviation = math.log(quantile_ms(counts.buckets, 0.5) / self.usual().ms)
            self.pace_variance += _PACE_MEMORY * (deviation * deviation - self.pace_variance)
        for bucket, tokens in counts.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0.0) + tokens
        self.tokens += count
        self.seconds += 1
        if self.tokens > _MEMORY_TOKENS:
            self.buckets = {bucket: tokens / 2 for bucket, tokens in self.buckets.items() if tokens >= 0.01}
            self.tokens = sum(self.buckets.values())
        self._median = None

    def usual(self) -> Usual:
        if self._median is None:
            self._median = quantile_ms(self.buckets, 0.5)
            above = quantile_ms(self.buckets, 0.9) / self._median if self._median else 1.0
            self._spread = max(_LEAST_SPREAD, math.log(max(1.0, above)) / 1.28)
            limit = LATE * self._median
            self._late = sum(n for bucket, n in self.buckets.items() if upper_ms(bucket - 1) > limit) / self.tokens
        return Usual(self._median, self.known, 1.0, self._spread, math.sqrt(self.pace_variance), self._late)


class Baseline:
    """Of one group; what it usually takes."""

    def __init__(self, figures: EngineFigures | None = None) -> None:
        """Args:
        figures: what its engine was measured to take; None where it was not measured.
        """
        self._cells = OrderedDict[Cell, _CellPast]()
        self._cost: EngineCost | None = None
        self._most_context = self._most_rows = 0
        self._bias: float | None = None
        self._alone = False
        """Neither figures nor peers count."""
        self.worst: dict[StepKind, float] = {}
        """The worst single wait of the past, over the usual; by kind."""
        self.measured(figures)

    def measured(self, figures: EngineFigures | None) -> None:
        """Take new figures of the engine."""
        usable = figures is not None and figures.prefill and figures.decode
        self._cost = EngineCost(figures) if figures is not None and usable else None
        self._most_context = max((context for context, _ in figures.decode), default=0) if figures else 0
        self._most_rows = max((rows for rows, _ in figures.batch), default=1) if figures else 1
        self._bias, self._alone = None, False

    def forget(self) -> None:
        """Neither the past, nor figures, nor peers count any more: what it takes from now on is its usual."""
        self._cells.clear()
        self.worst.clear()
        self._cost, self._bias, self._alone = None, None, True

    def known_ms(self, cell: Cell) -> float | None:
        """What this group's own past says of a cell, for its peers; None where it does not know it."""
        past = self._cells.get(cell)
        return past.usual().ms if past is not None and past.known else None

    def usual(self, cell: Cell, peers: Iterable[Baseline] = ()) -> Usual | None:
        """What a token of a cell should take; None where nothing is known of the like.

        Args:
            cell: of kind "decode".
            peers: of groups of the same kind.
        """
        past, found = self._cells.get(cell), None
        told = [] if self._alone else [ms for peer in peers if (ms := peer.known_ms(cell)) is not None]
        if past is not None and past.known:
            found = past.usual()
            if told and cell[1] <= 2 and found.ms > (most := PEER_ROOM * median(told)):
                # More answers share a cell with others' that are fewer: their times need not be alike.
                found = msgspec.structs.replace(found, ms=most)
            return found
        if told:
            return Usual(median(told), False, 1.25, 0.1, 0.05, 0.01)
        guess = self._figure_ms(cell)
        if guess is None:
            near = self._neighbour(cell)
            return None if near is None else msgspec.structs.replace(near, known=False, room=_NEIGHBOUR_ROOM)
        if self._bias is None:
            self._bias = self._figures_bias()
        return Usual(guess * (self._bias or 1.0), False, 1.25 if self._bias else 1.6, 0.1, 0.05, 0.01)

    def learn(self, second: Sequence[StepCounts], peers: Sequence[Baseline] = ()) -> None:
        """Take a second in which nothing was late."""
        for kind in self.worst:
            self.worst[kind] *= _WORST_MEMORY
        for counts in second:
            if counts.kind == "prompts" or not counts.buckets:
                continue
            decode: Cell = ("decode", counts.decodes, counts.context)
            usual = self.usual(decode, peers)
            if usual is not None:
                self.worst[counts.kind] = max(self.worst.get(counts.kind, 0.0), counts.worst_ms / usual.ms)
            if counts.kind == "decode":
                self._cells.setdefault(decode, _CellPast()).learn(counts)
                self._cells.move_to_end(decode)
        while len(self._cells) > MOST_CELLS:
            self._cells.popitem(last=False)
        self._bias = None

    def _neighbour(self, cell: Cell) -> Usual | None:
        """What is known of as many answers over half the context, a quarter or twice of it; the first that is."""
        kind, decodes, context = cell
        for other in (context // 2, context // 4, context * 2 or _SHORTEST):
            past = self._cells.get((kind, decodes, other if other >= _SHORTEST else 0))
            if past is not None and past.known:
                return past.usual()
        return None

    def _figure_ms(self, cell: Cell) -> float | None:
        """What the engine was measured to take, in the middle of a cell; None beyond what was measured."""
        if self._cost is None:
            return None
        _, decodes, context = cell
        rows = 1.5 * decodes - 0.5 if decodes > 2 else float(decodes)  # 3 stands for 3 and 4, 5 for 5 to 8
        each = (1.5 * context if context else 512.0) / rows
        if each > _BEYOND_MEASURED * self._most_context or decodes > self._most_rows:
            return None
        return self._cost.decode_ms(each, round(rows))

    def _figures_bias(self) -> float | None:
        """What known cells take, over what the figures say; None where no cell is known."""
        ratios = [
            past.usual().ms / guess
            for cell, past in self._cells.items()
            if past.known and (guess := self._figure_ms(cell))
        ]
        return median(ratios) if ratios else None
