"""How likely an engine finds given tokens behind a prompt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import aclosing

from pingpong_worker.vllm_guards import check_vocabulary
from pingpong_worker.vllm_handle import Handling, VllmHandle

_serials = itertools.count()


async def score_next(
    handle: VllmHandle, ids: Sequence[int], tokens: Sequence[int], grid: int | None
) -> list[float | None]:
    """Log probability (natural) of each of `tokens` to follow `ids`; None for one that can never follow.

    One request for one token, of which only the log probabilities are looked at. Its prompt is computed anew, under a
    salt of its own: what others have left in the prefix cache was computed in whatever shapes they had.

    Raises:
        EngineLost: the engine is gone.
        EngineError: it refused this.
    """
    handle.check_prompt(ids, len(ids), 1)
    check_vocabulary(tokens, handle.limits.vocabulary_size)
    name = f"score-{next(_serials)}"
    handling = Handling(cache_salt=name, grid=grid)
    params = handle.score_params(handling, sorted(set(tokens)))
    found: dict[int, float] = {}
    async with aclosing(handle.generate(handle.make_prompt(ids, handling.salt), params, name)) as outputs:
        async for output in outputs:
            for position in output.outputs[0].logprobs or ():
                found |= {token: entry.logprob for token, entry in position.items()}
    return [value if math.isfinite(value := found.get(token, -math.inf)) else None for token in tokens]
