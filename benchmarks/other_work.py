"""How much of the machine others used while something was measured, so that a number can be judged later."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_IDLE_FIELDS = (3, 4)
"""Of the first line of /proc/stat: idle, and idle while a disk is waited for."""
_GUEST_FIELDS = 8
"""From here on the line has guests' time, which is in the user's as well."""


class OtherWork:
    """Measures from its making on.

    Args:
        ours: processes that, with their descendants and this one's, are what is measured.
    """

    def __init__(self, ours: Iterable[int]) -> None:
        self._ours: list[psutil.Process] = []
        for pid in {os.getpid(), *ours}:
            with suppress(psutil.NoSuchProcess):  # in a container, a daemon's number may mean nothing here
                self._ours.append(psutil.Process(pid))
        self._began = time.monotonic()
        self._busy_s, self._ours_s = _busy_seconds(), self._our_seconds()

    def cores(self) -> float:
        """Cores that others kept busy on average, or that the host of a virtual machine kept for itself."""
        wall_s = time.monotonic() - self._began
        used_s = (_busy_seconds() - self._busy_s) - self.own_s()
        return max(0.0, used_s / wall_s)

    def own_s(self) -> float:
        """Seconds of cores that what is measured has used; on engines that compute on them, how much work it was."""
        return self._our_seconds() - self._ours_s

    def _our_seconds(self) -> float:
        family: set[psutil.Process] = set()
        for process in self._ours:
            with suppress(psutil.NoSuchProcess):
                family |= {process, *process.children(recursive=True)}
        total_s = 0.0
        for process in family:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s


def _busy_seconds() -> float:
    """Seconds that all cores together have not been idle, since the machine's start."""
    first = Path("/proc/stat").read_text("ascii").partition("\n")[0].split()[1:]
    ticks = [int(text) for at, text in enumerate(first[:_GUEST_FIELDS]) if at not in _IDLE_FIELDS]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")
