"""One trial of a vLLM, stock or patched, in a process of its own: `patches.py` starts it and reads what it prints.

    python benchmarks/patch_trials.py append --model FOLDER --args JSON

It speaks to vLLM itself, without pingpongd: what is measured is the patch alone. One line of JSON says what came out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from pingpong_worker.vllm_abilities import APPEND_WITHOUT_SAMPLING, PREFILL_PROGRESS, installed_abilities

STUCK_S = 45.0
"""After so long without its end a request counts as stuck."""
SIZES = (32, 64, 127, 256)
"""Tokens of an append."""


class Trial:
    """An engine, and how its requests are made."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.engine.protocol import StreamingInput
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        from pingpong_worker.vllm_versions import prompt_maker

        self.abilities = installed_abilities()
        self.llm: Any = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                **{
                    "model": model,
                    "skip_tokenizer_init": True,
                    "enable_prefix_caching": True,
                    "disable_log_stats": True,
                    "seed": 0,
                    **arguments,
                }
            )
        )
        self._delta = RequestOutputKind.DELTA
        self._params = SamplingParams
        self._chunk = StreamingInput
        self._prompt = prompt_maker()
        self._requests = 0
        self._random = random.Random(7)
        self.vocabulary = self.llm.vllm_config.model_config.get_vocab_size()
        self.longest = self.llm.vllm_config.model_config.max_model_len

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        cache = self.llm.vllm_config.cache_config
        return int((cache.num_gpu_blocks - 1) * cache.block_size)

    def ids(self, tokens: int) -> list[int]:
        """Ids drawn anew: nothing of them is in the prefix cache."""
        return [self._random.randrange(100, min(self.vocabulary, 40_000)) for _ in range(tokens)]

    def params(self, max_tokens: int, **more: Any) -> Any:
        """Greedy unless said otherwise; the end of the text does not end it."""
        greedy = {} if "temperature" in more else {"temperature": 0.0}
        return self._params(
            max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=self._delta, **greedy, **more
        )

    async def outputs(self, prompt: Sequence[int] | AsyncIterator[Any], params: Any) -> AsyncGenerator[Any, None]:
        """vLLM's outputs of a request."""
        self._requests += 1
        given = prompt if isinstance(prompt, AsyncIterator) else self._prompt(prompt, None)
        async with aclosing(self.llm.generate(given, params, f"r{self._requests}")) as outputs:
            async for output in outputs:
                yield output

    async def tokens(self, prompt: Sequence[int] | AsyncIterator[Any], params: Any) -> list[int]:
        """All tokens of a request."""
        found: list[int] = []
        async for output in self.outputs(prompt, params):
            found.extend(output.outputs[0].token_ids)
        return found

    async def forget(self) -> None:
        """Empty the prefix cache."""
        while not await self.llm.reset_prefix_cache():  # noqa: ASYNC110 - a request holds blocks for a step more
            await asyncio.sleep(0.05)

    def chunk(self, ids: Sequence[int], params: Any) -> Any:
        """A piece of a session's input."""
        return self._chunk(self._prompt(ids, None), params)


class FedSession:
    """A streaming-input session that is fed chunk by chunk, its answer's tokens collected."""

    def __init__(self, trial: Trial, append_tokens: int) -> None:
        self._trial = trial
        self._append = append_tokens
        self._input: asyncio.Queue[Any] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._collecting = False
        self.found: list[int] = []

    async def append(self, ids: Sequence[int]) -> None:
        """Returns when the chunk is computed."""
        self._ended.clear()
        self._input.put_nowait(self._trial.chunk(ids, self._trial.params(self._append)))
        await self._ended.wait()

    async def finalize(self, ids: Sequence[int], params: Any) -> list[int]:
        """The answer's tokens."""
        self._collecting = True
        self._input.put_nowait(self._trial.chunk(ids, params))
        self._input.put_nowait(None)
        await self._task
        return self.found

    async def close(self) -> None:
        """Give it up."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _chunks(self) -> AsyncGenerator[Any, None]:
        while (chunk := await self._input.get()) is not None:
            yield chunk

    async def _run(self) -> None:
        async for output in self._trial.outputs(self._chunks(), self._trial.params(self._append)):
            if self._collecting:
                self.found.extend(output.outputs[0].token_ids)
            if output.outputs[0].finish_reason is not None:
                self._ended.set()


async def append(trial: Trial) -> dict[str, Any]:
    """What an append takes with and without a sample, alternating, each behind the same cached context."""
    found: dict[str, Any] = {"sizes": {}}
    context = trial.ids(min(1024, trial.longest // 2))
    await trial.tokens(context, trial.params(1))
    kinds = (1, 0) if APPEND_WITHOUT_SAMPLING in trial.abilities else (1,)
    for size in SIZES:
        times: dict[int, list[float]] = {kind: [] for kind in kinds}
        for _ in range(25):
            for kind in kinds:
                prompt = [*context, *trial.ids(size)]
                begun = time.perf_counter()
                await trial.tokens(prompt, trial.params(kind))
                times[kind].append(1e3 * (time.perf_counter() - begun))
        found["sizes"][size] = {
            "sampled_ms" if kind else "not_sampled_ms": round(statistics.median(each), 3)
            for kind, each in times.items()
        }
    return found


async def seeded_session(trial: Trial) -> dict[str, Any]:
    """Whether a sampled answer is the same from a session fed in parts as from one prompt."""
    ids, params = trial.ids(400), trial.params(32, temperature=0.9, seed=11)
    whole = await trial.tokens(ids, params)
    await trial.forget()
    session = FedSession(trial, 0 if APPEND_WITHOUT_SAMPLING in trial.abilities else 1)
    for begin in (0, 130, 260):
        await session.append(ids[begin : begin + 130])
    return {"tokens": len(whole), "equal": await session.finalize(ids[390:], params) == whole}


async def pressure(trial: Trial) -> dict[str, Any]:
    """Two sessions pause on most of the memory, then a request needs it; then the sessions go on.

    The same runs alone first say which tokens are right.
    """
    third = trial.kv_tokens // 3
    prompts = [trial.ids(third) for _ in range(2)]
    ends = [trial.ids(40) for _ in range(2)]
    other = trial.ids(third)
    params = trial.params(third // 2)
    right = [await trial.tokens([*prompt, *end], trial.params(16)) for prompt, end in zip(prompts, ends, strict=True)]
    right_other = await trial.tokens(other, params)
    await trial.forget()
    sessions = [FedSession(trial, 1) for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        await session.append(prompt)
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(STUCK_S):
            tokens = await trial.tokens(other, params)
            alone_s = time.perf_counter() - begun
            # Both at once: each must be able to get what the other holds.
            answers = await asyncio.gather(
                *(session.finalize(end, trial.params(16)) for session, end in zip(sessions, ends, strict=True))
            )
    except TimeoutError:
        for session in sessions:
            await session.close()
        return {"stuck": True, "waited_s": STUCK_S, "kv_tokens": trial.kv_tokens}
    return {
        "stuck": False,
        "kv_tokens": trial.kv_tokens,
        "request_s": round(alone_s, 2),
        "all_s": round(time.perf_counter() - begun, 2),
        "equal": tokens == right_other and answers == right,
    }


async def progress(trial: Trial) -> dict[str, Any]:
    """The longest silence of a long prompt, and what being told costs."""
    length = trial.longest - 8
    found: dict[str, Any] = {"prompt_tokens": length, "silence_s": [], "told_silence_s": [], "s": [], "told_s": []}
    told = PREFILL_PROGRESS in trial.abilities
    for turn in range(8):
        asked = told and turn % 2 == 1
        params = trial.params(1, **({"prefill_progress": True} if asked else {}))
        last = begun = time.perf_counter()
        longest = 0.0
        async for _ in trial.outputs(trial.ids(length), params):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        if turn >= 2:  # the first of each warm up
            found["told_silence_s" if asked else "silence_s"].append(round(longest, 3))
            found["told_s" if asked else "s"].append(round(last - begun, 3))
    return found


async def seeded_split(trial: Trial) -> dict[str, Any]:
    """Whether a seeded prompt may be longer than a step, and gives the tokens that it gives from the prefix cache."""
    budget = trial.llm.vllm_config.scheduler_config.max_num_batched_tokens
    ids, params = trial.ids(2 * budget + 40), trial.params(16, temperature=0.9, seed=5)
    try:
        split = await trial.tokens(ids, params)
    except Exception as error:  # noqa: BLE001 - whatever an engine dies of
        return {"died": True, "error": type(error).__name__}
    return {"died": False, "equal": await trial.tokens(ids, params) == split}


async def stay(trial: Trial) -> dict[str, Any]:
    """Serve once, say so, and wait to be killed."""
    await trial.tokens(trial.ids(8), trial.params(1))
    print(json.dumps({"serves": os.getpid()}), flush=True)
    await asyncio.sleep(3600)
    return {}


TRIALS = {
    each.__name__.replace("_", "-"): each for each in (append, seeded_session, pressure, progress, seeded_split, stay)
}


def main() -> int:
    """Run one trial; returns its exit code."""
    parser = argparse.ArgumentParser(description="One trial of a vLLM.")
    parser.add_argument("trial", choices=sorted(TRIALS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--args", type=json.loads, default={}, help="engine arguments as JSON")
    options = parser.parse_args()

    async def run() -> None:
        trial = Trial(options.model, options.args)
        try:
            found = await TRIALS[options.trial](trial)
            print(json.dumps({"abilities": trial.abilities, **found}), flush=True)
        finally:
            trial.llm.shutdown()

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
