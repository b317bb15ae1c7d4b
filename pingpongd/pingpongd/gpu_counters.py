"""A card's counters, and what they say of the time between two readings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from pingpongd.nvml import NEVER, Nvml, NvmlRefused
from pingpongd.pace import Pace

_REASONS: Final = {
    74: "sw_power_cap",
    269: "sw_thermal_slowdown",
    270: "hw_thermal_slowdown",
    271: "hw_power_brake_slowdown",
}
"""Fields that add up the nanoseconds of a reason for reduced clocks."""
_TX, _RX = 197, 198
"""Fields that add up the bytes on PCIe."""
_IN_FORCE: Final = 0.01
"""The part of the time from which on a reason counts."""
_SHARE: Final = 0.0005
"""Of a core."""
_NS, _MB = 1e-9, 1e6


class Counted(msgspec.Struct, frozen=True):
    """Of the time between the latest two readings."""

    reasons: list[str] = []
    """That were in force: one that comes and goes between two looks is seen here."""
    rx_mb_s: float | None = None
    tx_mb_s: float | None = None


class GpuCounters:
    """Reads them as often as what they cost allows."""

    def __init__(self) -> None:
        self._pace = Pace(_SHARE)
        self._refused = False
        self._before: tuple[float, dict[int, int]] | None = None
        self._counted = Counted()

    def read(self, nvml: Nvml, handle: Any, now_s: float, cpu: Callable[[], float]) -> Counted:
        """Read them where it is time to, and say what is known.

        Args:
            nvml: whom to ask.
            handle: the card.
            now_s: by a monotonic clock.
            cpu: what this thread has used, in seconds.
        """
        if self._refused or not self._pace.due(now_s):
            return self._counted
        began = cpu()
        try:
            values = nvml.fields(handle, [*_REASONS, _TX, _RX])
        except NvmlRefused as refusal:
            self._refused = refusal.code in NEVER
            self._before, self._counted = None, Counted()
            return self._counted
        finally:
            self._pace.spent(now_s, cpu() - began)
        before, self._before = self._before, (now_s, values)
        if before is not None and now_s > before[0]:
            self._counted = _between(before[1], values, now_s - before[0])
        return self._counted


def _between(before: Mapping[int, int], now: Mapping[int, int], passed_s: float) -> Counted:
    grown = {field: now[field] - before[field] for field in now if before.get(field, now[field] + 1) <= now[field]}
    return Counted(
        [name for field, name in _REASONS.items() if grown.get(field, 0) * _NS >= _IN_FORCE * passed_s],
        *(grown[field] / _MB / passed_s if field in grown else None for field in (_RX, _TX)),
    )
