"""An episode of jitter: begins with the first second in trouble, ends after a quiet time. Pure.

    healthy --late tokens--> degraded --5 s without--> recovering --quiet for long enough--> healthy
                                 ^----- late tokens -------'

Each time that it was taken for recovering and was not, it has to be quiet for 5 s more to be taken for that again.
A group in an episode gets no new hops where another can take them, so silence must end it as well as good tokens: a
group that is not asked for anything comes back too. It does not while the cause can still be seen to be in force, and
it waits longer where it came back and was late again at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from pingpong_bus.log_records import (
    DecodeJitter,
    DecodeJitterCause,
    DecodeJitterEnded,
    GroupHealthChanged,
    Record,
)
from pingpong_bus.messages import GroupHealth, HealthState, JitterCause
from pingpongd.jitter_judge import Verdict
from pingpongd.jitter_rules import Finding

RECOVERING_S: Final = 5.0
LONGEST_QUIET_S: Final = 25.0
"""Whatever happens again and again: an episode is over half a minute after its last late token."""
_REPEAT_S = 60.0
_HELD_S = 300.0
"""A cause that seems to go on keeps an idle group out for so long at most: evidence can be misread."""
_WEAK, _WEAK_UNKNOWN = 3, 10
"""Seconds in a row that have to point to a less telling cause before it is believed, or to none."""
_MOST_CHAINS = 100
ADOPT_S: Final = 600
"""A group that has been slow, and for no reason that can be seen, for so many seconds is taken to be like this."""
ADOPT_GUESS_S: Final = 60
"""The same where what is usual was only guessed."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an episode so far; times in seconds, by the clock of the ticks."""

    number: int
    finding: Finding
    first_late_s: float
    last_late_s: float
    tokens: int = 0
    late: int = 0
    lost_ms: float = 0.0
    worst_ms: float = 0.0
    chains: tuple[str, ...] = ()
    after: tuple[int, int, float] = (0, 0, 0.0)
    """Tokens, late ones and ms lost since the last second in trouble: they count if another one comes."""
    seconds: dict[JitterCause, int] = {}
    """That pointed to each cause."""
    weak: int = 0
    """In a row, those that pointed to a less telling cause than the one that is believed."""
    slow_s: int = 0
    """With a slow median or many late tokens, and no reason for it."""
    relapses: int = 0
    """Times that tokens came late while the group was recovering."""


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """Of one group."""

    health: HealthState = "healthy"
    since_s: float = 0.0
    slowdown: float = 1.0
    episode: Episode | None = None
    episodes: int = 0
    ended_s: float | None = None
    """The last one."""
    repeats: int = 0
    """Times in a row that an episode has begun soon after the one before had ended."""
    last: Finding | None = None
    """Of the episode that goes on or has just ended."""


class Named(msgspec.Struct, frozen=True):
    """Whose it is, for the records."""

    worker: str
    devices: list[str]
    instance: str
    """Unique for the daemon's life."""

    def episode(self, number: int) -> str:
        """Name of an episode."""
        return f"{self.instance}-{self.worker}-{number}"


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """One second."""

    at_s: float
    verdict: Verdict
    finding: Finding | None = None
    """Needed where there is trouble."""
    chains: Sequence[str] = ()
    """Ids of those that have hops on the group."""
    in_force: bool = False
    """The group does nothing, and the cause of the episode can be seen to go on."""
    quiet_s: float = 10.0


def step(state: GroupState, tick: Tick, named: Named) -> tuple[GroupState, list[Record]]:
    """Take a second: the state after it, and what there is to log."""
    if tick.verdict.troubles:
        assert tick.finding is not None  # noqa: S101 - the caller gives one with trouble
        return _late(state, tick, tick.finding, named)
    if state.episode is None:
        return state, []
    return _quiet(state, state.episode, tick, named)


def adopted(state: GroupState) -> bool:
    """Whether what the group takes is to be its usual from now on."""
    return state.episode is not None and state.episode.slow_s >= ADOPT_S


def ended(state: GroupState, at_s: float, why: str, named: Named) -> tuple[GroupState, list[Record]]:
    """End the episode that goes on, if any: its group's worker is gone, or what it takes is usual now."""
    if state.episode is None:
        return state, []
    return _over(state, state.episode, at_s, why, named)


def health(state: GroupState, at_s: float) -> GroupHealth:
    """As others see it."""
    last = state.last
    return GroupHealth(
        state=state.health,
        cause=last.cause if last else None,
        why=last.why if last else "",
        since_s=round(max(0.0, at_s - state.since_s), 1),
        slowdown=round(state.slowdown, 3) if state.health != "healthy" else 1.0,
        episodes=state.episodes,
    )


def _late(state: GroupState, tick: Tick, found: Finding, named: Named) -> tuple[GroupState, list[Record]]:
    verdict, records = tick.verdict, list[Record]()
    episode = state.episode
    if episode is None:
        repeated = state.ended_s is not None and tick.at_s - state.ended_s <= _REPEAT_S
        episode = Episode(number=state.episodes + 1, finding=found, first_late_s=tick.at_s - 1.0, last_late_s=tick.at_s)
        state = msgspec.structs.replace(
            state, episodes=episode.number, repeats=state.repeats + 1 if repeated else 0, ended_s=None
        )
        records.append(
            DecodeJitter(
                episode=named.episode(episode.number),
                worker=named.worker,
                devices=named.devices,
                cause=found.cause,
                why=found.why,
                evidence=found.evidence,
                p50_ms=round(verdict.p50_ms, 2),
                p99_ms=round(verdict.p99_ms, 2),
                worst_ms=round(verdict.worst_ms, 1),
                late_share=round(verdict.late_share, 4),
                usual_ms=round(verdict.usual_ms, 2),
                slowdown=round(verdict.slowdown, 3),
            )
        )
    before = episode.finding
    episode = _believe(episode, found)
    if episode.finding.cause != before.cause:
        records.append(
            DecodeJitterCause(
                episode=named.episode(episode.number),
                worker=named.worker,
                cause=episode.finding.cause,
                was=before.cause,
                why=episode.finding.why,
                evidence=episode.finding.evidence,
            )
        )
    unexplained = found.cause == "unknown" and not {"median", "late"}.isdisjoint(verdict.troubles)
    weight = ADOPT_S // ADOPT_GUESS_S if verdict.guessed else 1
    episode = msgspec.structs.replace(
        _counted(episode, verdict, tick.chains),
        last_late_s=tick.at_s,
        seconds=episode.seconds | {found.cause: episode.seconds.get(found.cause, 0) + 1},
        slow_s=episode.slow_s + weight if unexplained else 0,
        relapses=episode.relapses + (state.health == "recovering"),
    )
    state = msgspec.structs.replace(
        state, episode=episode, last=episode.finding, slowdown=max(1.0, tick.verdict.slowdown)
    )
    state, changed = _becomes(state, "degraded", tick.at_s, episode.finding.why, named)
    return state, [*records, *changed]


def _quiet(state: GroupState, episode: Episode, tick: Tick, named: Named) -> tuple[GroupState, list[Record]]:
    quiet_s = tick.at_s - episode.last_late_s
    asked_s = min(LONGEST_QUIET_S, tick.quiet_s * 2.0**state.repeats)
    if tick.in_force and quiet_s < _HELD_S:
        return state, []
    if tick.verdict.tokens:
        tokens, late, lost_ms = episode.after
        since = (tokens + tick.verdict.tokens, late + tick.verdict.late, lost_ms + tick.verdict.lost_ms)
        episode = msgspec.structs.replace(episode, after=since)
        state = msgspec.structs.replace(state, episode=episode, slowdown=tick.verdict.slowdown)
    if quiet_s >= asked_s:
        return _over(state, episode, tick.at_s, f"no late token for {quiet_s:.0f} s", named)
    if state.health == "degraded" and quiet_s >= RECOVERING_S * (1 + episode.relapses):
        return _becomes(state, "recovering", tick.at_s, f"no late token for {quiet_s:.0f} s", named)
    return state, []


def _believe(episode: Episode, found: Finding) -> Episode:
    """The cause that is believed after another second: a more telling one at once, a less telling one when it stays."""
    held = episode.finding
    if found.cause == held.cause or found.rank < held.rank:
        return msgspec.structs.replace(episode, finding=found, weak=0)
    if episode.weak + 1 >= (_WEAK_UNKNOWN if found.cause == "unknown" else _WEAK):
        return msgspec.structs.replace(episode, finding=found, weak=0)
    return msgspec.structs.replace(episode, weak=episode.weak + 1)


def _counted(episode: Episode, verdict: Verdict, chains: Iterable[str]) -> Episode:
    tokens, late, lost_ms = episode.after
    return msgspec.structs.replace(
        episode,
        tokens=episode.tokens + tokens + verdict.tokens,
        late=episode.late + late + verdict.late,
        lost_ms=episode.lost_ms + lost_ms + verdict.lost_ms,
        after=(0, 0, 0.0),
        worst_ms=max(episode.worst_ms, verdict.worst_ms),
        chains=tuple(dict.fromkeys((*episode.chains, *chains)))[:_MOST_CHAINS],
    )


def _over(state: GroupState, episode: Episode, at_s: float, why: str, named: Named) -> tuple[GroupState, list[Record]]:
    cause = max(episode.seconds, key=lambda cause: episode.seconds[cause])
    record = DecodeJitterEnded(
        episode=named.episode(episode.number),
        worker=named.worker,
        devices=named.devices,
        cause=cause,
        seconds=round(episode.last_late_s - episode.first_late_s, 1),
        tokens=episode.tokens,
        late=episode.late,
        lost_ms=round(max(0.0, episode.lost_ms), 1),
        chains=list(episode.chains),
        worst_ms=round(episode.worst_ms, 1),
    )
    state = msgspec.structs.replace(state, episode=None, ended_s=at_s, slowdown=1.0)
    state, changed = _becomes(state, "healthy", at_s, why, named)
    return state, [record, *changed]


def _becomes(
    state: GroupState, to: HealthState, at_s: float, why: str, named: Named
) -> tuple[GroupState, list[Record]]:
    if state.health == to:
        return state, []
    cause = state.last.cause if state.last else None
    record = GroupHealthChanged(worker=named.worker, state=to, was=state.health, cause=cause, why=why)
    return msgspec.structs.replace(state, health=to, since_s=at_s), [record]
