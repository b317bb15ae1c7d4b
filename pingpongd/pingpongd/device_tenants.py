"""Whose the processes on a GPU are: the group's, or someone else's.

NVML numbers processes as the driver sees them. In a container those are the host's pids, which say nothing to the
container's own: there the group's processes are those that came onto its device while its engine started.
"""

from __future__ import annotations

from collections.abc import Callable, Set


class DeviceTenants:
    """Of one device and one start of its group's engine."""

    def __init__(self, *, same_pids: bool) -> None:
        """Args:
        same_pids: NVML certainly numbers processes as this process does.
        """
        self._same_pids = same_pids
        self._before: frozenset[int] = frozenset()
        self._looked_before = False
        self._own: frozenset[int] = frozenset()

    def starting(self, listed: Set[int]) -> None:
        """The group's engine is about to start: what is there at the first call is not its own."""
        if not self._looked_before:
            self._before, self._looked_before = frozenset(listed), True

    def foreign(self, listed: Set[int], family: Set[int], descends: Callable[[int], bool]) -> list[int]:
        """Which of the listed processes are not the group's.

        Args:
            listed: what NVML lists.
            family: the group's processes, as this process numbers them.
            descends: whether a process that is not in `family` was started by one that is.
        """
        own = {pid for pid in listed if pid in family or descends(pid)}
        if own or self._same_pids:
            return sorted(listed - own)
        if not self._own:
            self._own = frozenset(listed) - self._before
        return sorted(listed - self._own)
