"""Whether an engine still takes what it was measured to take. Pure."""

from __future__ import annotations

from statistics import fmean

TOLERANCE = 0.08
"""A chain deviates if its time differs from what was predicted by more than this part."""
IN_A_ROW = 5
"""So many have to deviate in the same direction."""


class Drift:
    """Of one group: judged by chains that ran in series, and with nothing beside them.

    Where a new measurement changes nothing, it is not the engine that has drifted but the model that errs; what it errs
    by is then the new normal, and deviations from that count.
    """

    def __init__(self, *, exact: bool = True) -> None:
        """Args:
        exact: the figures should give what such a chain takes; else what the first of them take is their normal.
        """
        self._normal: float | None = 1.0 if exact else None
        self._measured = False
        """Anew, and `_normal` is 1 since."""
        self._row: list[float] = []

    def add(self, ratio: float) -> bool:
        """Note a chain that has taken `ratio` times what was predicted; whether the engine is to be measured anew."""
        if self._normal is None:
            self._row.append(ratio)
            if len(self._row) == IN_A_ROW:
                self._normal = fmean(self._row)
                self._row.clear()
            return False
        deviation = ratio / self._normal - 1.0
        if abs(deviation) <= TOLERANCE:
            self._row.clear()
            return False
        if self._row and (self._row[-1] / self._normal > 1.0) != (deviation > 0):
            self._row.clear()
        self._row = [*self._row, ratio][-IN_A_ROW:]
        if len(self._row) < IN_A_ROW:
            return False
        if self._measured:
            self._normal, self._measured = fmean(self._row), False
            self._row.clear()
            return False
        return True

    def measured(self) -> None:
        """The engine was measured anew."""
        self._normal, self._measured = 1.0, True
        self._row.clear()
