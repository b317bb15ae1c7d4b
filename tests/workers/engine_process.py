"""A process with a real engine, for tests of how it starts and ends: ``engine_process.py MODEL ARGS_AS_JSON [THEN]``.

Prints one line: "ready", or the error as JSON. "ready" is followed by waiting for the end of standard input; with
"decode", by one long answer after another: "decoding" at the first token, and then the error that ended it; with
"tell", by the stages of its start and what its scheduler shows of a short answer, as JSON; with "keep", by what of two
prompts is found again after others, of which one was expected back; with "stay", by waiting for ever.
"""

from __future__ import annotations

import asyncio
import json
import sys

from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import KeptPrefix, Progress, Sampling
from pingpong_worker.config import WorkerConfig
from pingpong_worker.shared_memory_names import use_own_names
from pingpong_worker.vllm_engine import VllmEngine
from pingpong_worker.vllm_plugin import end_with_worker


def answer(error: PingpongError) -> None:
    words = {"code": error.code, "field": error.field, "text": str(error)}
    sys.stdout.write(f"answer {json.dumps(words)}\n")
    sys.stdout.flush()


async def decode(engine: VllmEngine) -> None:
    """Answer until the engine goes, and tell how that ended and what the engine's check says then."""
    sampling = Sampling(max_tokens=1900, ignore_eos=True)
    told = False
    try:
        while True:  # a tiny model's answer is over in seconds, and whoever is to kill the engine may come later
            async for output in engine.open("s", cache_salt=None, sampling=sampling).finalize([5] * 40, sampling):
                if output.cached_tokens is not None and not told:
                    told = True
                    sys.stdout.write("answer decoding\n")
                    sys.stdout.flush()
    except PingpongError as error:
        answer(error)
    try:
        await engine.check()
    except PingpongError as error:
        answer(error)


async def tell(engine: VllmEngine, told: list[Progress]) -> None:
    """Say what was told of the start, and what the board shows during an answer and once it is over."""
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    held = 0.0
    async for _ in engine.open("s", cache_salt=None, sampling=sampling).finalize([5] * 40, sampling):
        state = engine.scheduler_state()
        held = max(held, state.kv_usage if state else 0.0)
    while (state := engine.scheduler_state()) is None or state.kv_usage > 0:
        await asyncio.sleep(0.01)
    stages = list(dict.fromkeys(progress.stage for progress in told))
    words = {"stages": stages, "held": held, "gc_ms": state.gc_ms}
    sys.stdout.write(f"answer {json.dumps(words)}\n")
    sys.stdout.flush()


async def keep(engine: VllmEngine) -> None:
    """Ask for two prompts, then for forty others, then for the two again."""
    sampling = Sampling(max_tokens=2, ignore_eos=True)

    async def ask(name: str, ids: list[int], expected: KeptPrefix | None = None) -> int:
        session = engine.open(name, cache_salt=None, sampling=sampling, keep=expected)
        await session.append(ids[:200])
        return sum([output.cached_tokens or 0 async for output in session.finalize(ids[200:], sampling)])

    known = [[5 + at % 400 for at in range(start, start + 300)] for start in (0, 200)]
    expected = [KeptPrefix(tokens=256, reuse=2.0), None]
    for name in ("first", "again"):
        found = [await ask(f"{name} {at}", ids, expected[at]) for at, ids in enumerate(known)]
        if name == "again":
            break
        for other in range(40):
            await ask(f"other {other}", [5 + (other * 7 + at * 3) % 500 for at in range(300)])
    words = {"found": found, "keep_tokens": engine.limits.keep_tokens, "kv_tokens": engine.limits.kv_tokens}
    sys.stdout.write(f"answer {json.dumps(words)}\n")
    sys.stdout.flush()


async def main(model: str, engine_args: str, then: str = "") -> None:
    use_own_names()
    told: list[Progress] = []
    engine = VllmEngine(
        WorkerConfig(
            name="test",
            devices=["cpu:0"],
            model=model,
            engine_args=json.loads(engine_args),
            slab_fd=-1,
            control="",
            bell="",
            supervisor_pid=0,
            keep_prefixes=0.5 if then == "keep" else 0.0,
        ),
        told.append,
    )
    try:
        await engine.start()
    except PingpongError as error:
        answer(error)
    else:
        sys.stdout.write("answer ready\n")
        sys.stdout.flush()
        if then == "decode":
            await decode(engine)
        if then == "tell":
            await tell(engine, told)
        if then == "keep":
            await keep(engine)
        while then == "stay":
            await asyncio.sleep(60)
        sys.stdin.read()
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
elif __name__ == "__mp_main__":
    end_with_worker()
    use_own_names()
