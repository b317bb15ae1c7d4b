"""What `vllm_retention.py` relies on in vLLM's block pool, looked up in the installed version before its engine starts.

As `vllm_scheduler_checks.py` does it: signatures and source are read, nothing is started.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from pingpong_bus.errors import ConfigError


def check_retention() -> None:
    """See that the installed vLLM has what keeping prefixes relies on. It imports much of vLLM.

    Raises:
        ConfigError: it lacks something; the first thing is named.
    """
    if (fault := next(pool_faults(installed_pool()), None)) is not None:
        from pingpong_worker.vllm_versions import installed_version

        version = ".".join(map(str, installed_version()))
        raise ConfigError(
            f"keeping prefixes does not know the block pool of vLLM {version}: {fault}.",
            field="prefixes.keep",
            hint="Set `[prefixes] keep = 0`, or install a version of vLLM that is known to work.",
        )


def installed_pool() -> SimpleNamespace:
    """vLLM's classes that `pool_faults` looks at."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

    return SimpleNamespace(
        pool=BlockPool,
        queue=FreeKVCacheBlockQueue,
        block=KVCacheBlock,
        map=BlockHashToBlockMap,
        manager=KVCacheManager,
        coordinator=KVCacheCoordinator,
        group_hash=kv_cache_utils.make_block_hash_with_group_id,
    )


def pool_faults(parts: Any) -> Iterator[str]:
    """What is missing or other than it was, as ends of sentences.

    Args:
        parts: as from `installed_pool`.
    """
    for owner, method, parameters in (
        (parts.pool, "get_new_blocks", ["self", "num_blocks"]),
        (parts.pool, "reset_prefix_cache", ["self"]),
        (parts.map, "get_one_block", ["self", "key"]),
        (parts.queue, "__init__", ["self", "blocks"]),
        (parts.queue, "remove", ["self", "block"]),
        (parts.queue, "append", ["self", "block"]),
        (parts.queue, "append_n", ["self", "blocks"]),
        (parts.queue, "prepend_n", ["self", "blocks"]),
        (parts.coordinator, "cache_blocks", ["self", "request", "num_computed_tokens"]),
    ):
        function = getattr(owner, method, None)
        found = list(inspect.signature(function).parameters) if function is not None else []
        if found[: len(parameters)] != parameters:
            yield f"`{owner.__name__}.{method}` takes ({', '.join(found[1:])})" if found else f"there is no `{method}`"
            return
    for owner, method, phrase, meaning in (
        (
            parts.pool,
            "get_new_blocks",
            "self.free_block_queue.popleft_n(",
            "takes blocks from elsewhere than the queue",
        ),
        (parts.pool, "get_num_free_blocks", "self.free_block_queue.num_free_blocks", "counts other blocks as free"),
        (parts.pool, "touch", "self.free_block_queue.remove(", "takes a block that is found in another way"),
        (parts.pool, "free_blocks", "self.free_block_queue.append_n(", "frees blocks in another way"),
        (parts.pool, "__init__", "self.cached_block_hash_to_block", "knows cached blocks in another way"),
        (parts.pool, "__init__", "self.hash_block_size", "hashes blocks of another size"),
        (parts.queue, "popleft_n", "self.fake_free_list_head.next_free_block", "takes blocks from another end"),
        (parts.queue, "remove", "block.prev_free_block", "is linked in another way"),
        (parts.queue, "append", "self.fake_free_list_tail", "is linked in another way"),
        (parts.manager, "__init__", "self.block_pool = ", "has its block pool elsewhere"),
    ):
        function = getattr(owner, method, None)
        if function is None or phrase not in inspect.getsource(function):
            yield f"`{owner.__name__}.{method}` {meaning}"
    if not isinstance(getattr(parts.block, "block_hash", None), property):
        yield "a block has no `block_hash`"
    if parts.group_hash(b"hash", 0) != b"hash" + bytes(4):
        yield "hashes of blocks are made in another way"
