"""Whose the processes on a GPU are: the group's, or someone else's. Pure.

NVML numbers processes as the driver sees them. In a container, older drivers list the host's pids, which say nothing to
the container's own: there the group's processes are those that came onto its device while its engine started. Newer
ones list only the container's own processes, under its own pids: others show by the memory that nobody listed holds,
and by what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Final

_CONTEXT_BYTES: Final = 64 << 20
"""Less than any process that computes takes: CUDA's context alone takes some hundred MiB."""


class DeviceTenants:
    """Of one device and one start of its group's engine."""

    def __init__(self, *, same_pids: bool) -> None:
        """Args:
        same_pids: NVML certainly numbers processes as this process does, and so lists them all.
        """
        self._same_pids = same_pids
        self._before: frozenset[int] = frozenset()
        self._looked_before = False
        self._own: frozenset[int] = frozenset()
        self._least: int | None = None

    def starting(self, listed: Set[int]) -> None:
        """The group's engine is about to start: what is there at the first call is not its own."""
        if not self._looked_before:
            self._before, self._looked_before = frozenset(listed), True

    def own(self, listed: Set[int], family: Set[int], descends: Callable[[int], bool]) -> frozenset[int]:
        """Which of the listed processes are the group's.

        Args:
            listed: what NVML lists.
            family: the group's processes, as this process numbers them.
            descends: whether a process that is not in `family` was started by one that is.
        """
        own = frozenset(pid for pid in listed if pid in family or descends(pid))
        if own or self._same_pids:
            return own
        if not self._own:
            self._own = frozenset(listed) - self._before
        return self._own & listed

    def joined(self, used: int | None, listed: Mapping[int, int | None]) -> bool:
        """Whether more memory is held by processes that are not listed than was at best: one has come.

        Args:
            used: bytes in use on the device.
            listed: bytes of each process that NVML lists.
        """
        held = list(listed.values())
        if self._same_pids or used is None or None in held:
            return False
        unlisted = used - sum(size for size in held if size is not None)
        self._least = unlisted if self._least is None else min(self._least, unlisted)
        return unlisted - self._least >= _CONTEXT_BYTES
