"""The first requests of an engine, which are slow, so that no user's are; they also teach its scheduler some prices."""

from __future__ import annotations

from collections.abc import Sequence

from pingpong_bus.messages import Sampling
from pingpong_worker.engine import Engine, Session

_PROMPT_TOKENS = 256
_STEP_TOKENS = (16, 32, 64, 128, 256)
"""Sizes of steps that are taken alone, one each: what the scheduler first knows of what an append costs."""
_DECODE_TOKENS = 8
_LEFT = 16
"""Tokens kept free of the engine's length, for what is appended and decoded."""


async def warm_up(engine: Engine) -> None:
    """Use every kind of session, every shape that a scheduler of ours will ask for, and a seed; then forget it all.

    Raises:
        EngineError: the engine cannot do what it is to do all day.
    """
    limits = engine.limits
    longest = max(1, limits.max_model_len - _LEFT)
    ids = [index % limits.vocabulary_size for index in range(longest)]
    greedy = Sampling(max_tokens=_DECODE_TOKENS, ignore_eos=True)
    for kind in limits.sessions:
        session = engine.open(f"warm-up {kind}", cache_salt=None, sampling=greedy, kind=kind)
        await session.append(ids[:_PROMPT_TOKENS])
        await _finish(session, [0], greedy)
    seeded = Sampling(max_tokens=2, temperature=1.0, seed=1, ignore_eos=True)
    await _finish(engine.open("warm-up seeded", cache_salt=None, sampling=seeded), [0], seeded)
    await engine.score([0], [0])  # GPUs compile what counts ranks
    if limits.decode_first:
        for tokens in _STEP_TOKENS:
            # With a salt of its own: what a smaller one has computed must not be found.
            session = engine.open(f"warm-up {tokens}", cache_salt=f"warm-up {tokens}", sampling=greedy)
            await session.append(ids[:tokens])
            await session.abort()
    if limits.grid_tokens and limits.grid_tokens < longest:
        session = engine.open("warm-up grid", cache_salt=None, sampling=greedy, grid=limits.grid_tokens)
        await _finish(session, ids[: limits.grid_tokens + 1], greedy)
    await engine.reset_prefix_cache()


async def _finish(session: Session, ids: Sequence[int], sampling: Sampling) -> None:
    async for _ in session.finalize(ids, sampling):
        pass
