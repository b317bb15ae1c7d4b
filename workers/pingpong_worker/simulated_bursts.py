"""A device whose decode wobbles: times at which the simulated engine computes more slowly than it says.

The scheduler plans with the prices of a quiet device, as a real one does; what its steps then take is stretched here.
Pure: the caller says what time it is, in seconds since the engine's start.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from pingpong_worker.config import SimulatedSettings


class Bursts:
    """When bursts begin and end, and what they make of steps; times asked for never fall."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self._factor = settings.burst_factor
        self._drawn = _draw(settings)
        self._burst = next(self._drawn)

    def end_of(self, begun_s: float, duration_s: float) -> float:
        """When a step ends that would take `duration_s` on a quiet device."""
        at, left = begun_s, duration_s
        while True:
            begin, end = self._burst_after(at)
            if at < begin:
                if left <= begin - at:
                    return at + left
                left -= begin - at
                at = begin
            if left * self._factor <= end - at:
                return at + left * self._factor
            left -= (end - at) / self._factor
            at = end

    def _burst_after(self, at: float) -> tuple[float, float]:
        """The burst that goes on at this time, else the next one."""
        while self._burst[1] <= at:
            self._burst = next(self._drawn)
        return self._burst


def _draw(settings: SimulatedSettings) -> Iterator[tuple[float, float]]:
    """Bursts in order, begin and end; one that never comes where there are none."""
    if settings.burst_s == 0 or settings.burst_factor == 1:
        while True:
            yield math.inf, math.inf
    scale, drawn = settings.time_scale, random.Random(settings.burst_seed)
    end = settings.burst_after_s * scale
    while True:
        begin = end + drawn.expovariate(1 / (settings.burst_every_s * scale))
        end = begin + drawn.expovariate(1 / (settings.burst_s * scale))
        yield begin, end
