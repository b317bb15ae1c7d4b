"""What agents' tokens are guessed from: earlier runs of their chains, kept in memory and taken up from the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Protocol

import structlog

from pingpong_bus.errors import StoreError
from pingpong_bus.messages import ChainResult, EngineLimits
from pingpongd.chain_record import ChainRecord
from pingpongd.config import DaemonConfig
from pingpongd.past_runs import PastRuns
from pingpongd.speculation import speculates
from pingpongd.stored import EndedChain

_log = structlog.get_logger()

_MOST_TOKENS = 100_000
"""That a hop is told of at most: they travel with its start, and its engine sorts them between two steps, in 10 ms."""
_MOST_LOOKED_AT = 2000
"""Chains of the store, the latest, that are looked at after the daemon's start."""
_MOST_READ = 256
"""Of them, those whose results are read: each takes the event loop some milliseconds."""


class EndedChains(Protocol):
    """The part of the store that is asked."""

    async def list(self, limit: int) -> list[EndedChain]:
        """The chains that ended last, the very last one last."""

    async def result(self, chain_id: str, *, fetched: bool) -> ChainResult | None:
        """The result of an ended chain; None where there is no such."""

    def knows(self, chain_id: str) -> bool:
        """Whether a chain of this id is kept."""


class Guessing:
    """Belongs to one event loop. Where `[speculation]` is not enabled it keeps nothing."""

    def __init__(self, config: DaemonConfig) -> None:
        """Args:
        config: the daemon's.
        """
        self._enabled = config.speculation.enabled
        self._most_runs = config.speculation.runs if self._enabled else 0
        self._runs = PastRuns(self._most_runs, config.speculation.memory_mib)

    def configure(self, config: DaemonConfig) -> None:
        """Take a configuration that was read again; whether engines guess was settled at the start."""
        self._most_runs = config.speculation.runs if self._enabled else 0
        self._runs.configure(self._most_runs, config.speculation.memory_mib)

    @property
    def size(self) -> int:
        """Bytes of what is remembered."""
        return self._runs.size

    def drafts(self, record: ChainRecord, index: int, limits: EngineLimits | None) -> list[list[int]] | None:
        """What an agent's next hop is to guess from beside its prompt, the latest run first; None: it is not to guess.

        Args:
            record: its chain.
            index: the agent.
            limits: of the engine that it goes to.
        """
        wanted = speculates(record.chain, index, record.options, record.job.exact.level, enabled=self._enabled)
        if not wanted or limits is None or not limits.speculation:
            return None
        agent = record.chain.agents[index]
        found: list[list[int]] = []
        left = _MOST_TOKENS
        for run in self._runs.of(record.chain.name, agent.name, _model(record, index), limits.vocabulary_size):
            left -= len(run)
            if left < 0:
                break
            found.append(run)
        return found

    def finished(self, record: ChainRecord, index: int) -> None:
        """An agent has written all."""
        spec = record.chain.agents[index]
        if not spec.is_step:
            ids = record.agents[index].output_ids
            self._runs.note(record.chain.name, spec.name, _model(record, index), record.id, ids)

    def erase(self, chains: Collection[str]) -> None:
        """Chains were forgotten, or are not kept any longer: what they wrote is guessed from no more."""
        if chains:
            self._runs.erase(frozenset(chains))

    async def take_up(self, store: EndedChains) -> None:
        """Remember what the store keeps of the latest chains, as far as there is room."""
        if not self._enabled:
            return
        taken, looked_at = 0, Counter[str]()
        try:
            ended = await store.list(_MOST_LOOKED_AT)
            for entry in reversed(ended):
                # Where runs wrote the same, more of them bring nothing new.
                full = looked_at[entry.name] >= 2 * self._most_runs
                if entry.state != "finished" or full or not self._runs.wants(entry.name):
                    continue
                looked_at[entry.name] += 1
                result = await store.result(entry.id, fetched=False)
                if result is None or not store.knows(entry.id):  # it was forgotten meanwhile
                    continue
                taken += 1
                if not self._take(result) or taken >= _MOST_READ:
                    break
        except StoreError as error:  # no more than a slower start
            _log.warning("past_runs_unread", error=str(error))
        if taken:
            _log.info("past_runs_taken_up", chains=taken)

    def _take(self, result: ChainResult) -> bool:
        """Remember an earlier result; whether there may be room for more."""
        return all(
            self._runs.note_older(result.name, agent.name, agent.model, result.id, agent.output_ids)
            for agent in result.agents
            if agent.kind == "agent" and agent.model
        )


def _model(record: ChainRecord, index: int) -> str:
    """What an agent's result calls the model that runs it."""
    return record.chain.agents[index].model or record.job.engine_model(index)
