"""How often something that costs CPU time may be done. Pure."""

from __future__ import annotations


class Pace:
    """Holds a dear question to a part of a core: asked at most every `floor_s`, and the less often the more it takes.

    What one kernel or driver answers in microseconds takes another milliseconds, and nobody has measured them all.
    """

    def __init__(self, share: float, floor_s: float = 0.0) -> None:
        """Args:
        share: the part of a core that it may take, such as 0.0005.
        floor_s: the least time between two.
        """
        self._share = share
        self._floor_s = floor_s
        self._next_s = float("-inf")

    def due(self, now_s: float) -> bool:
        """Whether it may be asked now."""
        return now_s >= self._next_s

    def spent(self, now_s: float, cpu_s: float) -> None:
        """It was asked at `now_s`, and took so much."""
        self._next_s = now_s + max(self._floor_s, cpu_s / self._share)


class Budget:
    """Holds what is done again and again to a part of a core, and lets it take more for a moment."""

    def __init__(self, share: float, saved_s: float = 5.0) -> None:
        """Args:
        share: the part of a core that it may take in the long run.
        saved_s: the time of which the unused part may be used later.
        """
        self._share = share
        self._most_s = share * saved_s
        self._left_s = self._most_s
        self._at_s: float | None = None

    def spent(self, now_s: float, cpu_s: float) -> float:
        """It was done at `now_s` and took so much; returns how long to wait now, in seconds, at least."""
        if self._at_s is not None:
            self._left_s = min(self._most_s, self._left_s + self._share * (now_s - self._at_s))
        self._at_s = now_s
        self._left_s -= cpu_s
        return max(0.0, -self._left_s / self._share)
