"""How a hop goes on where an earlier one of the same agent was cut off.

Usually the ids that were committed follow the prompt and are prefilled with it; what is left to sample is less by
them. An answer at temperature 0 goes on as it would have gone on, but for rounding. One that draws goes on with a seed
of its own: with the old one, an engine that counts draws from a request's start would repeat those that the committed
ids were drawn with.

Where bits are promised that is not enough: ids that were decoded one by one round differently when they are
prefilled together. Such an answer is *replayed*: the prompt alone is answered anew, and the beginning of that answer is
held against what is committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from pingpong_bus.errors import BusError, ChainFailed
from pingpong_bus.messages import HopSpec, Resume, Sampling, StreamRef
from pingpong_bus.slab import Slab
from pingpong_bus.token_log import TokenLogReader
from pingpong_worker.engine import OutputTokens


def committed_ids(slab: Slab, output: StreamRef, resume: Resume | None) -> list[int]:
    """The ids that stand in a hop's own log before it writes.

    Raises:
        BusError: they are not as many as the hop was told: somebody else has written.
        StreamGone: the log was freed.
    """
    expected = resume.tokens if resume else 0
    ids = TokenLogReader(slab, output).read().ids
    if len(ids) != expected:
        raise BusError(
            f"The log in slot {output.slot} holds {len(ids)} tokens, and the hop was to go on behind {expected}.",
            hint="This is a fault of the daemon.",
        )
    return ids


def sampling_after(sampling: Sampling, tokens: int) -> Sampling:
    """The sampling of what is left of an answer once `tokens` of it are committed."""
    if tokens == 0:
        return sampling
    seed = sampling.seed
    if seed is not None and sampling.temperature > 0:
        digest = hashlib.blake2b(f"{seed}/{tokens}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1  # engines take signed 64-bit seeds
    return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - tokens, seed=seed)


def replays(spec: HopSpec) -> bool:
    """Whether a resumed hop is answered anew from its prompt's end.

    An answer that draws without a seed never comes again, whatever was promised.
    """
    return spec.replay and (spec.sampling.temperature == 0 or spec.sampling.seed is not None)


class Replay:
    """Holds an answer that comes again against what of it is committed."""

    def __init__(self, committed: Sequence[int]) -> None:
        self._committed = committed
        self._next = 0
        """Tokens that have come again."""

    def take(self, tokens: OutputTokens) -> OutputTokens | None:
        """What of `tokens` goes beyond the committed ones, or ends the answer; None where nothing does.

        Raises:
            ChainFailed: another token than the committed one has come, or an end before it.
        """
        expected = self._committed[self._next : self._next + len(tokens.ids)]
        for offset, (old, new) in enumerate(zip(expected, tokens.ids, strict=False)):
            if old != new:
                raise self._differs(self._next + offset, f"token {new} came")
        self._next += len(expected)
        if tokens.finish_reason is not None and self._next < len(self._committed):
            raise self._differs(self._next, "it ended")
        rest = tokens.ids[len(expected) :]
        if not rest and tokens.finish_reason is None:
            return None
        return msgspec.structs.replace(tokens, ids=rest)

    def _differs(self, at: int, what: str) -> ChainFailed:
        return ChainFailed(
            f"the answer was interrupted and replayed, and did not come out the same: at its token {at}, where "
            f"{self._committed[at]} had been written, {what}.",
            hint="Compare devices and settings of the groups; at exactness fast it would have gone on.",
        )
