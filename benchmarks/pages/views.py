"""Rows of benchmarks, as far as the page shows them: fields that it does not name may come and go."""

from __future__ import annotations

from typing import Any

import msgspec


class FinalizeRun(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of an agent that reads another; of `finalize.py`."""

    mode: str
    session: str | None
    prefix: int
    gave_up: bool
    ttft_ms: float
    step_ms: float
    stages: dict[str, float]
    """Milliseconds, in the order in which they happen."""
    provenance: dict[str, Any]


class Spread(msgspec.Struct, frozen=True):
    """A distribution."""

    p50: float
    p99: float
    max: float


class GroupsRow(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor with many simulated groups; of `many_groups.py`, where the fields are explained."""

    simulated: bool
    groups: int
    time_scale: float
    token_stretch: int
    mode: str
    prefix: int
    output: int
    chains: int
    failed: list[str]
    idle_cpu_ms_per_group_second: float
    cpu_ms_per_chain: float
    cpu_ms_per_hop: float
    real_time_cores: float
    real_time_loop_cores: float
    real_time_groups: float
    loop_waited_s: float | None = None
    messages_per_chain: float
    accepted_ms: Spread
    dispatch_ms: Spread
    status_ms: Spread
    idle_status_ms: Spread
    chain_ratio: Spread
    supervisor_mib: float
    supervisor_descriptors: int
    provenance: dict[str, Any]
