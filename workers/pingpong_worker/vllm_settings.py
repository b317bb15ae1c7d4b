"""From a worker's configuration to vLLM's arguments and environment. No vLLM is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shutil import disk_usage
from typing import Any

from pingpong_bus.errors import ConfigError
from pingpong_bus.memory_limit import available_memory
from pingpong_worker.config import WorkerConfig
from pingpong_worker.host_cache import offload_arguments
from pingpong_worker.pinning import cuda_uuids, gpu_environment, on_cpu
from pingpong_worker.shared_memory_names import FOLDER as SHM
from pingpong_worker.vllm_guessing import guesses
from pingpong_worker.vllm_marks import KEEP_VARIABLE
from pingpong_worker.vllm_versions import Version, scheduler_class

CPU_WORKER = "pingpong_worker.vllm_cpu_worker.SeededCPUWorker"
GUESSING_GPU_WORKER = "pingpong_worker.vllm_gpu_worker.GuessingGPUWorker"
CPU_BLOCK_SIZE = 32
"""Tokens a block: the CPU kernels want a multiple of 32, and small blocks lose least at the end of an append."""
CPU_KV_GIB = 1
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
MAX_NUM_SEQS = 32
"""Paused sessions count against it, so it has to exceed sessions and decodes together."""

DETERMINISTIC_INDUCTOR = {"deterministic": True, "combo_kernels": True, "benchmark_combo_kernel": False}
"""vLLM's `inductor_compile_config` on GPUs. Inductor times several configurations of a kernel and keeps the fastest, in
each process for itself, also where the graph comes from a shared cache: two engines on equal GPUs then round
differently. It costs no speed that was measurable. The two other keys are for vLLM 0.24, which has combined kernels
timed as well, and that Inductor refuses to do deterministically."""


def engine_environment(config: WorkerConfig, present: Mapping[str, str]) -> dict[str, str | None]:
    """Variables to set before vLLM is imported, None to unset.

    What stands in `present` is left alone, but for devices, what would win over an argument, and batch invariance.

    Raises:
        ConfigError: the devices cannot have what is configured.
    """
    if config.batch_invariant and on_cpu(config.devices):
        raise ConfigError(
            "vLLM has batch-invariant kernels for GPUs only.",
            field="batch_invariant",
            hint='Leave it out on CPUs: exactness "grid" holds there.',
        )
    defaults: dict[str, str | None] = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at the first seeded request; the PyTorch sampler is exact
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Spawn, not fork: a forked child inherits the worker's event loop, sockets and slab descriptors.
    forced: dict[str, str | None] = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    forced |= gpu_environment(config.devices, cuda_uuids)
    # Also "0": what a worker says of its engine has to be true, and the variable might be inherited.
    forced[BATCH_INVARIANT] = "1" if config.batch_invariant else "0"
    forced[KEEP_VARIABLE] = str(config.keep_prefixes)
    if on_cpu(config.devices):
        forced["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(device.removeprefix("cpu:") for device in config.devices)
        # Weights on huge pages: SmolLM2-135M in float32 prefills 17 % faster on them and decodes 5 % faster, and two
        # engines that are alike run alike, where small pages left one of them up to 15 % slower for its life.
        defaults["THP_MEM_ALLOC_ENABLE"] = "1"
        if "kv_cache_memory_bytes" in config.engine_args:
            forced["VLLM_CPU_KVCACHE_SPACE"] = None  # it would win over the argument
        elif "gpu_memory_utilization" not in config.engine_args:
            defaults["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_KV_GIB)
    return {name: value for name, value in defaults.items() if name not in present} | forced


def engine_arguments(config: WorkerConfig, model: str, version: Version) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`: ours, with the user's raw ones over them.

    Raises:
        ConfigError: a raw argument contradicts the configuration.
    """
    given = config.engine_args
    if "model" in given:
        raise ConfigError("the model is no raw argument.", field="vllm.model", hint="Set `model` instead.")
    if config.session == "prefix-cache" and not given.get("enable_prefix_caching", True):
        raise ConfigError(
            "sessions of kind prefix-cache keep what they have computed in the prefix cache.",
            field="vllm.enable_prefix_caching",
            hint='Leave it out, or set `session` to "streaming-input".',
        )
    if is_decode_first(config) and given.get("scheduling_policy", "fcfs") != "fcfs":
        raise ConfigError(
            "decode-first scheduling puts requests in order itself; by other policies than fcfs vLLM takes memory from "
            "decodes that came late, and gives it to appends.",
            field="vllm.scheduling_policy",
            hint="Leave it out, or set `[decode_first] enabled = false`.",
        )
    cpu = on_cpu(config.devices)
    ours: dict[str, Any] = {
        "model": model,
        "dtype": config.dtype,
        "skip_tokenizer_init": True,  # prompts are tokenized once, before admission, and outputs are read as ids
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "max_num_seqs": MAX_NUM_SEQS,
        "seed": 0,
    }
    if cpu:
        ours |= {"block_size": CPU_BLOCK_SIZE, "enforce_eager": True, "worker_cls": CPU_WORKER}
    else:
        ours["tensor_parallel_size"] = len(config.devices)
        ours["compilation_config"] = _compilation(given.get("compilation_config", {}))
        if guesses(config, version):
            ours["worker_cls"] = GUESSING_GPU_WORKER
    ours |= offload_arguments(config, available_memory, lambda: disk_usage(SHM).free)
    asynchronous = not cpu and given.get("async_scheduling") is not False
    scheduler = scheduler_class(version, asynchronous=asynchronous, decode_first=config.decode_first)
    if scheduler is not None:
        ours["scheduler_cls"] = scheduler
    return ours | {name: value for name, value in given.items() if name != "compilation_config" or cpu}


def _compilation(given: Any) -> Any:
    """The user's compilation configuration, over ours."""
    if not isinstance(given, Mapping):
        return given  # an optimization level, or what vLLM refuses
    return {**given, "inductor_compile_config": DETERMINISTIC_INDUCTOR | dict(given.get("inductor_compile_config", {}))}


def is_decode_first(config: WorkerConfig) -> bool:
    """Whether the engine has our scheduler: it is not switched off, and no raw argument names another."""
    return config.decode_first and "scheduler_cls" not in config.engine_args


def check_argument_names(given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError for the first raw argument that vLLM does not have."""
    for name in given:
        if name not in known:
            close = [other for other in known if other.startswith(name[:6]) or name in other][:3]
            hint = f"Close to it: {', '.join(close)}." if close else "See the engine arguments of vLLM's manual."
            raise ConfigError("vLLM has no such argument.", field=f"vllm.{name}", hint=hint)
