"""Our engine on the vLLM that PYTHONPATH names, in a process of its own: ``patched_engine.py MODEL``.

Prints one line of JSON: what it can do, and what came of sessions that stock vLLM could not carry so.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from pingpong_bus.messages import Sampling, SessionKind
from pingpong_worker.config import WorkerConfig
from pingpong_worker.metered_session import MeteredSession
from pingpong_worker.shared_memory_names import use_own_names
from pingpong_worker.step_meter import StepMeter
from pingpong_worker.vllm_engine import VllmEngine
from pingpong_worker.vllm_plugin import end_with_worker

LONGEST = 1024
SEEDED = Sampling(max_tokens=24, temperature=0.9, seed=7, ignore_eos=True)


def words(begin: int, count: int) -> list[int]:
    """Ids that are in no other prompt."""
    return [100 + (begin * 7919 + index * 31) % 40_000 for index in range(count)]


async def answered(engine: VllmEngine, ids: Sequence[int], sampling: Sampling) -> list[int]:
    """The answer to a prompt that is given at once."""
    session = engine.open(f"whole {ids[0]} {len(ids)}", cache_salt=None, sampling=sampling, kind="prefix-cache")
    return [token async for output in session.finalize(ids, sampling) for token in output.ids]


async def fed(engine: VllmEngine, ids: Sequence[int], sampling: Sampling, kind: SessionKind) -> dict[str, Any]:
    """A prompt given in three parts: what kind of session carried it, whether its answer is the right one, what each
    append is said to have computed, and how often the engine was heard of during the two appends."""
    right = await answered(engine, ids, sampling)
    await engine.reset_prefix_cache()
    meter = StepMeter()
    session = MeteredSession(engine.open(f"fed {ids[0]}", cache_salt=None, sampling=sampling, kind=kind), meter)
    first, second = len(ids) // 3, 2 * len(ids) // 3
    computed = [await session.append(ids[:first]), await session.append(ids[first:second])]
    heard = meter.steps
    found = [token async for output in session.finalize(ids[second:], sampling) for token in output.ids]
    await engine.reset_prefix_cache()
    return {"kind": session.kind, "equal": found == right, "computed": computed, "heard": heard}


async def crowded(engine: VllmEngine) -> dict[str, Any]:
    """Sessions pause on nearly all of the memory, a request wants half of it, then they go on all at once."""
    kv = engine.limits.kv_tokens
    greedy = Sampling(max_tokens=8, ignore_eos=True)
    prompts = [words(50 + number, kv // 4) for number in range(3)]
    right = [await answered(engine, [*ids, 9, 8, 7], greedy) for ids in prompts]
    other, long = words(80, kv // 2), Sampling(max_tokens=40, ignore_eos=True)
    right_other = await answered(engine, other, long)
    await engine.reset_prefix_cache()
    sessions = [
        engine.open(f"s{number}", cache_salt=None, sampling=greedy, kind="streaming-input") for number in range(3)
    ]
    for session, ids in zip(sessions, prompts, strict=True):
        await session.append(ids)
    async with asyncio.timeout(60):
        found_other = await answered(engine, other, long)

        async def end(session: Any) -> list[int]:
            return [token async for output in session.finalize([9, 8, 7], greedy) for token in output.ids]

        found = await asyncio.gather(*map(end, sessions))
    return {"kinds": [session.kind for session in sessions], "equal": found == right and found_other == right_other}


async def main(model: str) -> None:
    use_own_names()
    engine = VllmEngine(
        WorkerConfig(
            name="patched",
            devices=["cpu:0"],
            model=model,
            dtype="float32",
            engine_args={
                "max_model_len": LONGEST,
                "max_num_batched_tokens": 128,
                "kv_cache_memory_bytes": 64 << 20,
            },
            slab_fd=-1,
            control="",
            bell="",
            supervisor_pid=0,
        )
    )
    await engine.start()
    try:
        found = {
            "abilities": engine.limits.abilities,
            "streaming": await fed(engine, words(1, 600), SEEDED, "streaming-input"),
            "prefix": await fed(engine, words(2, 600), SEEDED, "prefix-cache"),
            "crowded": await crowded(engine),
        }
    finally:
        await engine.shutdown()
    sys.stdout.write(f"answer {json.dumps(found)}\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
elif __name__ == "__mp_main__":
    end_with_worker()
