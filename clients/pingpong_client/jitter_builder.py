"""Makes the jitter report from the log's lines as they come, in bounded memory. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from pingpong_bus.log_records import (
    DecodeJitter,
    DecodeJitterCause,
    DecodeJitterEnded,
    DecodeSteps,
    GroupHealthChanged,
    HopMoved,
    Record,
)
from pingpong_bus.messages import JitterCause
from pingpong_client.jitter_report import Cause, CauseChange, Episode, EpisodeState, Group, JitterReport, Move
from pingpong_client.jitter_series import Series
from pingpong_client.log_lines import LogLine, parse_line, parse_record

MOST_EPISODES: Final = 1000
_MOST_GROUPS: Final = 1000
_MOST_CHAINS: Final = 100_000
_MOST_MOVES: Final = 200
_MOST_CHANGES: Final = 20
_NOTICED_S: Final = 1.0
"""An episode is logged at the end of the second that it begins with."""
_DAEMON_ENDS: Final = frozenset({"daemon_started", "daemon_stopped", "daemon_failed"})


class _Instance(msgspec.Struct):
    instance: str = ""
    """Where a line does not say, all are meant."""

    def has(self, episode: str) -> bool:
        """Whether an episode is its own. Names of instances may have hyphens, so that one can begin with another."""
        return not self.instance or re.match(rf"{re.escape(self.instance)}-[0-9a-f]{{6}}-", episode) is not None


class _Episode:
    """An episode that is still heard of."""

    def __init__(self, at: float, record: DecodeJitter | DecodeJitterCause | DecodeJitterEnded) -> None:
        self.id, self.worker, self.began = record.episode, record.worker, at - _NOTICED_S
        self.devices: list[str] = []
        self.cause: JitterCause = record.cause
        self.why, self.evidence, self.changes = "", dict[str, float](), list[CauseChange]()
        self.usual_ms = self.slowdown = self.worst_ms = 0.0
        self.state: EpisodeState = "going on"
        self.ended: float | None = None
        self.end: DecodeJitterEnded | None = None

    def begin(self, at: float, record: DecodeJitter) -> None:
        self.devices, self.usual_ms, self.slowdown = record.devices, record.usual_ms, record.slowdown
        self.worst_ms = max(self.worst_ms, record.worst_ms)
        self.change(at, record)

    def change(self, at: float, record: DecodeJitter | DecodeJitterCause) -> None:
        self.cause, self.why, self.evidence = record.cause, record.why, record.evidence
        if len(self.changes) < _MOST_CHANGES:
            self.changes.append(CauseChange(at=at, cause=record.cause, why=record.why))

    def finish(self, at: float, record: DecodeJitterEnded) -> None:
        if not self.changes:  # it began before the log does
            self.began = min(at, max(0.0, at - record.seconds))
        self.devices, self.cause, self.end, self.state = record.devices, record.cause, record, "over"
        self.ended = min(at, self.began + record.seconds)
        self.worst_ms = max(self.worst_ms, record.worst_ms)
        # The words that go with the cause it was, and not with the last one that it was taken for.
        fitting = [one.why for one in self.changes if one.cause == self.cause]
        if fitting:
            self.why = fitting[-1]
        elif self.changes:
            self.why = f"taken for {self.changes[-1].cause.replace('_', ' ')} at first: {self.why}"

    def report(self) -> Episode:
        end = self.end
        return Episode(
            id=self.id,
            worker=self.worker,
            devices=self.devices,
            began=self.began,
            ended=self.ended,
            state=self.state,
            cause=self.cause,
            why=self.why,
            evidence=self.evidence,
            causes=self.changes,
            usual_ms=self.usual_ms,
            slowdown=self.slowdown,
            worst_ms=self.worst_ms,
            seconds=end.seconds if end else None,
            tokens=end.tokens if end else None,
            late=end.late if end else None,
            lost_ms=end.lost_ms if end else None,
            chains=end.chains if end else [],
        )


class _Cost:
    """What episodes of a group, or of a cause, have cost."""

    def __init__(self) -> None:
        self.episodes, self.seconds, self.lost_ms = 0, 0.0, 0.0
        self.chains: set[str] = set()

    def add(self, end: DecodeJitterEnded) -> None:
        self.seconds += end.seconds
        self.lost_ms += end.lost_ms
        for chain in end.chains:
            if len(self.chains) < _MOST_CHAINS:
                self.chains.add(chain)


class _Group:
    def __init__(self, worker: str, devices: list[str]) -> None:
        self.worker, self.devices = worker, devices
        self.series, self.cost = Series(), _Cost()


class JitterBuilder:
    """Takes lines, in any order but for an episode's own, and gives the report at any time.

    Args:
        since: lines before it are passed over; seconds since 1970.
        until: lines after it are.
    """

    def __init__(self, since: float | None = None, until: float | None = None) -> None:
        self._since, self._until = since, until
        self._lines = self._foreign = self._left_out = self._moved = 0
        self._saved_ms = 0.0
        self._began: float | None = None
        self._ended: float | None = None
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._episodes: dict[str, _Episode] = {}
        self._causes: dict[JitterCause, _Cost] = {}
        self._moves: deque[Move] = deque(maxlen=_MOST_MOVES)
        self._avoided: dict[str, float] = {}
        """Seconds by worker."""
        self._degraded: dict[str, float] = {}
        """Since when, of workers that are."""

    @property
    def heard(self) -> bool:
        """Whether any line was the daemon's."""
        return self._lines > self._foreign

    def feed(self, lines: Iterable[bytes]) -> list[tuple[LogLine, Record]]:
        """Take lines; returns the records in them that fall into the time."""
        found = []
        for data in lines:
            if data.isspace():
                continue
            self._lines += 1
            line = parse_line(data)
            if line is None:
                self._foreign += 1
            elif (self._since is None or line.at >= self._since) and (self._until is None or line.at <= self._until):
                self._began = line.at if self._began is None else min(self._began, line.at)
                self._ended = line.at if self._ended is None else max(self._ended, line.at)
                if line.event in _DAEMON_ENDS:
                    self._cut(line)
                record = parse_record(line)
                if record is not None:
                    self._take(line.at, record)
                    found.append((line, record))
        return found

    def report(self) -> JitterReport:
        """What was taken so far."""
        return JitterReport(
            began=self._began,
            ended=self._ended,
            lines=self._lines,
            foreign=self._foreign,
            groups=[self._group_report(one) for _, one in sorted(self._groups.items())],
            episodes=sorted((one.report() for one in self._episodes.values()), key=lambda one: (one.began, one.id)),
            left_out=self._left_out,
            causes=sorted(
                (
                    Cause(
                        cause=cause,
                        episodes=cost.episodes,
                        seconds=cost.seconds,
                        lost_ms=cost.lost_ms,
                        chains=len(cost.chains),
                    )
                    for cause, cost in self._causes.items()
                ),
                key=lambda one: (-one.lost_ms, -one.episodes, one.cause),
            ),
            moves=list(self._moves),
            moved=self._moved,
            moves_saved_ms=self._saved_ms,
        )

    def _take(self, at: float, record: Record) -> None:
        match record:
            case DecodeSteps():
                group = self._group(record.worker, record.devices)
                if group is not None:
                    group.series.add(at, record)
            case DecodeJitter():
                self._episode(at, record).begin(at, record)
            case DecodeJitterCause():
                self._episode(at, record).change(at, record)
            case DecodeJitterEnded():
                self._over(at, record)
            case GroupHealthChanged(worker=worker, state="degraded"):
                self._degraded.setdefault(worker, at)
            case GroupHealthChanged(worker=worker, state="healthy"):
                self._avoid(worker, at)
            case HopMoved():
                self._moved += 1
                self._saved_ms += record.left_ms - record.there_ms
                self._moves.append(
                    Move(
                        at=at,
                        chain=record.chain,
                        agent=record.agent,
                        worker=record.worker,
                        to=record.to,
                        tokens=record.tokens,
                        left_ms=record.left_ms,
                        there_ms=record.there_ms,
                        cause=record.cause,
                    )
                )

    def _over(self, at: float, record: DecodeJitterEnded) -> None:
        self._episode(at, record).finish(at, record)
        group = self._group(record.worker, record.devices)
        costs = [self._causes.setdefault(record.cause, _Cost()), *([group.cost] if group else [])]
        for cost in costs:
            cost.episodes += 1
            cost.add(record)

    def _episode(self, at: float, record: DecodeJitter | DecodeJitterCause | DecodeJitterEnded) -> _Episode:
        found = self._episodes.get(record.episode)
        if found is None:
            found = self._episodes[record.episode] = _Episode(at, record)
            if len(self._episodes) > MOST_EPISODES:
                # What goes on is dear, too, as far as anybody knows; but the one at hand has to stay.
                others = [one for one in self._episodes.values() if one is not found]
                cheap = min(others, key=lambda one: (one.end is None and one.state != "cut", _lost(one), one.began))
                del self._episodes[cheap.id]
                self._left_out += 1
        return found

    def _group(self, worker: str, devices: list[str]) -> _Group | None:
        key = (worker, *devices)
        found = self._groups.get(key)
        if found is None and len(self._groups) < _MOST_GROUPS:
            found = self._groups[key] = _Group(worker, devices)
        return found

    def _avoid(self, worker: str, at: float) -> None:
        began = self._degraded.pop(worker, None)
        if began is not None:
            self._avoided[worker] = self._avoided.get(worker, 0.0) + max(0.0, at - began)

    def _cut(self, line: LogLine) -> None:
        """A daemon begins or ends: what went on there is over, and nobody says how."""
        at = line.at
        try:
            instance = msgspec.json.decode(line.data, type=_Instance)
        except msgspec.ValidationError:  # another program's event of that name
            return
        for episode in self._episodes.values():
            if episode.state == "going on" and episode.began <= at and instance.has(episode.id):
                episode.state, episode.ended = "cut", at
        for worker in list(self._degraded):
            self._avoid(worker, at)

    def _group_report(self, group: _Group) -> Group:
        series, cost = group.series, group.cost
        unfinished = sum(
            one.end is None and (one.worker, *one.devices) == (group.worker, *group.devices)
            for one in self._episodes.values()
        )
        avoided = self._avoided.get(group.worker, 0.0)
        if group.worker in self._degraded and self._ended is not None:
            avoided += max(0.0, self._ended - self._degraded[group.worker])
        return Group(
            worker=group.worker,
            devices=group.devices,
            tokens=series.tokens,
            p50_ms=series.p50_ms,
            p99_ms=series.p99_ms,
            worst_ms=series.worst_ms,
            late=series.late,
            usual_ms=series.usual_ms,
            appends_tokens=series.appends_tokens,
            episodes=cost.episodes + unfinished,
            late_seconds=cost.seconds,
            avoided_seconds=avoided,
            lost_ms=cost.lost_ms,
            chains=len(cost.chains),
            points=list(series.points()),
        )


def _lost(episode: _Episode) -> float:
    return episode.end.lost_ms if episode.end is not None else 0.0
