"""Why tokens come late: a table of rules from evidence to cause. Pure.

The first row that applies names the cause, so rows stand in the order of how telling they are: what was seen on the
very device or in the very process before what was seen on the machine. A sentence names the numbers, for a person reads
it at night.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from pingpong_bus.messages import JitterCause
from pingpongd.jitter_evidence import Device, Evidence

_CLOCK_FELL = 0.93
"""A clock has fallen that is below this part of the usual."""
_FOREIGN = 0.05
"""Others' processes disturb that compute for this part of the time."""
_WAIT, _WAIT_OVER = 0.10, 0.08
_THROTTLED = 0.05
_STEAL, _STEAL_OVER = 0.08, 0.06
_PRESSURE_CPU, _PRESSURE_CPU_OVER = 0.30, 0.20
_OWN_WAIT = 0.05
"""Tasks that wait for a core are others' where the group's own busiest thread waits less."""
_PRESSURE_MEMORY = 0.05
_FAULTS = 20.0
"""Major faults a second of the group's processes: each waits for a disk."""
_SWAPPED = 8 << 20
_GC_MS, _GC_PART = 20.0, 0.5
"""Collections explain a wait of which they took this part."""
_STILL_PART = 0.6
"""The event loop was late by this part of the wait: it is the worker that stood still, not the engine."""


class Finding(msgspec.Struct, frozen=True):
    """A cause, and the evidence for it."""

    cause: JitterCause
    row: str
    """Of the table."""
    why: str
    rank: int
    """The smaller, the more telling."""
    evidence: dict[str, float]


class Row(msgspec.Struct, frozen=True):
    """One rule."""

    name: str
    cause: JitterCause
    applies: Callable[[Evidence], bool]
    sentence: Callable[[Evidence], str]
    """Asked only where it applies; a clause."""


# --------------------------------------------------------------------------------------------------------- devices


def _find(evidence: Evidence, test: Callable[[Device], bool]) -> Device | None:
    return next((device for device in evidence.gpus if test(device)), None)


def _any(test: Callable[[Device], bool]) -> Callable[[Evidence], bool]:
    return lambda evidence: _find(evidence, test) is not None


def _about(test: Callable[[Device], bool], say: Callable[[Device], str]) -> Callable[[Evidence], str]:
    def sentence(evidence: Evidence) -> str:
        device = _find(evidence, test)
        assert device is not None  # noqa: S101 - the row applies
        return say(device)

    return sentence


def _named(device: Device) -> str:
    return device.state.uuid[:12]


def _faulty(device: Device) -> bool:
    return device.xid is not None or device.ecc_errors > 0


def _fault(device: Device) -> str:
    if device.xid is not None:
        return f"{_named(device)} reports XID {device.xid}"
    return f"{_named(device)} has {device.ecc_errors} new uncorrected memory errors"


def _fell(device: Device) -> bool:
    usual = device.usual_mhz or device.state.sm_max_mhz
    return device.state.sm_mhz is not None and usual is not None and device.state.sm_mhz < _CLOCK_FELL * usual


def _reasons(device: Device, *words: str) -> list[str]:
    return sorted(reason for reason in device.reasons if any(word in reason for word in words))


def _reduced(device: Device, *words: str) -> bool:
    """One of these reasons is in force that is not usual, or the clock has fallen below what is usual with it."""
    found = _reasons(device, *words)
    known = device.state.sm_mhz is not None
    return bool(found) and (_fell(device) or (not known and not device.usual_reasons.issuperset(found)))


def _hot(device: Device) -> bool:
    return _reduced(device, "thermal")


def _capped(device: Device) -> bool:
    return _reduced(device, "power", "hw_slowdown")


def _clock(*words: str) -> Callable[[Device], str]:
    def say(device: Device) -> str:
        state, reasons = device.state, ", ".join(_reasons(device, *words))
        extra = f", at {state.temperature_c} °C" if "thermal" in words and state.temperature_c is not None else ""
        if "power" in words and state.power_w is not None and state.power_limit_w:
            extra = f", at {state.power_w:,.0f} of {state.power_limit_w:,.0f} W"
        if state.sm_mhz is None:
            return f"{_named(device)} reduces its clocks ({reasons}){extra}"
        most = state.sm_max_mhz or device.usual_mhz or 0.0
        return f"the SM clock fell to {state.sm_mhz:,} of {most:,.0f} MHz ({reasons}){extra}"

    return say


def _shared(device: Device) -> bool:
    if device.foreign is not None:
        return device.foreign >= _FOREIGN and device.foreign >= 2.0 * device.usual_foreign
    return bool(device.new_pids)


def _sharing(device: Device) -> str:
    pids = device.new_pids or tuple(device.state.foreign_pids)
    who = f"process {pids[0]}" if len(pids) == 1 else f"{len(pids)} other processes" if pids else "another process"
    if device.foreign is None:
        return f"{who} came to {_named(device)}"
    return f"{who} computed on {_named(device)} for {_percent(device.foreign)} of the time"


# ------------------------------------------------------------------------------------------------------------- host


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _rate(name: str, text: str) -> Callable[[Evidence], str]:
    """A sentence about a part of the time, and what it usually is."""

    def say(evidence: Evidence) -> str:
        usual = f" (usually {_percent(evidence.usual[name])})" if name in evidence.usual else ""
        return text.format(_percent(evidence.host[name])) + usual

    return say


def _crowded(evidence: Evidence) -> bool:
    crowded = evidence.above("pressure_cpu", _PRESSURE_CPU, _PRESSURE_CPU_OVER)
    return crowded and not evidence.gpus and evidence.host.get("runnable_wait", 1.0) >= _OWN_WAIT


def _only_beside_appends(evidence: Evidence) -> bool:
    return evidence.verdict.troubles == ("appends",)


def _appends(evidence: Evidence) -> str:
    verdict = evidence.verdict
    if verdict.appends_ratio < 1.3 * verdict.allowed:
        return f"a token waited {verdict.worst_ms:,.0f} ms for appends, where {verdict.usual_ms:.3g} ms are usual"
    alone = "; tokens with nothing beside them came in time" if verdict.on_time else ""
    return (
        f"beside appends tokens take {verdict.appends_ratio:.1f} times what they take alone, where "
        f"{verdict.allowed:.1f} are allowed{alone}"
    )


def _collected(evidence: Evidence) -> bool:
    took = max(evidence.gc_worker_ms, evidence.gc_engine_ms)
    waits = {"stall", "silence", "appends"} & set(evidence.verdict.troubles)
    explains = evidence.verdict.beyond_ms if waits else evidence.verdict.lost_ms
    return took >= _GC_MS and took >= _GC_PART * explains


def _collection(evidence: Evidence) -> str:
    where = "the engine's" if evidence.gc_engine_ms >= evidence.gc_worker_ms else "the worker's"
    took = max(evidence.gc_worker_ms, evidence.gc_engine_ms)
    return f"garbage collection took {took:,.0f} ms in {where} process"


def _swapping(evidence: Evidence) -> str:
    faults = evidence.host.get("major_faults", 0.0)
    swapped = f", and {evidence.swapped_bytes >> 20:,} MiB were swapped out" if evidence.swapped_bytes else ""
    return f"its processes had {faults:,.0f} major faults a second{swapped}"


def _stood_still(evidence: Evidence) -> bool:
    return bool({"stall", "silence"} & set(evidence.verdict.troubles))


def _stall(evidence: Evidence) -> str:
    verdict = evidence.verdict
    if "silence" in verdict.troubles:
        return f"work waits, and the engine has given nothing for {verdict.silent_s:.1f} s"
    who = "the engine"
    if evidence.loop_late_ms >= _STILL_PART * verdict.worst_ms:
        who = f"the worker's process (its event loop was {evidence.loop_late_ms:,.0f} ms late)"
    usual = f" where {verdict.usual_ms:.3g} are usual" if verdict.usual_ms else ""
    return f"no token came for {verdict.worst_ms:,.0f} ms{usual}: {who} stood still"


def _unknown(evidence: Evidence) -> str:
    verdict = evidence.verdict
    device = _find(evidence, _fell)
    hint = f"; the SM clock is {device.state.sm_mhz:,} MHz, and the driver gives no reason" if device else ""
    if evidence.peers_late:
        hint += f"; {evidence.peers_late} of {evidence.peers} other groups of its kind have the same"
    late = f", {_percent(verdict.late_share)} of them late" if "late" in verdict.troubles else ""
    return (
        f"tokens take {verdict.slowdown:.2f} times the usual {verdict.usual_ms:.3g} ms{late}, and nothing that is "
        f"measured says why{hint}"
    )


TABLE: Final[tuple[Row, ...]] = (
    Row("device_fault", "device_fault", _any(_faulty), _about(_faulty, _fault)),
    Row("thermal_clock", "thermal_throttle", _any(_hot), _about(_hot, _clock("thermal"))),
    # Before the power cap: beside another process's matrices an H200 was at its cap, at 1,695 of 1,980 MHz.
    Row("foreign_process", "foreign_process", _any(_shared), _about(_shared, _sharing)),
    Row("power_clock", "power_throttle", _any(_capped), _about(_capped, _clock("power", "hw_slowdown"))),
    Row(
        "appends_alone",  # nothing from outside spares the steps that carry no appends
        "own_appends",
        lambda evidence: _only_beside_appends(evidence) and evidence.verdict.on_time,
        _appends,
    ),
    Row("collection", "garbage_collection", _collected, _collection),
    Row(
        "faulting",
        "memory_pressure",
        lambda evidence: evidence.above("major_faults", _FAULTS) or evidence.swapped_bytes >= _SWAPPED,
        _swapping,
    ),
    Row(
        "quota",
        "cpu_starvation",
        lambda evidence: evidence.above("throttled", _THROTTLED),
        _rate("throttled", "the CPU quota of its cgroup held it up for {} of the time"),
    ),
    Row(
        "memory_stalls",
        "memory_pressure",
        lambda evidence: evidence.above("pressure_memory", _PRESSURE_MEMORY),
        _rate("pressure_memory", "tasks waited for memory for {} of the time"),
    ),
    Row(
        "runnable",
        "cpu_starvation",
        lambda evidence: evidence.above("runnable_wait", _WAIT, _WAIT_OVER),
        _rate("runnable_wait", "its busiest thread was ready to run and had no core for {} of the time"),
    ),
    Row(
        "steal",
        "cpu_starvation",
        lambda evidence: evidence.above("steal", _STEAL, _STEAL_OVER),
        _rate("steal", "the hypervisor took {} of the machine's CPU time"),
    ),
    Row("appends", "own_appends", _only_beside_appends, _appends),
    Row(
        "cpu_pressure",
        "cpu_starvation",
        _crowded,
        _rate("pressure_cpu", "tasks waited for a core for {} of the time"),
    ),
    Row("stall", "engine_stall", _stood_still, _stall),
    Row("unknown", "unknown", lambda _: True, _unknown),
)
"""The most telling first."""


def cause_of(evidence: Evidence) -> Finding:
    """The most telling explanation; the last row of the table always applies."""
    rank, row = next((rank, row) for rank, row in enumerate(TABLE) if row.applies(evidence))
    return Finding(row.cause, row.name, row.sentence(evidence), rank, numbers(evidence))


def numbers(evidence: Evidence) -> dict[str, float]:
    """All of the evidence by name with unit, for logs."""
    verdict = evidence.verdict
    found: dict[str, float] = {
        name: round(value, 3) for name, value in evidence.host.items() if name not in ("involuntary_switches",)
    }
    found |= {
        "slowdown": round(verdict.slowdown, 3),
        "worst_ms": round(verdict.worst_ms, 1),
        "gc_worker_ms": round(evidence.gc_worker_ms, 1),
        "gc_engine_ms": round(evidence.gc_engine_ms, 1),
        "loop_late_ms": round(evidence.loop_late_ms, 1),
        "peers_late": evidence.peers_late,
    }
    if verdict.appends_ratio:
        found |= {"appends_ratio": round(verdict.appends_ratio, 2), "appends_allowed": round(verdict.allowed, 2)}
    if verdict.silent_s:
        found["silent_s"] = round(verdict.silent_s, 2)
    if evidence.swapped_bytes:
        found["swapped_bytes"] = evidence.swapped_bytes
    for index, device in enumerate(evidence.gpus):
        state, at = device.state, f"gpu{index}_"
        values = {
            "sm_mhz": state.sm_mhz,
            "usual_sm_mhz": device.usual_mhz,
            "memory_mhz": state.memory_mhz,
            "temperature_c": state.temperature_c,
            "power_w": state.power_w,
            "foreign_utilization": device.foreign,
            "foreign_processes": len(state.foreign_pids),
            "xid": device.xid,
            "new_ecc_errors": device.ecc_errors or None,
        }
        found |= {at + name: round(float(value), 3) for name, value in values.items() if value is not None}
    return found
