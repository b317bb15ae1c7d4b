"""Block hashes of growing prompts, remembered from one submission to the next.

A prefix-cache session submits its whole prompt again each time, and vLLM hashes every block of it anew, in Python: 1 ms
for 12,000 tokens in blocks of 16, and longer on slower cores. The last of these submissions, `finalize`, is what a user
waits for. A hash depends on nothing but the tokens up to its block's end, the salt, and what ours never have (LoRA,
images, embeddings); so where a prompt begins with the one that the same session submitted last, token by token, the
hashes of that one's blocks are taken over, and vLLM's own function goes on behind them.

`vllm_plugin.py` puts this into the process of the `EngineCore`, before it makes its hasher.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from pingpong_worker.vllm_marks import SESSION, mark_of

MAX_TOKENS = 4_000_000
"""Prompt tokens that are remembered, of all sessions together: 10 bytes each with blocks of 16. The least recently used
go first."""

Hasher = Callable[[Any], list[Any]]
"""vLLM's: of a request, the hashes of the full blocks behind those that it has."""


class _Known(msgspec.Struct, frozen=True, gc=False):
    tokens: bytes
    """The prompt's ids, packed: compared ten times as fast as lists."""
    salt: str | None
    hashes: list[Any]
    """Of all full blocks of the prompt."""


class BlockHashMemo:
    """Wraps vLLM's hasher; to be called in its place.

    Args:
        hasher: vLLM's.
        max_tokens: how many prompt tokens are remembered.
    """

    def __init__(self, hasher: Hasher, max_tokens: int = MAX_TOKENS) -> None:
        self._hasher = hasher
        self._max_bytes = max_tokens * array("I").itemsize
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._bytes = 0
        """Of all packed prompts."""
        self._lock = threading.Lock()
        """Prompts are hashed in vLLM's input thread, and answers that fill a first block in its main one."""

    def __call__(self, request: Any) -> list[Any]:
        """What the hasher would give."""
        session = None if request.block_hashes else _session_of(request)
        if session is None:
            return self._hasher(request)
        tokens = array("I", request.prompt_token_ids).tobytes()
        known = self._known_hashes(session, tokens, request.cache_salt)
        empty, request.block_hashes = request.block_hashes, known
        try:
            hashes = [*known, *self._hasher(request)]
        finally:
            request.block_hashes = empty  # this very list: its `extend` waits for what is returned
        self._remember(session, _Known(tokens, request.cache_salt, hashes))
        return hashes

    def _known_hashes(self, session: str, tokens: bytes, salt: str | None) -> list[Any]:
        """Hashes of a prompt's first blocks."""
        with self._lock:
            known = self._known.get(session)
        if known is None or known.salt != salt or not tokens.startswith(known.tokens):
            return []
        return known.hashes

    def _remember(self, session: str, known: _Known) -> None:
        with self._lock:
            if (old := self._known.pop(session, None)) is not None:
                self._bytes -= len(old.tokens)
            self._known[session] = known
            self._bytes += len(known.tokens)
            while self._bytes > self._max_bytes:
                _, old = self._known.popitem(last=False)
                self._bytes -= len(old.tokens)


def _session_of(request: Any) -> str | None:
    """The session that a prompt of ours belongs to; None where its hashes depend on more than tokens and salt, or where
    tokens have been written behind the prompt."""
    if request.lora_request is not None or request.mm_features or request.prompt_embeds is not None:
        return None
    if request.num_tokens != request.num_prompt_tokens:
        return None
    session = mark_of(request.sampling_params).get(SESSION)
    return session if isinstance(session, str) else None


def remember_block_hashes() -> None:
    """Make the `EngineCore` that this process is about to start use a memo; where vLLM has changed, do nothing.

    Call it once.
    """
    from vllm.v1.engine import core

    make = getattr(core, "get_request_block_hasher", None)
    if make is None:
        return

    def get_request_block_hasher(*args: Any, **kwargs: Any) -> BlockHashMemo:
        return BlockHashMemo(make(*args, **kwargs))

    core.get_request_block_hasher = get_request_block_hasher
