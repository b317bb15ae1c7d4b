"""An engine for random schedules, without a model: its sizes, a vLLM scheduler of ours, and requests for it."""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import tiny_model
from kv_checking_runner import STOP_IDS
from pingpong_worker.step_ledger import StepLedger
from pingpong_worker.vllm_abilities import (
    APPEND_WITHOUT_SAMPLING,
    IDLE_SESSIONS_GIVE_WAY,
    PREFILL_PROGRESS,
    installed_abilities,
)
from pingpong_worker.vllm_marks import KEEP_VARIABLE
from pingpong_worker.vllm_scheduler import AsyncDecodeFirstScheduler, DecodeFirstScheduler

ABILITIES = frozenset(installed_abilities())
"""What patches have given the vLLM that is imported: they are used, as by an engine."""
BLOCK = 16
"""Tokens of a KV block."""
LONGEST = 640
"""Tokens of the longest request, with its output."""


@dataclass(frozen=True)
class Setup:
    """An engine's sizes."""

    asynchronous: bool
    seats: int
    budget: int
    blocks: int
    graphs: tuple[int, ...]
    streaming: bool
    """Streaming-input sessions take part: their blocks are reserved then, unless they give way."""
    keep: float = 0.0
    """The part of the blocks that beginnings of prompts may hold which are expected to come again."""

    @property
    def grids(self) -> tuple[int, ...]:
        """Cells that fit in a step beside decodes."""
        return tuple(cell for cell in (2 * BLOCK, 4 * BLOCK) if cell + 16 <= self.budget)

    @property
    def plenty(self) -> bool:
        """Whether nothing waits for seats or memory."""
        return self.seats >= 16 and self.blocks >= 2000

    @property
    def crowded(self) -> bool:
        """Whether many requests are to outgrow the memory."""
        return self.seats > 3 and not self.plenty


def setup_of(seed: int) -> Setup:
    """The sizes of a schedule's engine."""
    rng = random.Random(seed)
    streaming = rng.random() < 0.4
    plenty = (streaming and IDLE_SESSIONS_GIVE_WAY not in ABILITIES) or rng.random() < 0.4
    return Setup(
        asynchronous=seed % 2 == 1,
        seats=16 if plenty or streaming else rng.choice((2, 3, 8)),  # which sessions hold as they wait
        budget=rng.choice((64, 96, 256)),
        blocks=4000 if plenty else LONGEST // BLOCK + rng.choice((2, 4, 60)),
        graphs=rng.choice(((), (1, 2, 4, 8, 16, 32, 64))),
        streaming=streaming,
        keep=random.Random(f"keep {seed}").choice((0.0, 0.2, 0.5, 0.9)),
    )


@functools.cache
def _base_config() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(tiny_model.CONFIG))
        arguments = EngineArgs(
            model=folder,
            max_model_len=LONGEST + BLOCK,
            enforce_eager=True,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            skip_tokenizer_init=True,
        )
        init_none_hash(sha256)
        return arguments.create_engine_config()


_hasher = get_request_block_hasher(BLOCK, sha256)


def make_scheduler(setup: Setup, clock: Callable[[], float]) -> Any:
    """A scheduler of the installed vLLM's, with our class on it."""
    config = copy.copy(_base_config())
    config.scheduler_config, config.cache_config = copy.copy(config.scheduler_config), copy.copy(config.cache_config)
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.scheduler_config.max_num_seqs = setup.seats
    config.scheduler_config.max_num_batched_tokens = setup.budget
    config.scheduler_config.max_num_scheduled_tokens = setup.budget
    config.cache_config.num_gpu_blocks = setup.blocks
    config.cache_config.block_size = BLOCK
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=setup.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    kind = AsyncDecodeFirstScheduler if setup.asynchronous else DecodeFirstScheduler
    with mock.patch.dict(os.environ, {KEEP_VARIABLE: str(setup.keep)}):
        scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
    scheduler._clock = clock
    scheduler._ledger = StepLedger(setup.graphs, setup.budget, None)
    return scheduler


APPEND_TOKENS = 0 if APPEND_WITHOUT_SAMPLING in ABILITIES else 1
"""`max_tokens` of an append."""


def make_request(
    name: str,
    ids: Sequence[int],
    max_tokens: int,
    *,
    mark: dict[str, Any] | None = None,
    stops: bool = False,
    salt: str | None = None,
    resumable: bool = False,
    now: float = 0.0,
) -> Request:
    """A vLLM request as an engine would hand it to its scheduler."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        stop_token_ids=sorted(STOP_IDS) if stops else None,
        ignore_eos=True,
        detokenize=False,
        extra_args={"pingpong": mark} if mark is not None else None,
        **({"prefill_progress": True} if PREFILL_PROGRESS in ABILITIES else {}),
    )
    if hasattr(params, "update_from_generation_config"):
        params.update_from_generation_config({}, 2)
    return Request(
        request_id=name,
        prompt_token_ids=list(ids),
        sampling_params=params,
        pooling_params=None,
        arrival_time=now,
        block_hasher=_hasher,
        cache_salt=salt,
        resumable=resumable,
    )
