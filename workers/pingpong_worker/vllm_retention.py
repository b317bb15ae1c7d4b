"""Static beginnings of prompts, kept in vLLM's prefix cache while others come and go.

vLLM's free blocks stand in one queue: what was used last goes to its end, what is allocated next comes from its front,
and loses what it held. So fifty chains that nobody runs again push out the beginning of one that comes every minute.
Here blocks that `prefix_retention.py` wants kept go into a second queue beside it when they are freed. They count as
free all the while, so that nothing is admitted later or pre-empted sooner because of them, and where other blocks run
out they are handed out after all, those worth least first. What comes to be wanted while it is free already, steps out
as it comes to the front.

Whose beginning is expected back is told by a mark (`vllm_marks.KEEP`) on each request of a session. It is taken note of
where the request's blocks enter the cache. Blocks are known by vLLM's own hashes, which have the salt in them: what is
cached under a salt, or on a grid, is kept as that and found as that.

As in `vllm_grid.py`, methods are wrapped on the objects: vLLM makes them, and none is of a class that could be given.
What is relied on is looked up by `vllm_retention_checks.py` before the engine starts. Models of which some layers keep
other state than one KV entry for each token have several groups of blocks, with hashes of their own; nothing is kept
there.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from pingpong_worker.prefix_retention import PrefixRetention, prefill_seconds
from pingpong_worker.vllm_marks import KEEP, KEEP_VARIABLE, mark_of

_log = logging.getLogger("pingpong_worker")

UNKNOWN_TOKEN_S = 1e-4
"""What computing a token takes, until the engine has learnt its prices; only proportions matter."""
_AT_ONCE = 16
"""Where kept blocks have to be given up, at least one of so many is."""
_ONE_GROUP = (0).to_bytes(4, "big")
"""What vLLM adds to a block's hash for the first group of layers."""


def share_from_environment() -> float:
    """The part of the KV cache that may be kept, as the worker has said; 0: none."""
    return float(os.environ.get(KEEP_VARIABLE) or 0.0)


def hold_prefixes(
    manager: Any,
    share: float,
    chunk: int,
    price: Callable[[int, float], float],
    clock: Callable[[], float] | None = None,
) -> KeptBlocks | None:
    """Make a vLLM `KVCacheManager` keep marked beginnings of prompts.

    Args:
        manager: of the scheduler.
        share: the part of its blocks that may be kept; 0: none, and nothing is changed.
        chunk: tokens of a prompt that a step takes at most.
        price: seconds of a step with so many prompt tokens and so much attention work; infinite where unknown.
        clock: gives seconds.

    Returns:
        What is kept; None where nothing is.
    """
    pool = manager.block_pool
    if not share or not pool.enable_caching:
        return None
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or managers[0].block_size != pool.hash_block_size:
        _log.warning("no beginnings of prompts are kept: the model's layers have several kinds of KV blocks")
        return None
    kept = KeptBlocks(pool, PrefixRetention(int(share * pool.num_gpu_blocks)))
    size = pool.hash_block_size
    now = clock or time.monotonic
    insert = manager.coordinator.cache_blocks

    def cost(tokens: int) -> float:
        seconds = prefill_seconds(tokens, chunk, price)
        return seconds if math.isfinite(seconds) else tokens * UNKNOWN_TOKEN_S

    def cache_blocks(request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> None:
        insert(request, num_computed_tokens, *args, **kwargs)
        if mark := mark_of(request.sampling_params).get(KEEP):
            tokens, reuse = mark
            blocks = tokens // size
            if blocks > 0 and blocks * size <= num_computed_tokens:
                kept.note(request.block_hashes, blocks, reuse, lambda: cost(blocks * size), now())

    manager.coordinator.cache_blocks = cache_blocks
    return kept


class KeptBlocks:
    """Keeps blocks of a vLLM `BlockPool` from being handed out, as long as there are others.

    Args:
        pool: whose methods are wrapped.
        policy: which blocks to keep.
    """

    def __init__(self, pool: Any, policy: PrefixRetention[bytes]) -> None:
        self._pool = pool
        self._queue = pool.free_block_queue
        self._policy = policy
        self._aside = type(self._queue)([])
        """Kept blocks that are free. Its own count is not looked at: the pool's queue counts them."""
        self._by_hash: dict[bytes, Any] = {}
        """Blocks that stand aside."""
        self._get, self._reset = pool.get_new_blocks, pool.reset_prefix_cache
        self._remove, self._append = self._queue.remove, self._queue.append_n
        pool.get_new_blocks = self._get_new_blocks
        pool.reset_prefix_cache = self._reset_prefix_cache
        self._queue.remove = self._removed
        self._queue.append_n = self._appended

    def __len__(self) -> int:
        """Free blocks that stand aside."""
        return len(self._by_hash)

    @property
    def share(self) -> float:
        """The part of the pool that is kept, in use or not, 0 to 1."""
        return len(self._policy) / int(self._pool.num_gpu_blocks)

    @property
    def policy(self) -> PrefixRetention[bytes]:
        """Which blocks are kept."""
        return self._policy

    def note(self, hashes: Sequence[bytes], blocks: int, reuse: float, cost: Callable[[], float], now: float) -> None:
        """A beginning of a prompt is in use; it costs nothing to say so in every step.

        Args:
            hashes: of the prompt's blocks, without a group's number.
            blocks: how many of them it is, at least one.
            reuse: how many times an hour it is expected to come again.
            cost: gives seconds that computing it takes.
            now: in seconds.
        """
        if self._policy.is_fresh(hashes[blocks - 1] + _ONE_GROUP, reuse, now):
            return
        for key in self._policy.note([one + _ONE_GROUP for one in hashes[:blocks]], reuse, cost(), now):
            self._let_go(key)

    def _get_new_blocks(self, num_blocks: int) -> Any:
        if len(self._policy) or self._by_hash:
            self._make_room(num_blocks)
        return self._get(num_blocks)

    def _make_room(self, blocks: int) -> None:
        """See that so many blocks at the queue's front are not kept, or that no others are left."""
        queue, missing = self._queue, blocks
        if blocks > queue.num_free_blocks:
            return  # the pool refuses it
        block = queue.fake_free_list_head.next_free_block
        while missing > 0 and block is not queue.fake_free_list_tail:
            following = block.next_free_block
            if self._is_kept(block):
                missing -= self._put_aside(block)
            else:
                missing -= 1
            block = following
        if missing > 0:
            stale = [key for key, block in self._by_hash.items() if block.block_hash != key]  # vLLM has forgotten it
            missing -= sum(map(self._let_go, stale))
        if missing > 0:
            # More than are missing, so that it is not to be done again for the next block that a decode fills.
            given = self._policy.least(self._by_hash, max(missing, len(self._by_hash) // _AT_ONCE))
            self._policy.give_up(given)
            for key in given:
                self._let_go(key)

    def _is_kept(self, block: Any) -> bool:
        key = block.block_hash
        if key is None or key not in self._policy:
            return False
        # Of several blocks that hold the same vLLM finds one, and the others are of no use.
        return self._pool.cached_block_hash_to_block.get_one_block(key) is block

    def _put_aside(self, block: Any) -> bool:
        """Let a block step out of the queue; whether one came back in its place, which vLLM has forgotten."""
        key = block.block_hash
        back = self._let_go(key)
        self._remove(block)
        self._aside.append(block)
        self._queue.num_free_blocks += 1
        self._by_hash[key] = block
        return back

    def _let_go(self, key: bytes) -> bool:
        """Put a block back to the queue's front; False where none of this hash stands aside."""
        block = self._by_hash.pop(key, None)
        if block is None or block.ref_cnt > 0:
            return False
        self._remove(block)
        self._queue.prepend_n([block])
        return True

    def _appended(self, blocks: list[Any]) -> None:
        """Blocks are free that hold something. Of a long prompt they are many, and a step waits for this."""
        if not len(self._policy):
            self._append(blocks)
            return
        kept, others = [], []
        policy, by_hash, find = self._policy, self._by_hash, self._pool.cached_block_hash_to_block.get_one_block
        for block in blocks:
            key = block.block_hash
            if key is not None and key in policy and find(key) is block:
                if key in by_hash:
                    self._let_go(key)
                by_hash[key] = block
                kept.append(block)
            else:
                others.append(block)
        self._append(others)
        self._aside.append_n(kept)
        self._queue.num_free_blocks += len(kept)

    def _removed(self, block: Any) -> None:
        """A free block is taken into use: it was found in the cache."""
        key = block.block_hash
        if key is not None and self._by_hash.get(key) is block:
            del self._by_hash[key]
        self._remove(block)

    def _reset_prefix_cache(self) -> bool:
        done = bool(self._reset())
        if done:
            self._policy.clear()
            for key in list(self._by_hash):
                self._let_go(key)
        return done
