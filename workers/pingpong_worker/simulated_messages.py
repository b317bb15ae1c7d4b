"""What the simulated engine and its child process say to each other: length-prefixed msgpack over two pipes."""

from __future__ import annotations

import msgspec

from pingpong_bus.messages import DecodePace, KeptPrefix, Sampling, SchedulerState
from pingpong_worker.config import SimulatedSettings


class _Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: the class name is the tag."""


class Configure(_Tagged, frozen=True):
    """The first message: load the "model"."""

    settings: SimulatedSettings
    decode_first: bool = True
    keep: float = 0.0
    """The part of the prefix cache that beginnings may hold which are expected to come again."""


class Chunk(_Tagged, frozen=True):
    """The next ids of a request's prompt; the first chunk makes the request."""

    request: str
    ids: list[int]
    salt: str | None
    sampling: Sampling | None
    """Given with the last chunk: compute it and decode. None: compute it and wait for more."""
    append: bool = False
    """Whether nobody waits for what is decoded; a chunk without `sampling` is an append in any case."""
    pace: DecodePace = DecodePace()
    """What its decoding may be slowed to by appends."""
    grid: int | None = None
    """Cells in tokens that its prompt is cut at; given with the first chunk."""
    keep: KeptPrefix | None = None
    """How much of its beginning is expected to come again; given with the first chunk."""


class Abort(_Tagged, frozen=True):
    """Forget a request; nothing is answered."""

    request: str


class ResetCache(_Tagged, frozen=True):
    """Empty the prefix cache; answered by `CacheReset`."""


Command = Configure | Chunk | Abort | ResetCache


class Loaded(_Tagged, frozen=True):
    """So much of the "model" is loaded, in shards that are not there either."""

    shards: int
    of: int


class Started(_Tagged, frozen=True):
    """The "model" is loaded."""


class Computed(_Tagged, frozen=True):
    """Every token given so far is computed, and the request waits for more."""

    request: str


class Sampled(_Tagged, frozen=True):
    """One step's outcome for a request that decodes."""

    request: str
    token: int | None
    """None where the answer ended with a stop token."""
    finish_reason: str | None
    stop_token: int | None
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache when the request was admitted."""


class CacheReset(_Tagged, frozen=True):
    pass


class Scheduled(_Tagged, frozen=True):
    """What the scheduler did in a step with decodes."""

    state: SchedulerState


Reply = Loaded | Started | Computed | Sampled | CacheReset | Scheduled

LENGTH_BYTES = 4
"""A frame is its length in bytes, little-endian, then msgpack of one `Command` or of a list of `Reply`."""


def frame(message: Command | list[Reply]) -> bytes:
    """Encode one frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
