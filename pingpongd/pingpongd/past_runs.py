"""What agents have written in earlier runs of their chains, to guess from in the next one. Pure.

It is kept in memory alone and never leaves the daemon but to its own workers. The longest unused chains go first where
it becomes too much, all of their agents together.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence

import msgspec

MIB = 1024 * 1024
_RUN_BYTES = 256
"""What a run takes beside its tokens."""
_TOKEN_BYTES = 4


class _Run(msgspec.Struct, frozen=True):
    """One output."""

    ids: array[int]
    job: str
    """The chain's id: whoever forgets that one forgets this."""
    largest: int
    """Of the ids."""

    @property
    def size(self) -> int:
        return _RUN_BYTES + _TOKEN_BYTES * len(self.ids)


_Writer = tuple[str, str]
"""An agent's name and its model."""


class PastRuns:
    """The latest outputs of every agent, by the names of chain and agent and by its model."""

    def __init__(self, runs: int, memory_mib: int) -> None:
        """Args:
        runs: that are remembered of an agent; 0: nothing ever is.
        memory_mib: the most that all of it may take.
        """
        self._chains = OrderedDict[str, dict[_Writer, list[_Run]]]()
        """By name, the one that was run longest ago first; runs of an agent the latest first."""
        self._size = 0
        self.configure(runs, memory_mib)

    @property
    def size(self) -> int:
        """What is remembered, in bytes."""
        return self._size

    def configure(self, runs: int, memory_mib: int) -> None:
        """Take other bounds; what is beyond them is forgotten."""
        self._runs, self._most = runs, memory_mib * MIB
        for agents in self._chains.values():
            for kept in agents.values():
                self._drop(kept, self._runs)
        self._evict()

    def note(self, chain: str, agent: str, model: str, job: str, ids: Sequence[int]) -> None:
        """An agent has written something.

        Args:
            chain: the chain's name.
            agent: its own.
            model: that ran it.
            job: the chain's id.
            ids: its output.
        """
        run = _run(job, ids)
        if not self._runs or not ids or run.size > self._most:
            return
        kept = self._chains.setdefault(chain, {}).setdefault((agent, model), [])
        self._chains.move_to_end(chain)
        for at, known in enumerate(kept):
            if known.ids == run.ids:  # said again: it takes the place of the one before
                self._size -= kept.pop(at).size
                break
        kept.insert(0, run)
        self._size += run.size
        self._drop(kept, self._runs)
        self._evict()

    def note_older(self, chain: str, agent: str, model: str, job: str, ids: Sequence[int]) -> bool:
        """The same of a run from before all that are known; returns whether there was room, and so may be for more."""
        run = _run(job, ids)
        if self._size + run.size > self._most:
            return False
        kept = self._chains.get(chain, {}).get((agent, model), [])
        if len(kept) >= self._runs or not ids or any(known.ids == run.ids for known in kept):
            return True
        if chain not in self._chains:
            self._chains[chain] = {}
            self._chains.move_to_end(chain, last=False)
        self._chains[chain].setdefault((agent, model), []).append(run)
        self._size += run.size
        return True

    def wants(self, chain: str) -> bool:
        """Whether an older run of a chain would be of use: some agent of it has fewer than are remembered."""
        agents = self._chains.get(chain)
        return self._runs > 0 and (not agents or any(len(kept) < self._runs for kept in agents.values()))

    def of(self, chain: str, agent: str, model: str, vocabulary_size: int) -> list[list[int]]:
        """What an agent wrote, the latest first; the chain counts as used.

        Args:
            chain: the chain's name.
            agent: its own.
            model: that runs it.
            vocabulary_size: of the engine: a model that is another one by the same name may know fewer ids.
        """
        if chain not in self._chains:
            return []
        self._chains.move_to_end(chain)
        kept = self._chains[chain].get((agent, model), [])
        return [run.ids.tolist() for run in kept if run.largest < vocabulary_size]

    def erase(self, jobs: Collection[str]) -> None:
        """Forget what chains of these ids have written."""
        for chain in list(self._chains):
            agents = self._chains[chain]
            for writer in list(agents):
                gone = [run for run in agents[writer] if run.job in jobs]
                self._size -= sum(run.size for run in gone)
                agents[writer] = [run for run in agents[writer] if run.job not in jobs]
                if not agents[writer]:
                    del agents[writer]
            if not agents:
                del self._chains[chain]

    def _drop(self, kept: list[_Run], most: int) -> None:
        self._size -= sum(run.size for run in kept[most:])
        del kept[most:]

    def _evict(self) -> None:
        while self._size > self._most:
            _, agents = self._chains.popitem(last=False)
            self._size -= sum(run.size for kept in agents.values() for run in kept)


def _run(job: str, ids: Sequence[int]) -> _Run:
    return _Run(array("I", ids), job, max(ids, default=0))
