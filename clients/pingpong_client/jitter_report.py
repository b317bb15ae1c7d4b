"""The report of how steadily devices decoded, as data: what `pingpong-client jitter --json` prints."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from pingpong_bus.messages import JitterCause
from pingpong_client.jitter_series import Point
from pingpong_client.log_times import date_and_time

VERSION: Final = 1
EpisodeState = Literal["over", "going on", "cut"]
"""Of an episode at the report's end: "cut" where its daemon ended in the midst of it."""


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base. Times are seconds since 1970, UTC; ms are times between two tokens of an answer."""


class CauseChange(_Value, frozen=True):
    """From when on the evidence pointed to a cause."""

    at: float
    cause: JitterCause
    why: str


class Episode(_Value, frozen=True):
    """One stretch of late tokens on one group."""

    id: str
    worker: str
    devices: list[str]
    began: float
    ended: float | None
    """The last late token, as far as it is known."""
    state: EpisodeState
    cause: JitterCause
    """Where it is over, the one that most seconds pointed to."""
    why: str
    evidence: dict[str, float]
    causes: list[CauseChange]
    """In order of time; at most 20."""
    usual_ms: float
    slowdown: float
    """Time a token to the usual, at its beginning; 0: not known."""
    worst_ms: float
    seconds: float | None
    """From the first late token to the last; this and the next are known once it is over."""
    tokens: int | None
    late: int | None
    lost_ms: float | None
    """What tokens took beyond the usual, all answers together."""
    chains: list[str]
    """Ids; at most 100."""


class Group(_Value, frozen=True):
    """One device group over the whole time."""

    worker: str
    devices: list[str]
    tokens: int
    """That came while nothing but decodes ran; the next are of them."""
    p50_ms: float
    """The tokens' median over the lines' medians."""
    p99_ms: float
    """The tokens' median over the lines' 99th percentiles."""
    worst_ms: float
    late: int
    usual_ms: float
    """At last; 0: not known."""
    appends_tokens: int
    """That came while appends were computed beside."""
    episodes: int
    late_seconds: float
    """In episodes that are over."""
    avoided_seconds: float
    """In which it was routed around."""
    lost_ms: float
    chains: int
    """That episodes touched."""
    points: list[Point]


class Cause(_Value, frozen=True):
    """What a cause has cost."""

    cause: JitterCause
    episodes: int
    seconds: float
    lost_ms: float
    chains: int


class Move(_Value, frozen=True):
    """A hop was taken off a degraded group."""

    at: float
    chain: str
    agent: str
    worker: str
    to: str
    tokens: int
    left_ms: float
    there_ms: float
    cause: JitterCause | None


class JitterReport(_Value, frozen=True):
    """The whole report."""

    began: float | None
    """The first of the daemon's lines in it; None where there was none."""
    ended: float | None
    lines: int
    """Lines read."""
    foreign: int
    """Of them, those that are not the daemon's, or were cut."""
    groups: list[Group]
    episodes: list[Episode]
    """In order of time; the costliest where there are very many."""
    left_out: int
    """Episodes that are not in the list."""
    causes: list[Cause]
    """The costliest first; all episodes count."""
    moves: list[Move]
    """The latest, in order of time."""
    moved: int
    """Hops moved in all."""
    moves_saved_ms: float
    """By prediction, of all."""
    version: int = VERSION
    """Of this form; raised by every change that a reader could misread."""


def is_dated(report: JitterReport) -> bool:
    """Whether it is about more than one day, so that times need their dates."""
    return date_and_time(report.began or 0.0)[:10] != date_and_time(report.ended or 0.0)[:10]
