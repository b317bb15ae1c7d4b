"""How our requests are told apart inside vLLM: `SamplingParams.extra_args["pingpong"]`, which our schedulers read.

    {"append": True}        computes part of a prompt ahead of its answer; samples one token, which nobody reads
    {"grid": 256}           its prompt is cut at multiples of so many tokens
    {"itl_ratio": 1.2}      while it decodes, a step takes at most so many times what one without appends takes
    {"itl_target_ms": 20}   while it decodes, a step takes at most so long
    {"drafts": [[5, 7]]}    its tokens may be guessed, from its prompt and from these runs (`vllm_guesses.py`)
    {"draft_tokens": 8}     the most that are guessed for a step
    {"session": "a/1"}      its prompt begins with the one that this session submitted last (`vllm_block_hashes.py`)
    {"keep": [640, 2.5]}    its first 640 tokens are expected to come again, 2.5 times an hour (`vllm_retention.py`)

Requests without a mark, of whoever shares the engine, are scheduled as vLLM would.
"""

from __future__ import annotations

from typing import Any

KEY = "pingpong"
APPEND = "append"
DRAFTS = "drafts"
DRAFT_TOKENS = "draft_tokens"
GRID = "grid"
ITL_RATIO = "itl_ratio"
ITL_TARGET_MS = "itl_target_ms"
SESSION = "session"
KEEP = "keep"

GUESS_VARIABLE = "PINGPONG_GUESS_TOKENS"
"""Environment variable: the most tokens that are guessed for a request in a step, for the model's process."""
KEEP_VARIABLE = "PINGPONG_KEEP_PREFIXES"
"""Environment variable: the part of the KV cache that such beginnings may hold, for the engine's process."""

_NONE: dict[str, Any] = {}


def mark_of(params: Any) -> dict[str, Any]:
    """The mark in `SamplingParams`; empty where there is none, or no `SamplingParams` (pooling)."""
    extra = getattr(params, "extra_args", None)
    mark = extra.get(KEY) if extra else None
    return mark if isinstance(mark, dict) else _NONE


def is_append(request: Any) -> bool:
    """Whether a vLLM `Request` computes ahead, and nobody waits for it.

    A streaming-input session whose last chunk is already queued behind the append is waited for.
    """
    if not mark_of(request.sampling_params).get(APPEND):
        return False
    queued = request.streaming_queue or ()
    return all(chunk is None or mark_of(chunk.sampling_params).get(APPEND) for chunk in queued)
