"""Whether an engine guesses tokens, and which of its requests it guesses for. No vLLM is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pingpong_bus.messages import DraftCounts, Sampling
from pingpong_worker.config import WorkerConfig
from pingpong_worker.pinning import on_cpu
from pingpong_worker.vllm_marks import KEY
from pingpong_worker.vllm_versions import GUESSES_UNTRIED_ON_GPUS, Version

METHOD: Final = "chain"
"""`EngineLimits.speculation` of engines that guess: from the prompt, and from earlier runs of the chain."""
COUNTS: Final = "drafts"
"""Under the marks' key, in what an engine says with a request's tokens: steps, drafted and accepted tokens so far."""
_OWN_ARGUMENTS: Final = ("scheduler_cls", "speculative_config", "worker_cls")


def refusal(config: WorkerConfig, version: Version) -> str:
    """Why an engine does not guess, though it was asked to: one sentence; empty where it does, or was not asked.

    Args:
        config: what the worker was told.
        version: of vLLM.
    """
    if config.speculation_tokens == 0:
        return ""
    if not config.decode_first:
        return "decode-first scheduling is switched off, and our scheduler is what guesses."
    for name in _OWN_ARGUMENTS:
        if config.engine_args.get(name) is not None:
            return f"vllm.{name} is configured, and guessing takes ours."
    if config.batch_invariant:
        return "the engine is batch-invariant, and steps with guesses were not shown to keep its bits."
    if config.engine_args.get("pipeline_parallel_size", 1) != 1:
        return "pipeline_parallel_size is not 1, and steps with guesses were never tried across stages."
    if not on_cpu(config.devices) and version >= GUESSES_UNTRIED_ON_GPUS:
        return f"vLLM {'.'.join(map(str, version))} prepares steps with guesses on GPUs in a way that was not tried."
    return ""


def guesses(config: WorkerConfig, version: Version) -> int:
    """The most tokens that are guessed for a request in a step; 0: none."""
    return 0 if refusal(config, version) else config.speculation_tokens


def guessed_for(sampling: Sampling, grid: int | None) -> bool:
    """Whether tokens of such a request are guessed.

    On a grid every step has to have the same shape. A seeded request is promised the same tokens each time, and how
    many draws it takes from its generator hangs on what was guessed.
    """
    return grid is None and sampling.seed is None


def known_runs(drafts: Sequence[Sequence[int]], vocabulary_size: int) -> list[list[int]]:
    """Earlier runs that can be guessed from: without those that hold ids of another vocabulary."""
    return [list(run) for run in drafts if run and min(run) >= 0 and max(run) < vocabulary_size]


def counts_of(output: Any) -> DraftCounts | None:
    """What the scheduler said of a request's guesses, in one of vLLM's outputs; None where it said nothing."""
    said = getattr(output, "kv_transfer_params", None)
    counts = said.get(KEY, {}).get(COUNTS) if isinstance(said, dict) else None
    return None if counts is None else DraftCounts(**counts)
