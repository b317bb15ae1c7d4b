"""Prompts cut at multiples of a cell of G tokens, whatever the token budget, the prefix cache or other requests leave.

A prompt is computed as [0, G) [G, 2G) ... [kG, n), one cell a step. Matrix products round differently for different
numbers of rows, so a prompt that is sent at once and one that grows by appends give the same bits only where both are
cut at the same places; and where no other request shares their steps, which is for whoever submits them to see to.

The cell is in a request's mark (`vllm_marks.py`); requests without one are not touched. It takes three parts:

1. chunks end at cell ends: `cell_tokens`, from the scheduler's hook for such alignments;
2. hits in the prefix cache end at cell ends;
3. only whole cells of prompts enter the prefix cache: vLLM serves the *oldest* block of equal hash, so a block that was
   once computed in a short last chunk, or by decoding, would be served later in place of the one in its full cell.

A request that is pre-empted computes its own output again as if it were prompt: it goes on rightly, without the bits.
"""

from __future__ import annotations

from typing import Any

from pingpong_worker.vllm_marks import GRID, mark_of


def grid_of(request: Any) -> int:
    """The cell of a vLLM `Request` in tokens; 0: none."""
    return int(mark_of(request.sampling_params).get(GRID, 0))


def cell_tokens(start: int, end: int, grid: int) -> int:
    """Tokens from `start` to the end of its cell, or to `end` where that comes first."""
    return min((start // grid + 1) * grid, end) - start


def hold_cache_to_grid(manager: Any) -> None:
    """Make a vLLM `KVCacheManager` find and keep whole cells only, for requests with a grid.

    Its methods are wrapped on the object: what makes the manager is vLLM's, and no part of it is a class that could be
    given.
    """
    lookup = manager.get_computed_blocks
    insert = manager.coordinator.cache_blocks

    # Before 0.32 without the third value; what is added later is passed on.
    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        found = lookup(request, *args, **kwargs)
        blocks, hit, *rest = found
        grid = grid_of(request)
        if not grid or hit % grid == 0:
            return found
        hit -= hit % grid
        # A lookup takes no references, so that blocks can simply be left out.
        kept = tuple(
            list(group[: hit // one.block_size])
            for group, one in zip(blocks.blocks, manager.coordinator.single_type_managers, strict=True)
        )
        return manager.create_kv_cache_blocks(kept), hit, *rest

    def cache_blocks(request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> None:
        if grid := grid_of(request):
            whole = min(num_computed_tokens, request.num_prompt_tokens)
            num_computed_tokens = whole - whole % grid
        insert(request, num_computed_tokens, *args, **kwargs)

    manager.get_computed_blocks = get_computed_blocks
    manager.coordinator.cache_blocks = cache_blocks
