"""The log events that reports are made from, as structs: what the daemon writes, and `pingpong-client jitter` reads.

A log line is one JSON object: `event` (the name in `EVENTS`), `level`, `timestamp` (ISO 8601, UTC), and the fields of
the struct. Names are stable: a field may be added, and none changes its meaning. `docs/logs.md` lists all events.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pingpong_bus.messages import HealthState, JitterCause


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base. Unknown fields are passed over: a reader may be older than the log."""


class DecodeSteps(_Record, frozen=True):
    """How steadily a group has decoded over some seconds; written every `jitter.log_s` in which it has."""

    worker: str
    devices: list[str]
    """GPUs by UUID, cores as "cpu:0"."""
    seconds: float
    tokens: int
    """While nothing but decodes ran."""
    p50_ms: float
    p99_ms: float
    worst_ms: float
    late: int
    """Of `tokens`, those that took more than 1.5 times the usual."""
    usual_ms: float
    """The group's own median for such steps; 0 where it is not known yet."""
    appends_tokens: int = 0
    """Tokens that came while appends were computed beside; the next two are theirs."""
    appends_p50_ms: float = 0.0
    appends_p99_ms: float = 0.0
    prompts_tokens: int = 0
    """Tokens that came while a prompt was computed whose answer was waited for."""
    prompts_p99_ms: float = 0.0


class DecodeJitter(_Record, frozen=True):
    """An episode has begun: a group's tokens come late; written at the end of its first second."""

    episode: str
    """Unique: INSTANCE-START-WORKER-NUMBER; START is six hexadecimal digits, others at each start of a daemon."""
    worker: str
    devices: list[str]
    cause: JitterCause
    why: str
    """The evidence, in a sentence."""
    evidence: dict[str, float]
    """What was measured, by name with unit, such as "runnable_wait" or "sm_mhz"."""
    p50_ms: float
    p99_ms: float
    worst_ms: float
    late_share: float
    """0 to 1."""
    usual_ms: float
    slowdown: float


class DecodeJitterCause(_Record, frozen=True):
    """The evidence of an episode that goes on points elsewhere by now."""

    episode: str
    worker: str
    cause: JitterCause
    was: JitterCause
    why: str
    evidence: dict[str, float]


class DecodeJitterEnded(_Record, frozen=True):
    """An episode is over: the group has been quiet for `jitter.quiet_s`, or its worker has ended."""

    episode: str
    worker: str
    devices: list[str]
    cause: JitterCause
    """The one that most seconds pointed to."""
    seconds: float
    """From the first late token to the last."""
    tokens: int
    """In that time."""
    late: int
    lost_ms: float
    """What its tokens have taken beyond the usual, all answers together."""
    chains: list[str]
    """Ids of the chains that decoded on it meanwhile; at most 100."""
    worst_ms: float


class GroupHealthChanged(_Record, frozen=True):
    """Whether a group is routed around."""

    worker: str
    state: HealthState
    was: HealthState
    cause: JitterCause | None
    why: str


class HopMoved(_Record, frozen=True):
    """A hop was taken off a degraded group."""

    chain: str
    agent: str
    hop: str
    worker: str
    """That it left."""
    to: str
    tokens: int
    """That it had written."""
    left_ms: float
    """What it was predicted to take where it was."""
    there_ms: float
    """What it was predicted to take elsewhere, its prompt prefilled anew."""
    cause: JitterCause | None


EVENTS: Final[dict[str, type[_Record]]] = {
    "decode_steps": DecodeSteps,
    "decode_jitter": DecodeJitter,
    "decode_jitter_cause": DecodeJitterCause,
    "decode_jitter_ended": DecodeJitterEnded,
    "group_health": GroupHealthChanged,
    "hop_moved": HopMoved,
}
"""By the name under which each is written."""

_NAMES: Final = {kind: name for name, kind in EVENTS.items()}

Record = DecodeSteps | DecodeJitter | DecodeJitterCause | DecodeJitterEnded | GroupHealthChanged | HopMoved


def event_name(record: Record) -> str:
    """The name under which a record is written."""
    return _NAMES[type(record)]
