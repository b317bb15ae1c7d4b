"""What an engine can take, and which exactness it refuses, by the configuration that vLLM has derived."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pingpong_worker.config import WorkerConfig
from pingpong_worker.device_kind import cpu_kind, device_kind
from pingpong_worker.vllm_limits import CPU_GRID_TOKENS, engine_limits, grid_refusal


def vllm_config(**changes: Any) -> Any:
    """A plain model on a plain engine; `changes` by "part.name", with "__" for the dot."""
    parts = SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=False,
            is_attention_free=False,
            disable_sliding_window=False,
            get_sliding_window=lambda: None,
            get_vocab_size=lambda: 1000,
            hf_text_config=SimpleNamespace(),
            max_model_len=4096,
            dtype="torch.bfloat16",
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=32, num_gpu_blocks=65),
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=True,
            max_num_batched_tokens=2048,
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=0,
            max_num_seqs=32,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1
        ),
        kv_transfer_config=None,
        speculative_config=None,
    )
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        setattr(getattr(parts, part) if attribute else parts, attribute or part, value)
    return parts


def config(**changes: Any) -> WorkerConfig:
    values = {"name": "w", "devices": ["cpu:0", "cpu:1"], "slab_fd": -1, "control": "", "bell": "", "supervisor_pid": 0}
    return WorkerConfig(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"model_config__is_hybrid": True}, "running state"),
        ({"model_config__is_attention_free": True}, "running state"),
        ({"model_config__hf_text_config": SimpleNamespace(attention_chunk_size=8192)}, "chunked local attention"),
        ({"model_config__get_sliding_window": lambda: 512}, "sliding-window layers, for which the cell, 256 tokens"),
        ({"model_config__get_sliding_window": lambda: 512, "cache_config__block_size": 256}, ""),
        ({"model_config__get_sliding_window": lambda: 512, "model_config__disable_sliding_window": True}, ""),
        ({"cache_config__enable_prefix_caching": False}, "prefix caching"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"scheduler_config__enable_chunked_prefill": False}, "chunked prefill"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel_config__data_parallel_size": 4}, "data_parallel_size is 4"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"cache_config__block_size": 48}, "not a multiple of vLLM's block_size, 48"),
        ({"scheduler_config__max_num_batched_tokens": 255}, "larger than vLLM's max_num_batched_tokens, 255"),
        ({"scheduler_config__max_num_batched_tokens": 256}, ""),
        ({"scheduler_config__max_num_scheduled_tokens": 128}, "larger than vLLM's max_num_scheduled_tokens, 128"),
        ({"scheduler_config__long_prefill_token_threshold": 64}, "larger than vLLM's long_prefill_token_threshold, 64"),
        ({"scheduler_config__long_prefill_token_threshold": 512}, ""),
    ],
)
def test_an_engine_that_cannot_be_held_to_a_grid_says_why(changes: dict[str, Any], words: str) -> None:
    refusal = grid_refusal(vllm_config(**changes), config(), 256)
    assert words in refusal
    assert bool(refusal) == bool(words)
    assert refusal == "" or (refusal.endswith(".") and "\n" not in refusal)


@pytest.mark.parametrize(
    ("mode", "graphs", "inductor", "words"),
    [
        ("VLLM_COMPILE", "PIECEWISE", {"deterministic": True}, ""),
        ("VLLM_COMPILE", "FULL", {"deterministic": True}, "cudagraph_mode is FULL"),
        ("VLLM_COMPILE", "PIECEWISE", {}, "deterministic is off"),
        ("VLLM_COMPILE", "NONE", {"deterministic": False}, "deterministic is off"),
        ("NONE", "NONE", {}, ""),
    ],
)
def test_compiled_kernels_of_gpus_have_to_be_chosen_alike(
    mode: str, graphs: str, inductor: dict[str, bool], words: str
) -> None:
    compilation = SimpleNamespace(
        mode=SimpleNamespace(name=mode),
        cudagraph_mode=SimpleNamespace(mixed_mode=lambda: SimpleNamespace(name=graphs)),
        inductor_compile_config=inductor,
    )
    given = vllm_config(compilation_config=compilation)
    refusal = grid_refusal(given, config(devices=["cuda:0"]), 256)
    assert words in refusal
    assert bool(refusal) == bool(words)
    assert grid_refusal(given, config(), 256) == "", "CPUs time no kernels"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"decode_first": False}, "switched off"), ({"engine_args": {"scheduler_cls": "mine.Own"}}, "mine.Own")],
)
def test_without_our_scheduler_there_is_neither_a_grid_nor_a_budget(changes: dict[str, Any], words: str) -> None:
    limits = engine_limits(vllm_config(), config(**changes), "m", (0, 32, 0), tokenizer="x")
    assert words in limits.grid_refusal
    assert (limits.grid_tokens, limits.decode_first, limits.overlap) == (0, False, False)


def test_agents_may_overlap_where_a_scheduler_holds_appends_to_a_budget() -> None:
    def may(threshold: int, *, ours: bool) -> bool:
        given = vllm_config(scheduler_config__long_prefill_token_threshold=threshold)
        return engine_limits(given, config(decode_first=ours), "m", (0, 32, 0), tokenizer="x").overlap

    assert [may(0, ours=True), may(0, ours=False), may(256, ours=False)] == [True, False, True]


def test_limits_are_what_vllm_has_derived() -> None:
    limits = engine_limits(vllm_config(), config(session="streaming-input"), "m", (0, 32, 0), tokenizer=None)
    assert (limits.engine, limits.model, limits.max_model_len, limits.vocabulary_size) == (
        "vllm 0.32.0",
        "m",
        4096,
        1000,
    )
    assert (limits.block_size, limits.kv_tokens, limits.max_num_seqs, limits.dtype) == (32, 64 * 32, 32, "bfloat16")
    assert limits.sessions == ("streaming-input", "prefix-cache")
    assert (limits.grid_tokens, limits.grid_refusal) == (CPU_GRID_TOKENS, "")
    assert (limits.decode_first, limits.batch_invariant) == (True, False)
    assert limits.device.endswith(", 2 cores")


def test_the_cell_is_the_configured_one_where_it_can_be() -> None:
    def limits(cell: int) -> tuple[int, bool]:
        found = engine_limits(vllm_config(), config(grid_tokens=cell), "m", (0, 32, 0), tokenizer="x")
        return found.grid_tokens, bool(found.grid_refusal)

    assert [limits(64), limits(2048), limits(100), limits(4096)] == [(64, False), (2048, False), (0, True), (0, True)]


def test_cores_are_of_one_kind_by_name_and_number() -> None:
    assert (
        cpu_kind("processor\t: 0\nmodel name\t: Intel(R)  Xeon(R) CPU: best\nflags : x\n")
        == "Intel(R) Xeon(R) CPU: best"
    )
    assert cpu_kind("processor\t: 0\nBogoMIPS\t: 50\n")
    one, two, four = (device_kind(devices) for devices in (["cpu:0"], ["cpu:0", "cpu:1"], ["cpu:0-2", "cpu:2-3"]))
    assert (one.rpartition(", ")[2], two.rpartition(", ")[2]) == ("1 core", "2 cores")
    assert four.endswith(", 4 cores")


def test_gpus_are_asked_for_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"GPU-1": b"NVIDIA H200", "GPU-2": b"NVIDIA H200", "MIG-3": "NVIDIA H100 MIG 1g.10gb"}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetName=lambda handle: names[handle],
    )
    monkeypatch.setattr("pingpong_worker.device_kind.importlib.import_module", lambda name: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert device_kind(["cuda:0"]) == "NVIDIA H200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,MIG-3,GPU-2")
    assert device_kind(["cuda:0", "cuda:1", "MIG-3"]) == "NVIDIA H100 MIG 1g.10gb, 2 x NVIDIA H200"
