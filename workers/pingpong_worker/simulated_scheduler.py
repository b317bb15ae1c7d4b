"""The simulated engine's scheduler: continuous batching, chunked prefill, a prefix cache, and a model of fixed rules.

Pure: the caller plans a step, lets its duration pass, and commits it. What it shares with vLLM: decodes are scheduled
before prefills; a step holds at most `max_num_batched_tokens`; full blocks of computed tokens enter the prefix cache
under a hash of everything before them and the salt; at least one prompt token is always computed. Simpler than there:
a request reserves its full length when it is admitted, so that nothing is ever pre-empted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from pingpong_bus.messages import Sampling
from pingpong_worker.config import SimulatedSettings
from pingpong_worker.simulated_messages import Chunk, Computed, Reply, Sampled

EOS = 257
"""The token that ends an answer; `<|im_end|>` in `simulated_prompts.py`."""

_ALPHABET = b"etaoinshrdlucmfwypvbgkjqxz     .\n"
_EOS_ONE_IN = 128


class Step(msgspec.Struct, frozen=True):
    """A planned step."""

    duration_s: float
    rows: list[tuple[Request, int]]
    """Requests, and how many of their tokens the step computes."""


class Request:
    """One request: its ids, and how many of them are computed."""

    def __init__(self, request: str, salt: str | None) -> None:
        self.id = request
        self.ids: list[int] = []
        self.prompt_tokens = 0
        self.computed = 0
        self.cached_tokens = 0
        self.sampling: Sampling | None = None
        self.admitted = False
        self.ended = False
        self.reserved_blocks = 0
        self.block_hashes: list[bytes] = []
        self.salt = (salt or "").encode()
        self._digest = hashlib.blake2b(digest_size=8)

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        self.ids.extend(ids)
        self._digest.update(_pack(ids))

    @property
    def outputs(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt_tokens

    def block_hash(self, block: int, size: int) -> bytes:
        """Hash of a full block and of all before it; blocks are asked for in order."""
        while len(self.block_hashes) <= block:
            at = len(self.block_hashes) * size
            before = self.block_hashes[-1] if self.block_hashes else self.salt
            self.block_hashes.append(hashlib.blake2b(before + _pack(self.ids[at : at + size]), digest_size=16).digest())
        return self.block_hashes[block]

    def sample(self, sampling: Sampling) -> int:
        """The next token: a pure function of every id before it, and of the seed where there is a temperature."""
        digest = self._digest
        if sampling.temperature > 0:
            digest = digest.copy()
            digest.update(repr((sampling.temperature, sampling.top_p, sampling.seed)).encode())
        value = int.from_bytes(digest.digest(), "little")
        if not sampling.ignore_eos and (value >> 32) % _EOS_ONE_IN == 0:
            return EOS
        return _ALPHABET[value % len(_ALPHABET)]


class PrefixCache:
    """Hashes of computed blocks, the least recently used first; holds at most `blocks`."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def touch(self, block: bytes) -> bool:
        """Whether the block is there; it becomes the most recently used."""
        if block not in self._known:
            return False
        self._known.move_to_end(block)
        return True

    def add(self, block: bytes) -> None:
        """Enter a block, and evict what no longer fits."""
        self._known[block] = None
        self._known.move_to_end(block)
        while len(self._known) > self._blocks:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Forget every block."""
        self._known.clear()


class SimulatedScheduler:
    """Holds all requests; see the module's text for its rules."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings
        self._cache = PrefixCache(settings.kv_tokens // settings.block_size)
        self._free_blocks = settings.kv_tokens // settings.block_size
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def add(self, chunk: Chunk) -> None:
        """Give a request its next prompt tokens."""
        request = self._requests.get(chunk.request)
        if request is None:
            request = self._requests[chunk.request] = Request(chunk.request, chunk.salt)
            self._waiting.append(request)
        request.extend(chunk.ids)
        request.prompt_tokens += len(chunk.ids)
        request.sampling = chunk.sampling
        if request.admitted:
            self._reserve(request)

    def abort(self, request_id: str) -> None:
        """Forget a request; its computed blocks stay in the prefix cache."""
        if request := self._requests.get(request_id):
            self._end(request)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block."""
        self._cache.clear()

    def plan(self) -> Step | None:
        """The next step; None while there is nothing to compute."""
        budget = self._settings.max_num_batched_tokens
        rows: list[tuple[Request, int]] = []
        for decoding in (True, False):
            for request in self._running:
                if (request.outputs > 0) == decoding and budget > 0:
                    tokens = min(budget, len(request.ids) - request.computed)
                    if tokens > 0:
                        rows.append((request, tokens))
                        budget -= tokens
        while budget > 0 and self._waiting and self._admit(self._waiting[0]):
            request = self._waiting.popleft()
            tokens = min(budget, len(request.ids) - request.computed)
            rows.append((request, tokens))
            budget -= tokens
        return Step(self._duration(rows), rows) if rows else None

    def commit(self, step: Step) -> list[Reply]:
        """Carry out a planned step once its duration has passed; requests aborted since are skipped."""
        replies: list[Reply] = []
        for request, tokens in step.rows:
            if request.ended:
                continue
            self._compute(request, tokens)
            if request.computed < len(request.ids):
                continue
            if request.sampling is None:
                replies.append(Computed(request.id))
            else:
                replies.append(self._sample(request, request.sampling))
        return replies

    def _admit(self, request: Request) -> bool:
        """Give the request a seat and look its prefix up; False while there is no room."""
        if len(self._running) >= self._settings.max_num_seqs or not self._reserve(request):
            return False
        size = self._settings.block_size
        block = 0
        # One token is left to compute, whatever the cache holds: there would be nothing to sample from.
        while (block + 1) * size < len(request.ids) and self._cache.touch(request.block_hash(block, size)):
            block += 1
        request.computed = request.cached_tokens = block * size
        request.admitted = True
        self._running.append(request)
        return True

    def _reserve(self, request: Request) -> bool:
        """Hold blocks for the request's full length. A growing request takes its growth even where none is free:
        refusing it could leave two of them waiting for each other."""
        length = len(request.ids) + (request.sampling.max_tokens if request.sampling else 0)
        missing = -(-length // self._settings.block_size) - request.reserved_blocks
        if not request.admitted and missing > self._free_blocks:
            return False
        request.reserved_blocks += missing
        self._free_blocks -= missing
        return True

    def _duration(self, rows: list[tuple[Request, int]]) -> float:
        tokens = sum(tokens for _, tokens in rows)
        products = sum(tokens * (request.computed + tokens) for request, tokens in rows)
        settings = self._settings
        return settings.step_ms * 1e-3 + tokens * settings.row_us * 1e-6 + products * settings.context_ns * 1e-9

    def _compute(self, request: Request, tokens: int) -> None:
        size = self._settings.block_size
        first = request.computed // size
        request.computed += tokens
        for block in range(first, request.computed // size):
            self._cache.add(request.block_hash(block, size))

    def _sample(self, request: Request, sampling: Sampling) -> Sampled:
        token = request.sample(sampling)
        stopped = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        reason = None
        if stopped:
            reason = "stop"
        else:
            request.extend([token])
            if request.outputs >= sampling.max_tokens:
                reason = "length"
        if reason is not None:
            self._end(request)
        return Sampled(
            request.id, None if stopped else token, reason, token if stopped else None, request.cached_tokens
        )

    def _end(self, request: Request) -> None:
        request.ended = True
        del self._requests[request.id]
        if request.admitted:
            self._running.remove(request)
            self._free_blocks += request.reserved_blocks
        else:
            self._waiting.remove(request)


def _pack(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()
