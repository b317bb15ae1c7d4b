"""Lines of a daemon's log about jitter, as the daemon writes them, for tests of what reads them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec

from pingpong_bus.log_records import (
    DecodeJitter,
    DecodeJitterCause,
    DecodeJitterEnded,
    DecodeSteps,
    GroupHealthChanged,
    HopMoved,
    Record,
    event_name,
)
from pingpong_bus.messages import JitterCause

BEGAN = datetime(2026, 11, 30, 10, 0, 0, tzinfo=UTC).timestamp()
GPU0, GPU1 = "GPU-8f6a1c52-aa11-4c1e-9d0f-0123456789ab", "GPU-11aa22bb-cc33-4d44-8e55-abcdef012345"
CLOCK = "the SM clock fell to 1,095 of 1,980 MHz (sw_thermal_slowdown)"


def line(after_s: float, event: str, **fields: Any) -> bytes:
    """One line, so many seconds after `BEGAN`."""
    at = datetime.fromtimestamp(BEGAN + after_s, UTC)
    common = {"event": event, "level": "info", "timestamp": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
    return json.dumps(fields | common).encode()


def written(after_s: float, record: Record) -> bytes:
    return line(after_s, event_name(record), **msgspec.to_builtins(record))


def steps(worker: str = "gpu0", device: str = GPU0, **changes: Any) -> DecodeSteps:
    usual: dict[str, Any] = {
        "seconds": 10.0,
        "tokens": 1000,
        "p50_ms": 8.6,
        "p99_ms": 9.5,
        "worst_ms": 14.0,
        "late": 1,
        "usual_ms": 8.6,
    }
    return DecodeSteps(worker=worker, devices=[device], **usual | changes)


def jitter(episode: str = "default-1-1", cause: JitterCause = "thermal_throttle", **changes: Any) -> DecodeJitter:
    usual: dict[str, Any] = {
        "worker": "gpu1",
        "devices": [GPU1],
        "why": CLOCK,
        "evidence": {"sm_mhz": 1095.0},
        "p50_ms": 17.2,
        "p99_ms": 31.0,
        "worst_ms": 60.0,
        "late_share": 0.9,
        "usual_ms": 8.6,
        "slowdown": 2.0,
    }
    return DecodeJitter(episode=episode, cause=cause, **usual | changes)


def ended(episode: str = "default-1-1", cause: JitterCause = "thermal_throttle", **changes: Any) -> DecodeJitterEnded:
    usual: dict[str, Any] = {
        "worker": "gpu1",
        "devices": [GPU1],
        "seconds": 30.0,
        "tokens": 1800,
        "late": 900,
        "lost_ms": 12_000.0,
        "chains": ["c1", "c2"],
        "worst_ms": 75.0,
    }
    return DecodeJitterEnded(episode=episode, cause=cause, **usual | changes)


def an_hour() -> list[bytes]:
    """Two groups; one has an episode of half a minute after 20 minutes, taken for another cause at first."""
    lines = [line(0, "daemon_started", instance="default", pid=7, socket="/run/x")]
    for at in range(10, 3601, 10):
        slow = 1200 <= at < 1240
        lines.append(written(at, steps()))
        lines.append(written(at + 0.1, steps("gpu1", GPU1, **({"p50_ms": 17.2, "p99_ms": 31.0} if slow else {}))))
    lines += [
        written(1203, jitter(cause="unknown", why="nothing that is measured explains it")),
        written(
            1203.1, GroupHealthChanged(worker="gpu1", state="degraded", was="healthy", cause="unknown", why="late")
        ),
        written(
            1205,
            DecodeJitterCause(
                episode="default-1-1",
                worker="gpu1",
                cause="thermal_throttle",
                was="unknown",
                why=CLOCK,
                evidence={"sm_mhz": 1095.0},
            ),
        ),
        written(
            1206,
            HopMoved(
                chain="c1",
                agent="editor",
                hop="c1/1/1",
                worker="gpu1",
                to="gpu0",
                tokens=34,
                left_ms=4100.0,
                there_ms=2300.0,
                cause="thermal_throttle",
            ),
        ),
        written(1240, ended()),
        written(1240.1, GroupHealthChanged(worker="gpu1", state="healthy", was="recovering", cause=None, why="")),
    ]
    return lines
