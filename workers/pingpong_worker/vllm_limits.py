"""What a started vLLM engine can take, read from its `VllmConfig`: lengths, exactness levels, and why not a level."""

from __future__ import annotations

from typing import Any

from pingpong_bus.messages import EngineLimits, SessionKind
from pingpong_worker.config import WorkerConfig
from pingpong_worker.device_kind import device_kind
from pingpong_worker.pinning import on_cpu
from pingpong_worker.vllm_guessing import METHOD, guesses
from pingpong_worker.vllm_guessing import refusal as guess_refusal
from pingpong_worker.vllm_settings import is_decode_first
from pingpong_worker.vllm_versions import Version

CPU_GRID_TOKENS = 192
CUDA_GRID_TOKENS = 1024
"""Cells of exactness "grid" where none is configured: small, so that the part of a prompt behind its last cell costs
little; large enough that a prompt cut into cells prefills about as fast as one that is not."""


def engine_limits(
    vllm_config: Any, config: WorkerConfig, model: str, version: Version, *, tokenizer: str | None
) -> EngineLimits:
    """The limits of an engine that has started.

    Args:
        vllm_config: the engine's `VllmConfig`, with all that vLLM has derived.
        config: what the worker was told.
        model: the folder or name that was loaded.
        version: of vLLM.
        tokenizer: a digest of the model's tokenizer; None where it has none, so that prompts cannot be text.
    """
    cache = vllm_config.cache_config
    other: SessionKind = "streaming-input" if config.session == "prefix-cache" else "prefix-cache"
    cell = config.grid_tokens or (CPU_GRID_TOKENS if on_cpu(config.devices) else CUDA_GRID_TOKENS)
    refusal = grid_refusal(vllm_config, config, cell)
    return EngineLimits(
        engine=f"vllm {'.'.join(map(str, version))}",
        model=model,
        max_model_len=vllm_config.model_config.max_model_len,
        vocabulary_size=vllm_config.model_config.get_vocab_size(),
        block_size=cache.block_size,
        # One block is vLLM's null block, which no request is ever given.
        kv_tokens=max(0, (cache.num_gpu_blocks or 0) - 1) * cache.block_size,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        sessions=(config.session, other),
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        has_tokenizer=tokenizer is not None,
        tokenizer=tokenizer or "",
        device=device_kind(config.devices),
        grid_tokens=0 if refusal else cell,
        grid_refusal=refusal,
        batch_invariant=config.batch_invariant,
        decode_first=is_decode_first(config),
        host_cache_bytes=int(config.host_cache_gib * 2**30),
        host_cache_tokens=host_tokens(vllm_config, config),
        keep_tokens=kept_tokens(vllm_config, config),
        speculation=METHOD if guesses(config, version) else "",
        speculation_refusal=guess_refusal(config, version),
        overlap=is_decode_first(config) or vllm_config.scheduler_config.long_prefill_token_threshold > 0,
    )


def kept_tokens(vllm_config: Any, config: WorkerConfig) -> int:
    """The most tokens of static beginnings that the engine keeps from eviction; 0 where it keeps none."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    windowed = bool(model.get_sliding_window()) and not model.disable_sliding_window
    if not is_decode_first(config) or not cache.enable_prefix_caching or model.is_hybrid or windowed:
        return 0
    return int(config.keep_prefixes * (cache.num_gpu_blocks or 0)) * int(cache.block_size)


def host_tokens(vllm_config: Any, config: WorkerConfig) -> int:
    """Tokens that the host memory behind the engine's prefix cache holds; 0 for models whose layers differ."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not config.host_cache_gib or model.is_hybrid or model.use_mla:
        return 0
    element = 1 if str(cache.cache_dtype).startswith("fp8") else model.dtype.itemsize
    one = 2 * model.get_total_num_kv_heads() * model.get_head_size() * model.get_total_num_hidden_layers() * element
    return int(config.host_cache_gib * 2**30 / one)


def grid_refusal(vllm_config: Any, config: WorkerConfig, cell: int) -> str:
    """Why an engine cannot be held to a grid of `cell` tokens, one sentence; empty where it can.

    Sharing the engine with others is no matter here: whoever places chains sees to that.
    """
    return (
        _scheduler_refusal(config)
        or _model_refusal(vllm_config, cell)
        or _feature_refusal(vllm_config)
        or ("" if on_cpu(config.devices) else _compiler_refusal(vllm_config.compilation_config))
        or _cell_refusal(vllm_config, cell)
    )


def _scheduler_refusal(config: WorkerConfig) -> str:
    if is_decode_first(config):
        return ""
    if config.decode_first:
        return f"vLLM runs another scheduler than ours, {config.engine_args['scheduler_cls']}."
    return "decode-first scheduling is switched off, and our scheduler is what cuts prompts."


def _model_refusal(vllm_config: Any, cell: int) -> str:
    """What of a model's layers keeps other state than one KV entry for each token."""
    model = vllm_config.model_config
    if model.is_hybrid or model.is_attention_free:
        return "the model has layers that keep a running state (Mamba and the like), which is cut at places of its own."
    if getattr(model.hf_text_config, "attention_chunk_size", None):
        return "the model has layers of chunked local attention."
    windowed = bool(model.get_sliding_window()) and not model.disable_sliding_window
    block = vllm_config.cache_config.block_size
    if windowed and block != cell:  # a hit holds only the blocks of the layer's own window, so it cannot be shortened
        return (
            f"the model has sliding-window layers, for which the cell, {cell} tokens, and vLLM's block_size, {block}, "
            "have to be equal."
        )
    return ""


def _feature_refusal(vllm_config: Any) -> str:
    """What is switched on that cuts prompts, or finds computed ones, behind the scheduler's back."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is switched off, and sessions keep what they have computed there."
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector is configured (prefixes.host_gib has one), which finds computed tokens off the grid."
    if vllm_config.speculative_config is not None:
        return "speculative decoding is configured: how many tokens a step computes hangs on what was guessed."
    if not scheduler.enable_chunked_prefill:
        return "chunked prefill is switched off, and a prompt could not be cut at all."
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            return f"{name} is {size}; only tensor parallelism was shown to keep the grid."
    return ""


def _compiler_refusal(compilation: Any) -> str:
    """What of a GPU's compiled code rounds differently from one process, or one use, to the next."""
    if compilation.cudagraph_mode is not None and compilation.cudagraph_mode.mixed_mode().name == "FULL":
        return "cudagraph_mode is FULL, by which the same prompt was seen to give other results on the same engine."
    compiled = getattr(compilation.mode, "name", "NONE") != "NONE"
    if compiled and not compilation.inductor_compile_config.get("deterministic"):
        return "inductor_compile_config.deterministic is off, and each engine picks kernels by its own timings."
    return ""


def _cell_refusal(vllm_config: Any, cell: int) -> str:
    """Why a cell of this size cannot be: one that does not fit in a step would wait for ever."""
    scheduler, block = vllm_config.scheduler_config, vllm_config.cache_config.block_size
    if cell % block:
        return f"the cell, {cell} tokens, is not a multiple of vLLM's block_size, {block}."
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold"):
        limit = getattr(scheduler, name, None)
        if limit and cell > limit:
            return f"the cell, {cell} tokens, is larger than vLLM's {name}, {limit}."
    return ""
