"""A vLLM engine, with the arguments that a worker would give it, whose scheduler is told the size of each step."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import random
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from forced_policy import GRANT_BYTES, GRANT_FILE
from mixed_trace import read_trace
from pingpong_worker.config import WorkerConfig
from pingpong_worker.vllm_plugin import WORKER_PID
from pingpong_worker.vllm_settings import engine_arguments, engine_environment
from pingpong_worker.vllm_versions import installed_version

STEPS = 12
"""Mixed steps of a timing; the first and the last, which hold something else too, are left out."""
ALONE_STEPS = 48
LEAD = 8
"""Tokens of the answer before anything is timed or appended."""
_LEAST_CONTEXT = 16
_FIRST_ID = 100
"""Below are special tokens, usually."""
_RESET_S = 0.05


class ForcedEngine:
    """Times single steps.

    Args:
        llm: vLLM's `AsyncLLM`.
        grant: of one number: how many tokens appends get in each step with decodes.
        traces: the folder that the engine's profiler writes to.
    """

    def __init__(self, llm: Any, grant: memoryview, traces: Path) -> None:
        self._llm = llm
        self._grant = grant
        self._traces = traces
        self._vocabulary: int = llm.model_config.get_vocab_size()
        self._names = itertools.count()

    async def reset(self) -> None:
        """Forget everything in the prefix cache."""
        while not await self._llm.reset_prefix_cache():  # noqa: ASYNC110  what just ended holds blocks a step more
            await asyncio.sleep(_RESET_S)

    async def steps(self, context: int, tokens: int, seed: str) -> tuple[list[float], float]:
        """Gaps in ms between an answer's tokens behind `context` ones, and what the appends beside it took.

        Args:
            tokens: of each append; 0: the answer is alone.
            seed: of what is appended, which must be new to the prefix cache.
        """
        self._grant[0] = tokens
        answered = self._ids(f"answer {context}", context)
        await self._compute(answered)
        prompt = [*answered, _FIRST_ID]
        if tokens:
            return await self._beside(prompt, context, tokens, seed)
        times = [time.perf_counter() async for _ in self._tokens(prompt, LEAD + ALONE_STEPS)]
        return _gaps(times[LEAD:]), 0.0

    async def _beside(self, prompt: Sequence[int], context: int, tokens: int, seed: str) -> tuple[list[float], float]:
        begins = max(_LEAST_CONTEXT, context - tokens * STEPS // 2)
        grown = self._ids(f"grown {context}", begins) + self._ids(seed, tokens * STEPS)
        await self._compute(grown[:begins])
        times: list[float] = []
        appending: asyncio.Task[tuple[float, float]] | None = None
        async with aclosing(self._tokens(prompt, LEAD + 4 * STEPS)) as answer:
            async for _ in answer:
                times.append(time.perf_counter())
                if len(times) == LEAD:
                    appending = asyncio.create_task(self._compute(grown))
                if appending is not None and appending.done():
                    break
        assert appending is not None  # noqa: S101  the answer is longer than its lead
        handed, computed = await appending
        within = [at for at in times if handed <= at <= computed]
        return _gaps(within[1:-1]), (computed - handed) * 1e3

    async def profile(self, context: int, tokens: int, seed: str) -> list[dict[str, Any]]:
        """Run such steps under the engine's profiler, having warmed up; the traces that it wrote."""
        await self.steps(context, tokens, f"{seed} before")
        before = set(self._traces.rglob("*.json*"))
        await self._llm.start_profile()
        try:
            await self.steps(context, tokens, seed)
        finally:
            await self._llm.stop_profile()
        return [read_trace(path) for path in sorted(set(self._traces.rglob("*.json*")) - before)]

    def _ids(self, seed: str, count: int) -> list[int]:
        """Random token ids: fewer of the same seed are the beginning of more."""
        draw = random.Random(seed)
        return [draw.randrange(_FIRST_ID, self._vocabulary) for _ in range(count)]

    async def _compute(self, ids: Sequence[int]) -> tuple[float, float]:
        """Compute a prompt as an append; when it was handed over and when it was computed."""
        handed = time.perf_counter()
        async for _ in self._tokens(ids, 1, append=True):
            pass
        return handed, time.perf_counter()

    async def _tokens(self, ids: Sequence[int], count: int, *, append: bool = False) -> AsyncGenerator[int, None]:
        """An answer of so many tokens, as they come."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"pingpong": {"append": True}} if append else None,
        )
        prompt = TokensPrompt(prompt_token_ids=list(ids))
        async for output in self._llm.generate(prompt, params, f"step{next(self._names)}"):
            for token in output.outputs[0].token_ids:
                yield token


def _gaps(times: Sequence[float]) -> list[float]:
    return [round((after - before) * 1e3, 3) for before, after in itertools.pairwise(times)]


@asynccontextmanager
async def forced_engine(config: WorkerConfig, *, profiler: bool) -> AsyncIterator[ForcedEngine]:
    """Start the engine that a worker of this configuration would start, with a forced scheduler.

    Args:
        config: of a worker with the decode-first scheduler; its model is a folder.
        profiler: whether steps are to be profiled.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with tempfile.TemporaryDirectory(prefix="mixed-step-") as folder:
        grant = Path(folder) / "grant"
        grant.write_bytes(bytes(GRANT_BYTES))
        _set_environment(config, grant)
        arguments = _arguments(config, Path(folder) if profiler else None)
        with grant.open("r+b") as file:
            number = memoryview(mmap.mmap(file.fileno(), GRANT_BYTES)).cast("Q")
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        try:
            yield ForcedEngine(llm, number, Path(folder))
        finally:
            llm.shutdown()


def _set_environment(config: WorkerConfig, grant: Path) -> None:
    """What the engine's process inherits: its settings, the number's file, and where its scheduler is found."""
    for name, value in engine_environment(config, os.environ).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    path = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ[GRANT_FILE] = str(grant)
    os.environ[WORKER_PID] = str(os.getpid())  # so that the engine's processes change vLLM as a worker's do
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


def _arguments(config: WorkerConfig, traces: Path | None) -> dict[str, Any]:
    arguments = engine_arguments(config, config.model, installed_version())
    kind = "AsyncForcedScheduler" if "Async" in str(arguments["scheduler_cls"]) else "ForcedScheduler"
    arguments["scheduler_cls"] = f"forced_scheduler.{kind}"
    if traces is not None:
        arguments["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
        }
    return arguments
