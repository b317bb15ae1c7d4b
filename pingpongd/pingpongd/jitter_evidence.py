"""What was measured while a group's tokens came late, next to what is usual there. Pure.

A look at processes and devices does not fall on the very second that it explains, so evidence is the worst of the
latest few looks; and it only counts against what the group shows while all is well: a GPU that is always at its power
cap is not slow because of that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from pingpong_bus.messages import DeviceState, HostState
from pingpongd.jitter_judge import Verdict

_LOOKS = 3
"""The worst of so many looks counts."""
_MEMORY = 0.03
"""What one healthy look counts of the usual."""
_MEMORY_OF_LOW = 0.3
"""The same of a clock that is lower: one that falls again and again while tokens come in time, as for prompts at the
power cap, is usual there."""
_OFTEN = 0.2
"""A reason is usual that is in force in this part of the healthy looks."""
_MOST_PIDS = 64

HOST_FIELDS: Final = (
    "runnable_wait",
    "involuntary_switches",
    "steal",
    "major_faults",
    "pressure_cpu",
    "pressure_memory",
    "pressure_io",
    "throttled",
)
"""Of HostState: rates, of which the highest counts."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU in the latest looks, and what is usual there."""

    state: DeviceState
    """The look at the lowest clock."""
    reasons: frozenset[str]
    """For reduced clocks, in force at any of the looks."""
    usual_reasons: frozenset[str] = frozenset()
    usual_mhz: float | None = None
    """Rather the lower ones of those that are usual while it computes."""
    foreign: float | None = None
    """The part of the time in which others' processes computed there, 0 to 1; None: the driver does not say."""
    usual_foreign: float = 0.0
    new_pids: tuple[int, ...] = ()
    """Others' processes that were not there while all was well."""
    ecc_errors: int = 0
    """New ones."""
    xid: int | None = None
    """A new one."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a group whose tokens come late."""

    verdict: Verdict
    host: dict[str, float] = {}
    """By name in `HOST_FIELDS`: the highest of the latest looks; what the kernel does not say is left out."""
    usual: dict[str, float] = {}
    """The same while all was well."""
    swapped_bytes: int = 0
    """Swapped out anew."""
    gpus: tuple[Device, ...] = ()
    gc_worker_ms: float = 0.0
    """What collections of garbage took in the latest two seconds."""
    gc_engine_ms: float = 0.0
    loop_late_ms: float = 0.0
    """The latest that the worker's event loop was in the latest two seconds."""
    peers: int = 0
    peers_late: int = 0
    """Groups of the same kind, and those of them whose tokens come late now, too."""

    def above(self, name: str, floor: float, over: float = 0.0) -> bool:
        """Whether a rate of the host is at least `floor`, and clearly more than usual: by `over`, and either twice as
        much or, of a part of the time, so much that a quarter less than usual is left."""
        found, usual = self.host.get(name), self.usual.get(name, 0.0)
        if found is None or found < max(floor, usual + over):
            return False
        return found >= 2.0 * usual or 0.0 <= 1.0 - found <= 0.75 * (1.0 - usual)


def _idle(state: DeviceState) -> bool:
    return "gpu_idle" in state.throttle


class _DeviceLooks:
    """What is usual of one GPU."""

    def __init__(self) -> None:
        self.mhz: float | None = None
        self.reasons: dict[str, float] = {}
        self.foreign = 0.0
        self.pids = set[int]()
        self.ecc_errors: int | None = None
        self.xid: tuple[int | None, int] = None, 0
        """The latest, and how many there were: the same one may come again."""

    def learn(self, state: DeviceState) -> None:
        if state.sm_mhz is not None and not _idle(state):
            known = state.sm_mhz if self.mhz is None else self.mhz
            memory = _MEMORY if state.sm_mhz > known else _MEMORY_OF_LOW
            self.mhz = known + memory * (state.sm_mhz - known)
        for reason in {*self.reasons, *state.throttle}:
            part = self.reasons.get(reason, 0.0)
            self.reasons[reason] = part + _MEMORY * ((reason in state.throttle) - part)
        if state.foreign_utilization is not None:
            self.foreign += _MEMORY * (state.foreign_utilization - self.foreign)
        self.pids = set(state.foreign_pids[:_MOST_PIDS])
        self.ecc_errors, self.xid = state.ecc_errors, (state.xid, state.xids)

    def device(self, looks: Sequence[DeviceState]) -> Device:
        # Nothing holds the clock of an idle card down, and its is the lowest of all.
        busy = [state for state in looks if not _idle(state)] or looks
        lowest = min(busy, key=lambda state: state.sm_mhz if state.sm_mhz is not None else 1 << 30)
        latest = looks[-1]
        shares = [state.foreign_utilization for state in looks if state.foreign_utilization is not None]
        new_ecc = (latest.ecc_errors or 0) - self.ecc_errors if self.ecc_errors is not None else 0
        return Device(
            state=lowest,
            reasons=frozenset(reason for state in looks for reason in state.throttle),
            usual_reasons=frozenset(reason for reason, part in self.reasons.items() if part >= _OFTEN),
            usual_mhz=self.mhz,
            foreign=max(shares) if shares else None,
            usual_foreign=self.foreign,
            new_pids=tuple(sorted({pid for state in looks for pid in state.foreign_pids} - self.pids)[:_MOST_PIDS]),
            ecc_errors=max(0, new_ecc),
            xid=latest.xid if (latest.xid, latest.xids) != self.xid else None,
        )


class Looks:
    """The looks at one group: the latest, and what they are like while all is well."""

    def __init__(self) -> None:
        self._hosts = deque[HostState](maxlen=_LOOKS)
        self._gpus = deque[Sequence[DeviceState]](maxlen=_LOOKS)
        self._usual: dict[str, float] = {}
        self._swapped: int | None = None
        self._devices: dict[str, _DeviceLooks] = {}
        self._gc = deque[tuple[float, float, float]](maxlen=2)

    def forget_processes(self) -> None:
        """Others run there from now on: those of a new start."""
        self._hosts.clear()
        self._gpus.clear()
        self._gc.clear()
        self._swapped = None

    def look(self, host: HostState, gpus: Sequence[DeviceState]) -> None:
        """Take a look."""
        self._hosts.append(host)
        self._gpus.append(gpus)
        for state in gpus:
            if state.uuid not in self._devices:  # what had happened to it before is no news
                self._devices[state.uuid] = known = _DeviceLooks()
                known.ecc_errors, known.xid = state.ecc_errors, (state.xid, state.xids)
                known.pids = set(state.foreign_pids[:_MOST_PIDS])

    def process(self, gc_worker_ms: float, gc_engine_ms: float, loop_late_ms: float) -> None:
        """Take what the worker says of a second."""
        self._gc.append((gc_worker_ms, gc_engine_ms, loop_late_ms))

    def learn(self, host: HostState, gpus: Sequence[DeviceState]) -> None:
        """This look was one at a group that decoded, and whose tokens came in time then and for some time after."""
        for name in HOST_FIELDS:
            value = getattr(host, name)
            if value is not None:
                known = self._usual.get(name, value)
                self._usual[name] = known + _MEMORY * (value - known)
        self._swapped = host.swapped_bytes
        for state in gpus:
            self._devices.setdefault(state.uuid, _DeviceLooks()).learn(state)

    def devices(self) -> tuple[Device, ...]:
        """The GPUs as evidence."""
        uuids = [state.uuid for state in self._gpus[-1]] if self._gpus else []
        return tuple(
            self._devices[uuid].device([state for look in self._gpus for state in look if state.uuid == uuid])
            for uuid in uuids
        )

    def evidence(self, verdict: Verdict, peers: int = 0, peers_late: int = 0) -> Evidence:
        """All that is known now."""
        swapped = self._hosts[-1].swapped_bytes if self._hosts else None
        return Evidence(
            verdict=verdict,
            host={name: max(found) for name in HOST_FIELDS if (found := _told(self._hosts, name))},
            usual=dict(self._usual),
            swapped_bytes=max(0, (swapped or 0) - self._swapped) if self._swapped is not None else 0,
            gpus=self.devices(),
            gc_worker_ms=sum(worker for worker, _, _ in self._gc),
            gc_engine_ms=sum(engine for _, engine, _ in self._gc),
            loop_late_ms=max((late for _, _, late in self._gc), default=0.0),
            peers=peers,
            peers_late=peers_late,
        )


def _told(hosts: Iterable[HostState], name: str) -> list[float]:
    return [value for host in hosts if (value := getattr(host, name)) is not None]
