"""Lines of a results file of `mixed_step.py`. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from lone_kernels import LoneKernel


class MixedStep(msgspec.Struct, frozen=True, kw_only=True, tag="mixed"):
    """Steps of one size."""

    setup: str
    """What is particular about the engine."""
    context: int
    """Tokens behind which the answer decodes, and that the appends have before them in the middle."""
    tokens: int
    """Appended tokens of each step."""
    gaps_ms: list[float]
    append_ms: float
    """From handing the appended prompt over until it was computed; 0 without appends."""
    provenance: dict[str, Any] = {}


class DeviceStep(msgspec.Struct, frozen=True):
    """A step as the profiler saw it on the device, from one step's first attention kernel to the next one's; ms."""

    wall: float
    busy: float
    """When anything ran."""
    kernels: dict[str, float]
    """By kind: see `mixed_trace.KINDS`."""
    launches: int


class StepProfile(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """Where the device's time went in steps of one size, and in some without appends that ran before and after."""

    setup: str
    context: int
    tokens: int
    steps: list[DeviceStep]
    top: list[tuple[str, float]]
    """The costliest kernels of all steps together, ms."""
    provenance: dict[str, Any] = {}


class LoneRow(msgspec.Struct, frozen=True, kw_only=True, tag="alone"):
    """Kernels timed alone."""

    alone: LoneKernel
    provenance: dict[str, Any] = {}


Row = MixedStep | StepProfile | LoneRow
