"""The chains that wait for token logs, in the order in which they start. Pure.

A chain's turn comes by its priority, raised by one for every step of time it has waited; among equals by the earlier
deadline, then by arrival. All chains age at the same pace, so two of them never change places: with waiting counted in
steps of one common clock, the order is known at arrival and a heap keeps it. A chain of priority p overtakes one of
priority q for (p - q) steps after that one's arrival and no longer: none starves.

The first in turn starts, or nobody does: if smaller chains could pass one that takes many logs, it might wait for ever.
"""

from __future__ import annotations

import heapq
from math import inf

import msgspec

AGING_S = 30.0
"""Seconds of waiting that count as one step of priority."""
Turn = tuple[int, float, int, int]
"""Sorts chains: the step of their arrival less the priority, deadline, arrival, and a number that none shares."""


def turn_of(priority: int, deadline_ns: int | None, since_ns: int, number: int, aging_s: float = AGING_S) -> Turn:
    """Where a chain stands in turn; see `ChainQueue.add`."""
    step_ns = max(1, int(aging_s * 1e9))
    return since_ns // step_ns - priority, inf if deadline_ns is None else deadline_ns, since_ns, number


class _Waiting(msgspec.Struct, frozen=True):
    """A chain in the queue."""

    turn: Turn
    deadline_ns: int | None
    slots: int

    def late(self, now_ns: int) -> bool:
        return self.deadline_ns is not None and self.deadline_ns <= now_ns


class ChainQueue:
    """Waiting chains; each method takes O(log n) for n of them, `position` O(n)."""

    def __init__(self, aging_s: float = AGING_S) -> None:
        """Args:
        aging_s: seconds of waiting that count as one step of priority.
        """
        self._aging_s = aging_s
        self._waiting: dict[str, _Waiting] = {}
        # Heaps may hold chains that have left: they are dropped when they come to the top, or outnumber the others.
        self._turns: list[tuple[Turn, str]] = []
        self._deadlines: list[tuple[int, int, str]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, chain: str) -> bool:
        return chain in self._waiting

    def add(self, chain: str, *, priority: int, deadline_ns: int | None, since_ns: int, slots: int) -> None:
        """Let a chain wait.

        Args:
            chain: its id.
            priority: the higher starts first.
            deadline_ns: when it is of no use any more; None: never.
            since_ns: when it began to wait.
            slots: token logs that it takes, all at once.

        Raises:
            ValueError: it waits already.
        """
        if chain in self._waiting:
            raise ValueError(f"chain {chain} waits already")
        self._count += 1
        turn = turn_of(priority, deadline_ns, since_ns, self._count, self._aging_s)
        self._waiting[chain] = _Waiting(turn, deadline_ns, slots)
        heapq.heappush(self._turns, (turn, chain))
        if deadline_ns is not None:
            heapq.heappush(self._deadlines, (deadline_ns, self._count, chain))

    def remove(self, chain: str) -> None:
        """Let a chain leave; harmless where it does not wait."""
        self._waiting.pop(chain, None)
        if len(self._turns) > 2 * len(self._waiting) + 64:
            self._rebuild()

    def next(self, now_ns: int, free_slots: int) -> str | None:
        """Take the chain whose turn it is.

        Args:
            now_ns: chains past their deadline are passed over; `expired` has them.
            free_slots: token logs that are free.

        Returns:
            Its id, and it waits no more; None where none waits, or the first in turn takes more logs than are free.
        """
        while self._turns:
            turn, chain = self._turns[0]
            waiting = self._waiting.get(chain)
            if waiting is not None and waiting.turn == turn and not waiting.late(now_ns):
                if waiting.slots > free_slots:
                    return None
                del self._waiting[chain]
                heapq.heappop(self._turns)
                return chain
            heapq.heappop(self._turns)
        return None

    def expired(self, now_ns: int) -> list[str]:
        """Take the chains that are past their deadline, the latest one last."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, number, chain = heapq.heappop(self._deadlines)
            waiting = self._waiting.get(chain)
            if waiting is not None and waiting.turn[-1] == number:
                found.append(chain)
                self.remove(chain)
        return found

    def position(self, chain: str, now_ns: int) -> int:
        """How many chains have their turn before this one; past their deadline they have none.

        Raises:
            KeyError: it does not wait.
        """
        turn = self._waiting[chain].turn
        return sum(other.turn < turn and not other.late(now_ns) for other in self._waiting.values())

    def _rebuild(self) -> None:
        self._turns = [(waiting.turn, chain) for chain, waiting in self._waiting.items()]
        heapq.heapify(self._turns)
        self._deadlines = [
            (waiting.deadline_ns, waiting.turn[-1], chain)
            for chain, waiting in self._waiting.items()
            if waiting.deadline_ns is not None
        ]
        heapq.heapify(self._deadlines)
