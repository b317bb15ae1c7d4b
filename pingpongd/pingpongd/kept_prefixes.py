"""What workers are told of the beginnings of prompts: which are expected to come back, and how often."""

from __future__ import annotations

import time

import msgspec

from pingpong_bus.messages import KeptPrefix
from pingpongd.chain_record import ChainRecord
from pingpongd.prefix_value import PrefixValue

_TEXT_TAIL = 32
"""Tokens at the end of a beginning that is joined with text, of which some may be others in the next run."""

_Agent = tuple[str, str, str, int | None]


class KeptPrefixes:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._value = PrefixValue()

    def began(self, record: ChainRecord) -> None:
        """A chain begins to run: its agents' prompts have come once more."""
        if record.options.isolate:
            return
        now = time.monotonic()
        for index, rungs in enumerate(record.shape.rungs):
            if not record.chain.agents[index].is_step:
                self._value.came(_agent(record, index), rungs, now)

    def of(self, record: ChainRecord, index: int) -> KeptPrefix | None:
        """What is expected of an agent's prompt; nothing where it shares no cache with others."""
        if record.options.isolate:
            return None
        kept = self._value.kept(_agent(record, index), time.monotonic())
        if kept is None or not record.prepared[index].text:
            return kept
        # Where text follows, the last ids before it may become others.
        tokens = kept.tokens - _TEXT_TAIL
        return msgspec.structs.replace(kept, tokens=tokens) if tokens > 0 else None


def _agent(record: ChainRecord, index: int) -> _Agent:
    """What tells an agent's prompts from others': by another tokenizer, or on a grid, its texts are other prefixes."""
    return record.chain.name, record.chain.agents[index].name, record.job.engine_model(index), record.shape.grid
