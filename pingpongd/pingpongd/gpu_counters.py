"""A card's counters, and what they say of the time between two readings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from pingpongd.nvml import NEVER, Nvml, NvmlRefused
from pingpongd.pace import Pace

_REASONS: Final = {74: "sw_power_cap", 269: "sw_thermal_slowdown"}
"""Fields that add up the nanoseconds of a reason for reduced clocks. Those of the hardware's own reasons take an H200
0.7 ms each, and what they count lasts."""
_TX, _RX = 197, 198
"""Fields that add up the bytes on PCIe."""
_IN_FORCE: Final = 0.01
"""The part of the time from which on a reason counts."""
_SHARE: Final = 0.0002
"""Of a core, for each of the two: an H200 takes 0.03 ms for reasons, which is every second, and 0.6 ms for bytes."""
_WRAP: Final = 1 << 32
_NS, _MB = 1e-9, 1e6


class Counted(msgspec.Struct, frozen=True):
    """Of the time between the latest two readings."""

    reasons: list[str] = []
    """That were in force: one that comes and goes between two looks is seen here."""
    rx_mb_s: float | None = None
    """Bytes are counted in 32 bits: more than 4 GB between two readings look like less."""
    tx_mb_s: float | None = None


class _Fields:
    """Some fields, read together."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._pace = Pace(_SHARE)
        self._refused = False
        self._before: tuple[float, dict[int, int]] | None = None

    def read(
        self, nvml: Nvml, handle: Any, now_s: float, cpu: Callable[[], float]
    ) -> tuple[float, dict[int, int], dict[int, int]] | None:
        """The time between two readings, and both; None where it is not time for one, or there are no two."""
        if self._refused or not self._pace.due(now_s):
            return None
        began = cpu()
        try:
            values = nvml.fields(handle, self._ids)
        except NvmlRefused as refusal:
            self._refused, self._before = refusal.code in NEVER, None
            return None
        finally:
            self._pace.spent(now_s, cpu() - began)
        before, self._before = self._before, (now_s, values)
        if before is None or now_s <= before[0]:
            return None
        return now_s - before[0], before[1], values


class GpuCounters:
    """Reads them as often as what they cost allows."""

    def __init__(self) -> None:
        self._reasons = _Fields(list(_REASONS))
        self._bytes = _Fields([_TX, _RX])
        self._rx_mb_s: float | None = None
        self._tx_mb_s: float | None = None

    def read(self, nvml: Nvml, handle: Any, now_s: float, cpu: Callable[[], float]) -> Counted:
        """Read those for which it is time, and say what is known.

        Args:
            nvml: whom to ask.
            handle: the card.
            now_s: by a monotonic clock.
            cpu: what this thread has used, in seconds.
        """
        in_force: list[str] = []
        if (found := self._reasons.read(nvml, handle, now_s, cpu)) is not None:
            passed_s, before, now = found
            in_force = [
                name
                for field, name in _REASONS.items()
                if (now.get(field, 0) - before.get(field, now.get(field, 0))) * _NS >= _IN_FORCE * passed_s
            ]
        if (found := self._bytes.read(nvml, handle, now_s, cpu)) is not None:
            self._rx_mb_s, self._tx_mb_s = (_rate(*found, field) for field in (_RX, _TX))
        return Counted(in_force, self._rx_mb_s, self._tx_mb_s)


def _rate(passed_s: float, before: Mapping[int, int], now: Mapping[int, int], field: int) -> float | None:
    if field not in before or field not in now:
        return None
    return (now[field] - before[field]) % _WRAP / _MB / passed_s
