"""How a hop goes on where an earlier one of the same agent was cut off.

The ids that were committed follow the prompt and are prefilled with it; what is left to sample is less by them. An
answer at temperature 0 goes on as it would have gone on. One that draws goes on with a seed of its own: with the old
one, an engine that counts draws from a request's start would repeat those that the committed ids were drawn with.
"""

from __future__ import annotations

import hashlib

import msgspec

from pingpong_bus.errors import BusError
from pingpong_bus.messages import Resume, Sampling, StreamRef
from pingpong_bus.slab import Slab
from pingpong_bus.token_log import TokenLogReader


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
