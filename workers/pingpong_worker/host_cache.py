"""Host memory behind a GPU engine's prefix cache, by vLLM's own offloading (its "native" backend).

vLLM copies blocks of what runs to pinned host memory, and back where a prompt begins with them and the device
has them no more. Left alone it copies every prompt; by `max_offload_tokens` of a request it copies a beginning, and so
only what is expected to come again goes there: chains that come once neither cost the copies nor push others out.

What the versions have in common and in which they differ (0.24.0 and 0.32.0, read):

- `kv_offloading_size` is the engine's whole, in GiB, over all its GPUs.
- 0.24 pins memory of its own; 0.32 maps a file in /dev/shm, which needs room there, and unlinks it while it starts.
- A prompt whose blocks come from the host waits for them outside of the step, and appends do so as well.
- Hits end where the host's chunks end, which is at no multiple of a grid: exactness "grid" is refused (`vllm_limits`).
- Resumable requests keep their blocks anyway; none were tried with it, so streaming-input sessions are not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import SessionKind
from pingpong_worker.config import WorkerConfig
from pingpong_worker.pinning import on_cpu

LARGEST_SHARE = 0.9
"""Of the memory that is available: the rest is for the engine's own processes and everybody else."""


def offload_params(tokens: int) -> dict[str, dict[str, int]]:
    """What a request's `extra_args` say of it to vLLM's offloading.

    Args:
        tokens: that are copied to the host, from the prompt's beginning; 0: none.
    """
    return {"kv_transfer_params": {"max_offload_tokens": tokens}}


def offload_arguments(
    config: WorkerConfig, available: Callable[[], int], shm_free: Callable[[], int]
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` for the host memory that is configured; none where none is.

    Args:
        config: of the worker.
        available: gives the bytes of memory that the machine has left.
        shm_free: gives the bytes that /dev/shm has left.

    Raises:
        ConfigError: the engine cannot have it.
    """
    if not config.host_cache_gib:
        return {}
    if (refusal := host_cache_refusal(config.devices, config.session, config.engine_args)) is not None:
        raise refusal
    wanted = config.host_cache_gib
    for name, free in (("memory is available", available()), ("is free in /dev/shm", shm_free())):
        if wanted * 2**30 > free * LARGEST_SHARE:
            raise ConfigError(
                f"{wanted:g} GiB of host memory are to hold prefixes, and {free / 2**30:.1f} GiB {name}.",
                field="prefixes.host_gib",
                hint="Lower it; each engine of the daemon has so much.",
            )
    return {"kv_offloading_size": config.host_cache_gib, "kv_offloading_backend": "native"}


def host_cache_refusal(
    devices: Sequence[str], session: SessionKind, engine_args: Mapping[str, Any]
) -> ConfigError | None:
    """Why an engine cannot have host memory for prefixes, whatever the machine has; None where it can.

    Args:
        devices: of its group.
        session: the kind of session that it opens where none is asked for.
        engine_args: raw arguments of vLLM.
    """
    if on_cpu(devices):
        return ConfigError(
            "an engine on CPU cores has its KV cache in host memory already.",
            field="prefixes.host_gib",
            hint="Leave it out, and make the cache itself larger: vllm.kv_cache_memory_bytes.",
        )
    if session == "streaming-input":
        return ConfigError(
            "host memory for prefixes and streaming-input sessions were never tried together.",
            field="prefixes.host_gib",
            hint='Leave it out, or set `session` to "prefix-cache".',
        )
    for name in ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"):
        if name in engine_args:
            return ConfigError(
                f"`vllm.{name}` says already where blocks go that the device has no room for.",
                field="prefixes.host_gib",
                hint="Leave one of them out.",
            )
    return None
