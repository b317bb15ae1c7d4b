"""What others' processes compute on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from pingpongd.nvml import NEVER, NOT_FOUND, NvmlRefused
from pingpongd.pace import Pace

_CALL: Final = "nvmlDeviceGetProcessUtilization"
_SHARE: Final = 0.0025
"""Of a core, where someone else is on the device: an H200 takes 2 ms, which is every second."""
_SHARE_UNSEEN: Final = 0.0004
"""The same where nobody is to be seen, and yet there might be: every five seconds."""
_US: Final = 1_000_000

Ask = Callable[..., Any]


class ForeignLoad:
    """Of one device. The answer costs, so it is asked where there may be something to hear."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        """Others' processes that computed, as the driver numbers them."""
        self.utilization: float | None = 0.0
        """The part of the time in which they did."""
        self._pace, self._pace_unseen = Pace(_SHARE), Pace(_SHARE_UNSEEN)
        self._seen_us = 0
        self._refused = False

    def nobody(self) -> None:
        """There is certainly no one else."""
        self.pids, self.utilization = [], None if self._refused else 0.0

    def look(self, ask: Ask, own: Collection[int], now_s: float, cpu: Callable[[], float], *, seen: bool) -> None:
        """Ask where it is time to.

        Args:
            ask: NVML, about this device.
            own: the group's processes, as NVML numbers them.
            now_s: by a monotonic clock.
            cpu: what this thread has used, in seconds.
            seen: whether others are certainly, or very likely, there, or would explain something.
        """
        if self._refused or not (self._pace if seen else self._pace_unseen).due(now_s):
            return
        began = cpu()
        try:
            # One sample for each process, the latest since then; their clocks differ by up to a second.
            samples = ask(_CALL, max(0, self._seen_us - _US))
        except NvmlRefused as refusal:
            self._refused = refusal.code in NEVER
            self.pids, self.utilization = [], 0.0 if refusal.code == NOT_FOUND else None
        else:
            self._seen_us = max((sample.timeStamp for sample in samples), default=self._seen_us)
            theirs = {sample.pid: sample.smUtil for sample in samples if sample.pid not in own and sample.smUtil > 0}
            self.pids, self.utilization = sorted(theirs), min(1.0, sum(theirs.values()) / 100)
        for pace in (self._pace, self._pace_unseen):
            pace.spent(now_s, cpu() - began)
