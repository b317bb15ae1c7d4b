"""The jitter watchdog: heartbeats and probes in; each group's health, and the log of its episodes, out.

Each group is judged with its heartbeats, every second; one whose worker says nothing is judged by the clock. What is
judged, and how, stands in the pure files: `jitter_group.py` joins them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pingpong_bus.log_records import DecodeJitterEnded, Record
from pingpong_bus.messages import GroupHealth, Heartbeat
from pingpongd.config import DaemonConfig, JitterConfig
from pingpongd.itl_window import ItlWindow
from pingpongd.jitter_episodes import Named
from pingpongd.jitter_group import JitterGroup
from pingpongd.logs import log_record
from pingpongd.probes import Probes, ProbeSample
from pingpongd.worker_handle import Worker

_JUDGE_S = 0.9
"""At least between two judgements of a group; heartbeats come every second, more or less."""
_UNHEARD_S = 1.5
"""A group of which nothing was heard for so long is judged all the same."""
_TICK_S = 1.0
_STALE_S, _STALE_LOOKS = 15.0, 3.0
"""A look is worth nothing after so long, and so many times the time between two: a driver may hang, and the thread in
it."""
_HELD_UP_S = 1.0
"""Where this process was held up for so long, it says nothing that workers were silent meanwhile."""


class ProbeSource(Protocol):
    """What `Probes` are asked; see there."""

    def start(self) -> None:
        """Begin to look."""

    def stop(self) -> None:
        """Look no more."""

    def configure(self, config: JitterConfig) -> None:
        """Go on by another configuration."""

    def watch(self, name: str, pids: Sequence[int], devices: Sequence[str]) -> None:
        """Look at this group from now on."""

    def suspect(self, name: str, suspected: bool) -> None:
        """Its tokens come late, or do no more."""

    def forget(self, name: str) -> None:
        """Look at it no more."""

    def latest(self, name: str) -> ProbeSample | None:
        """The latest look at a group."""


class _Watched:
    """A group, and what this process knows of it."""

    def __init__(self, worker: Worker, instance: str) -> None:
        self.worker = worker
        self.group = JitterGroup(Named(worker.name, list(worker.group.devices), instance))
        self.itl = ItlWindow()
        self.looked_s = 0.0
        """When the look was taken that was heard of last."""


class JitterWatch:
    """Watches all groups; belongs to the running event loop."""

    def __init__(
        self,
        workers: Mapping[str, Worker],
        config: Callable[[], DaemonConfig],
        changed: Callable[[Worker], None],
        probes: ProbeSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        workers: all there are, by name.
        config: gives the present configuration.
        changed: called with a worker whose health has changed its state.
        probes: of processes and devices; None: those of this machine.
        clock: in seconds; the same as the probes'.
        """
        self._config = config
        self._changed = changed
        self._clock = clock
        self._enabled = config().jitter.enabled
        self._probes: ProbeSource = probes if probes is not None else Probes(config().jitter)
        # Of a daemon's life: restarts count episodes anew.
        instance = f"{config().instance}-{secrets.token_hex(3)}"
        self._watched = {name: _Watched(worker, instance) for name, worker in workers.items()}
        self._ticked_s = clock()

    async def run(self) -> None:
        """Look after groups that say nothing, for ever."""
        if self._enabled:
            self._probes.start()
        self._ticked_s = self._clock()
        while True:
            await asyncio.sleep(_TICK_S)
            self.tick()

    def tick(self) -> None:
        """Judge the groups of which nothing was heard for a while; to be called every second."""
        now = self._clock()
        held_up = now - self._ticked_s > _TICK_S + _HELD_UP_S
        self._ticked_s = now
        for watched in self._watched.values():
            judged_s = watched.group.judged_s
            serves = watched.worker.state in ("ready", "draining")
            if serves and not held_up and judged_s is not None and now - judged_s >= _UNHEARD_S:
                self._judge(watched, now)

    def close(self) -> None:
        """Look no more; what episodes that go on have cost is logged."""
        self._probes.stop()
        for watched in self._watched.values():
            for record in watched.group.end(self._clock(), "the daemon stops"):
                if isinstance(record, DecodeJitterEnded):  # nobody knows that the group is well
                    log_record(record)

    def apply(self) -> None:
        """The configuration was read again."""
        jitter = self._config().jitter
        self._probes.configure(jitter)
        if jitter.enabled == self._enabled:
            return
        self._enabled = jitter.enabled
        if jitter.enabled:
            self._probes.start()
            return
        self._probes.stop()
        for watched in self._watched.values():
            self._end(watched, "jitter is not watched any more")

    def begins(self, worker: Worker) -> None:
        """A worker is about to be started: what is on its devices now is not its own."""
        watched = self._watched[worker.name]
        watched.group.begin()
        watched.itl = ItlWindow()
        if self._enabled:
            self._probes.watch(worker.name, [], worker.group.devices)

    def gone(self, worker: Worker) -> None:
        """A worker's process has ended."""
        self._probes.forget(worker.name)
        self._end(self._watched[worker.name], "its worker is gone")

    def beat(self, worker: Worker, message: Heartbeat) -> None:
        """Take a heartbeat of a worker that serves."""
        watched, now = self._watched[worker.name], self._clock()
        group = watched.group
        if worker.figures is not group.figures:
            group.measured(worker.figures)
        if self._enabled and message.pids:
            self._probes.watch(worker.name, message.pids, worker.group.devices)
        self._look(watched, now)
        group.beat(message, now, worker.heartbeat_s)
        if group.judged_s is None or now - group.judged_s >= _JUDGE_S:
            self._judge(watched, now)

    def _look(self, watched: _Watched, now: float) -> None:
        sample = self._probes.latest(watched.worker.name)
        longest_s = max(_STALE_S, _STALE_LOOKS * self._config().jitter.probe_s)
        if sample is None or now - sample.at_s > longest_s:
            if watched.worker.host is not None:
                watched.worker.host, watched.worker.gpus = None, []
                watched.group.looks.forget_processes()
            return
        if sample.at_s <= watched.looked_s:
            return
        watched.looked_s = sample.at_s
        watched.worker.host, watched.worker.gpus = sample.host, sample.gpus
        if sample.gpus:
            uuids = [state.uuid for state in sample.gpus]
            if uuids != watched.group.named.devices:
                named = watched.group.named
                watched.group.named = Named(named.worker, uuids, named.instance)
        watched.group.look(sample.host, sample.gpus)

    def _judge(self, watched: _Watched, now: float) -> None:
        worker, group, config = watched.worker, watched.group, self._config()
        if self._enabled:
            records = group.judge(
                now,
                heartbeat_s=worker.heartbeat_s,
                allowed=config.decode_first.inner,
                quiet_s=config.jitter.quiet_s,
                chains=sorted({hop.split("/", 1)[0] for hop in worker.hops}),
                peers=self._peers(worker),
            )
        else:
            records = group.count(now)
        watched.itl.take(now, group.second.counts, group.verdict)
        worker.itl = watched.itl.summary()
        self._tell(watched, records, now)
        steps = watched.itl.steps(now, config.jitter.log_s, worker.name, group.named.devices)
        if steps is not None:
            log_record(steps)

    def _tell(self, watched: _Watched, records: list[Record], now: float) -> None:
        """Log what has happened, and let others know of the group's health."""
        worker, before = watched.worker, watched.worker.health.state
        worker.health = watched.group.health(now) if self._enabled else GroupHealth()
        for record in records:
            log_record(record)
        self._probes.suspect(worker.name, worker.health.state != "healthy")
        if worker.health.state != before:
            self._changed(worker)

    def _end(self, watched: _Watched, why: str) -> None:
        now = self._clock()
        self._tell(watched, watched.group.end(now, why), now)

    def _peers(self, worker: Worker) -> list[JitterGroup]:
        """Groups whose engines are of the same kind, and should take as long."""
        kind = _kind(worker)
        return [
            other.group
            for other in self._watched.values()
            if other.worker is not worker and kind is not None and _kind(other.worker) == kind
        ]


def _kind(worker: Worker) -> tuple[object, ...] | None:
    limits, group = worker.limits, worker.group
    if limits is None:
        return None
    own = (repr(sorted(group.vllm.items())), repr(sorted(group.environment.items())), group.simulated)
    return limits.device, limits.engine, limits.model, limits.dtype, len(group.devices), *own
