"""What a worker is told at its start: one JSON document on its standard input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from pingpong_bus.messages import SessionKind


class SimulatedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The timing model of the simulated engine: a step takes g(rows) + b * sum(tokens * context).

    `benchmarks/h200_simulated.toml` has numbers that were measured on a GPU.
    """

    max_model_len: int = 4096
    vocabulary_size: int = 4096
    block_size: int = 16
    kv_tokens: int = 65536
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    step_ms: float = 2.0
    """A step's fixed part."""
    row_us: float = 20.0
    """Per token in the step."""
    step_rows: list[tuple[int, float]] = []
    """Tokens in a step, rising, and its ms before what their contexts cost: a table in place of `step_ms` and `row_us`,
    for devices that compute in tiles. Between two entries the ms are a line, which goes on behind the last."""
    context_ns: float = 0.0
    """Per token of the step and token of its context."""
    decode_context_ns: float | None = None
    """The same of a token that is decoded, which reads its whole context from memory; None: `context_ns`."""
    request_ms: float = 0.0
    """From a request's arrival until a step can take it, while other steps go on: its way through the engine's host."""
    request_us: float = 0.0
    """The same, per token of its prompt."""
    start_ms: float = 0.0
    """How long loading takes."""
    time_scale: float = 1.0
    """All of these times are so many times as long: for machines too small to simulate many engines in real time."""
    burst_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    """Steps in a burst take so many times as long: a device whose decode wobbles. Only the engine knows."""
    burst_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Mean length of a burst; 0: there are none. Lengths are drawn exponentially, by `burst_seed`."""
    burst_every_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Mean time from the end of a burst to the next, drawn likewise."""
    burst_seed: int = 0
    burst_after_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """There is no burst so long after the engine's start: it may be measured meanwhile."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a worker needs; the supervisor fills it in."""

    name: str
    devices: list[str]
    """"cpu:N" (cores), or "cuda:N" or "GPU-..." (UUID); one engine spans them all."""
    cores: list[int] = []
    """Cores for the worker's own process; empty: wherever the kernel likes."""
    engine: Literal["vllm", "simulated"] = "vllm"
    model: str = ""
    dtype: str = "auto"
    session: SessionKind = "prefix-cache"
    decode_first: bool = True
    """Whether vLLM gets our scheduler, which holds appends to a budget beside decodes."""
    grid_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The cell of exactness "grid"; None: what was measured to be best on this kind of device."""
    calibrate: bool = True
    """Whether the engine is measured at its start, unless it was before: what placements are predicted from."""
    paces: tuple[Annotated[float, msgspec.Meta(ge=1)], ...] = (1.2, 1.5)
    """What decodes will be kept to (`DecodePace.itl_ratio`): appends beside them are measured at each."""
    batch_invariant: bool = False
    """Start vLLM with its batch-invariant kernels."""
    speculation_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """The most tokens that are guessed for a step; 0: none ever are."""
    keep_prefixes: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.0
    """The part of the KV cache that prefixes may hold which are expected to come back (`HopSpec.keep`)."""
    host_cache_gib: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Host memory for blocks that the device's cache has no room for; 0: none."""
    engine_args: dict[str, Any] = {}
    """Raw vLLM arguments, over whatever we would set."""
    environment: dict[str, str] = {}
    """Set before vLLM is imported."""
    simulated: SimulatedSettings = SimulatedSettings()
    slab_fd: int
    """Inherited descriptor of the token slab."""
    control: str
    """Endpoint of the supervisor's worker socket."""
    bell: str
    """Endpoint to bind for doorbells."""
    supervisor_pid: int
    """The worker ends when this process does."""
    heartbeat_s: float = 1.0
    identity: str = ""
    """Of its connection to the supervisor, one for each start of the worker; empty: its name."""
