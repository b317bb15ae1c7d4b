"""What a profiler's trace says of the steps on the device. Pure but for reading the file."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixed_rows import DeviceStep

KINDS = {
    "attention": ("flash", "Flash", "prepare_varlen"),
    "matrices": ("gemm", "nvjet", "cutlass", "gemv", "splitK", "cublas"),
    "copies": ("Memcpy", "Memset"),
}
"""Kinds of kernels, by what their names hold; the first that fits, else "other"."""
MOST_KERNELS = 12
_MARK = re.compile(r"FlashAttnFwd(?!Combine)|flash_fwd")
"""The kernel that each layer runs once a step; those that combine parts of it are not counted."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME_LENGTH = 90

Event = tuple[float, float, str]
"""Begin and duration in µs, and name."""


def read_trace(path: Path) -> dict[str, Any]:
    """A trace file, packed or not."""
    data = path.read_bytes()
    parsed: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return parsed


def device_steps(trace: dict[str, Any], layers: int) -> tuple[list[DeviceStep], list[tuple[str, float]]]:
    """What ran on the device, step by step, and the costliest kernels by name, in ms.

    Args:
        trace: as PyTorch's profiler writes it.
        layers: of the model: so many attention kernels are a step. What runs before the first step's or from the last
            step's on belongs to no whole step and is left out.
    """
    events = sorted(
        (float(event["ts"]), float(event["dur"]), str(event["name"]))
        for event in trace.get("traceEvents", ())
        if event.get("cat") in _ON_DEVICE and event.get("dur")
    )
    begins = [at for at, (_, _, name) in enumerate(events) if _MARK.search(name)][::layers]
    steps = [_device_step(events[first:last], events[last][0]) for first, last in itertools.pairwise(begins)]
    return steps, _costliest(events[begins[0] : begins[-1]]) if begins else []


def _device_step(events: Sequence[Event], ended: float) -> DeviceStep:
    """One step of its events, the first of which begins it."""
    begun = busy_until = events[0][0]
    busy = 0.0
    kinds: dict[str, float] = {}
    for start, duration, name in events:
        busy += max(0.0, start + duration - max(start, busy_until))
        busy_until = max(busy_until, start + duration)
        kind = kernel_kind(name)
        kinds[kind] = kinds.get(kind, 0.0) + duration / 1e3
    return DeviceStep((ended - begun) / 1e3, busy / 1e3, kinds, len(events))


def _costliest(events: Sequence[Event]) -> list[tuple[str, float]]:
    names: dict[str, float] = {}
    for _, duration, name in events:
        names[name[:_NAME_LENGTH]] = names.get(name[:_NAME_LENGTH], 0.0) + duration / 1e3
    return sorted(names.items(), key=lambda item: -item[1])[:MOST_KERNELS]


def kernel_kind(name: str) -> str:
    """One of `KINDS`, or "other"."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
