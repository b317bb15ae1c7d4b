"""What a step takes in which one answer decodes beside so many appended tokens, by their number and their context.

    python benchmarks/mixed_step.py --config examples/cpu.toml --contexts 256,1024 --tokens 0,16,64 --out steps.jsonl
    python benchmarks/mixed_step.py --config benchmarks/h200.toml --alone --profile --out steps.jsonl
    python benchmarks/mixed_step.py --report steps.jsonl

One engine, without a daemon, with the arguments that a worker would give it; its scheduler is told the size of each
step. An answer decodes behind `context` tokens; beside it a prompt grows by some steps' worth, around the same context.
The gaps between the answer's tokens are the steps. --alone times the model's matrix products and its attention by
themselves first, and --profile takes the engine's own profile of some of the steps: how long the device was busy, and
with what.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import mmap
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from forced_scheduler import GRANT_BYTES, GRANT_FILE
from lone_kernels import LoneKernel, ModelShape, attention, matrices
from pingpong_worker.config import WorkerConfig
from pingpong_worker.model_store import resolve_model
from pingpong_worker.pinning import pin
from pingpong_worker.vllm_settings import engine_arguments, engine_environment
from pingpong_worker.vllm_versions import installed_version
from pingpongd.config import load_config
from provenance import provenance
from runs import append_line, read_lines

STEPS = 12
"""Mixed steps of a timing; the first and the last, which hold something else too, are left out."""
ALONE_STEPS = 48
LONE_ROWS = (1, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512)
SPLITS = (0, 1, 4, 8, 16, 32)
_VOCABULARY = (1000, 40_000)
_HERE = str(Path(__file__).resolve().parent)
"""Where the engine's process finds its scheduler."""
_ATTENTION = re.compile(r"FlashAttnFwd(?!Combine)|flash_fwd")
_KERNELS = {
    "attention": ("flash", "Flash", "prepare_varlen"),
    "matrices": ("gemm", "nvjet", "cutlass", "gemv", "splitK", "cublas"),
    "copies": ("Memcpy", "Memset"),
}


class MixedStep(msgspec.Struct, frozen=True, kw_only=True, tag="mixed"):
    """A row of a results file: steps of one size."""

    setup: str
    """What is particular about the engine."""
    context: int
    """Tokens behind which the answer decodes, and that the appends have before them in the middle."""
    tokens: int
    """Appended tokens of each step."""
    gaps_ms: list[float]
    append_ms: float
    """From handing the appended prompt over until it was computed."""
    provenance: dict[str, Any] = {}


class DeviceStep(msgspec.Struct, frozen=True):
    """A step as the profiler saw it on the device, from one first attention kernel to the next; ms."""

    wall: float
    busy: float
    """When anything ran."""
    kernels: dict[str, float]
    """By kind."""
    launches: int


class StepProfile(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """A row of a results file: where the device's time went; some of the steps have no appends."""

    setup: str
    context: int
    tokens: int
    steps: list[DeviceStep]
    top: list[tuple[str, float]]
    """The costliest kernels of all steps together, ms."""
    provenance: dict[str, Any] = {}


class LoneRow(msgspec.Struct, frozen=True, kw_only=True, tag="alone"):
    """A row of a results file: kernels timed alone."""

    alone: LoneKernel
    provenance: dict[str, Any] = {}


Row = MixedStep | StepProfile | LoneRow


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a decode step takes beside appends.")
    parser.add_argument("--config", type=Path, help="a daemon's configuration; its first group's engine is measured")
    parser.add_argument("--group", help="another group of it, by name")
    parser.add_argument("--setup", default="default", help="a name for what --engine-args changes")
    parser.add_argument("--engine-args", default="{}", help="JSON: raw vLLM arguments over the configuration's")
    parser.add_argument("--contexts", default="2048,4096,8192,12288")
    parser.add_argument("--tokens", default="0,1,15,31,47,63,95,127,159,191,255,383,511")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="time matrices and attention by themselves too")
    parser.add_argument("--profile", default="", metavar="CONTEXT:TOKENS,...", help="profile these steps")
    parser.add_argument("--out", type=Path, help="JSONL file that rows are added to")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="measure nothing, report these files")
    return parser.parse_args(arguments)


def numbers(text: str) -> list[int]:
    """A comma-separated list."""
    return [int(part) for part in text.split(",")]


class Engine:
    """A vLLM engine whose scheduler is told how many tokens to append beside decodes."""

    def __init__(self, llm: Any, grant: mmap.mmap) -> None:
        self._llm = llm
        self._grant = memoryview(grant).cast("Q")
        self._names = itertools.count()

    async def reset(self) -> None:
        """Forget everything in the prefix cache."""
        while not await self._llm.reset_prefix_cache():  # noqa: ASYNC110  what just ended holds blocks a step more
            await asyncio.sleep(0.05)

    async def prefill(self, ids: Sequence[int]) -> None:
        """Compute a prompt."""
        async for _ in self.tokens(ids, 1, append=True):
            pass

    async def tokens(self, ids: Sequence[int], count: int, *, append: bool = False) -> AsyncIterator[int]:
        """Tokens as they come."""
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

    async def mixed(self, context: int, tokens: int, seed: str) -> tuple[list[float], float]:
        """Gaps in ms of an answer beside appends, and what these took; without appends its gaps alone.

        The prompts' first `context` tokens are in the cache, if they were computed for the same context before.
        """
        self._grant[0] = tokens
        answer_prompt = ids_of(f"answer {context}", context)
        begins = max(16, context - tokens * STEPS // 2)
        grown = ids_of(f"grown {context}", begins) + ids_of(seed, tokens * STEPS)
        await self.prefill(grown[:begins])
        await self.prefill(answer_prompt)
        times: list[float] = []
        handed = computed = 0.0
        appending: asyncio.Task[None] | None = None
        done = asyncio.Event()

        async def append() -> None:
            nonlocal computed
            await self.prefill(grown)
            computed = time.perf_counter()
            done.set()

        lead = 8
        most = lead + (STEPS * 4 if tokens else ALONE_STEPS)
        async for _ in self.tokens([*answer_prompt, 7], most):
            times.append(time.perf_counter())
            if tokens and len(times) == lead:
                handed = time.perf_counter()
                appending = asyncio.create_task(append())
            if done.is_set():
                break
        if appending is None:
            return _gaps(times[lead:]), 0.0
        await appending
        within = [at for at in times if handed <= at <= computed]
        return _gaps(within[1:-1]), (computed - handed) * 1e3

    async def profiled(self, context: int, tokens: int, seed: str, folder: Path) -> list[Path]:
        """Run such steps under the engine's profiler; the traces that it wrote."""
        await self.mixed(context, tokens, f"{seed} before")
        before = set(_traces(folder))
        await self._llm.start_profile()
        try:
            await self.mixed(context, tokens, seed)
        finally:
            await self._llm.stop_profile()
        return sorted(set(_traces(folder)) - before)


def _traces(folder: Path) -> list[Path]:
    return list(folder.rglob("*.json*"))


def _gaps(times: Sequence[float]) -> list[float]:
    return [round((after - before) * 1e3, 3) for before, after in itertools.pairwise(times)]


def ids_of(seed: str, count: int) -> list[int]:
    """Random token ids: the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(*_VOCABULARY) for _ in range(count)]


def device_steps(trace: dict[str, Any], layers: int) -> tuple[list[DeviceStep], list[tuple[str, float]]]:
    """What ran on the device, step by step, and the costliest kernels by name; a step has an attention per layer."""
    found = sorted(
        (event["ts"], event["dur"], event["name"])
        for event in trace.get("traceEvents", ())
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event.get("dur")
    )
    marks = [start for start, _, name in found if _ATTENTION.search(name)][::layers]
    names: dict[str, float] = {}
    steps: list[DeviceStep] = []
    position = 0
    for begun, ended in itertools.pairwise(marks):
        kinds: dict[str, float] = {}
        busy, launches, last = 0.0, 0, begun
        while position < len(found) and found[position][0] < ended:
            start, duration, name = found[position]
            position += 1
            if start < begun:
                continue
            busy += max(0.0, start + duration - max(start, last))
            last = max(last, start + duration)
            launches += 1
            kind = next((kind for kind, parts in _KERNELS.items() if any(part in name for part in parts)), "other")
            kinds[kind] = kinds.get(kind, 0.0) + duration / 1e3
            names[name[:90]] = names.get(name[:90], 0.0) + duration / 1e3
        steps.append(DeviceStep((ended - begun) / 1e3, busy / 1e3, kinds, launches))
    return steps, sorted(names.items(), key=lambda item: -item[1])[:12]


def read_trace(path: Path) -> dict[str, Any]:
    """A trace file, packed or not."""
    data = path.read_bytes()
    parsed: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return parsed


async def measure(options: argparse.Namespace) -> list[Row]:
    """Start the engine and time all sizes, round by round, every other round backwards."""
    config = load_config(options.config)
    group = next((one for one in config.groups if one.name == options.group), config.groups[0])
    model = str(await asyncio.to_thread(resolve_model, config.model))
    made = {**provenance(), "model": Path(model).name, "group": group.name, "engine_args": options.engine_args}
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        if options.out:
            append_line(options.out, row)

    os.environ.update(config.environment | group.environment)
    pin(group.devices, group.cores)
    if options.alone:
        for kernel in lone(Path(model)):
            keep(LoneRow(alone=kernel, provenance=made))
    extra = config.vllm | group.vllm | json.loads(options.engine_args)
    worker = WorkerConfig(
        name=group.name,
        devices=group.devices,
        model=model,
        dtype=config.dtype,
        engine_args=extra,
        slab_fd=-1,
        control="",
        bell="",
        supervisor_pid=os.getppid(),
    )
    for name, value in engine_environment(worker, os.environ).items():
        if value is not None:
            os.environ[name] = value
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_HERE, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="mixed-step-") as folder:
        path = Path(folder) / "grant"
        path.write_bytes(bytes(GRANT_BYTES))
        os.environ[GRANT_FILE] = str(path)
        arguments = engine_arguments(worker, model, installed_version())
        kind = "AsyncForcedScheduler" if "Async" in str(arguments["scheduler_cls"]) else "ForcedScheduler"
        arguments["scheduler_cls"] = f"forced_scheduler.{kind}"
        if options.profile:
            arguments["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": folder,
                "torch_profiler_with_stack": False,
                "ignore_frontend": True,
            }
        with path.open("r+b") as file:
            engine = arguments, mmap.mmap(file.fileno(), GRANT_BYTES)
            await _run(options, engine, Path(folder), model_shape(Path(model)), made, keep)
    return rows


async def _run(
    options: argparse.Namespace,
    started: tuple[dict[str, Any], mmap.mmap],
    folder: Path,
    shape: ModelShape,
    made: dict[str, Any],
    keep: Callable[[Row], None],
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments, grant = started
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        engine = Engine(llm, grant)
        sizes = [(context, tokens) for context in numbers(options.contexts) for tokens in numbers(options.tokens)]
        for round_ in range(-1, options.rounds):
            order = sizes[::-1] if round_ % 2 else sizes
            for context, tokens in order if round_ >= 0 else sizes[:: max(1, len(sizes) // 4)]:
                gaps, taken = await engine.mixed(context, tokens, f"{round_} {context} {tokens}")
                if round_ >= 0:
                    keep(
                        MixedStep(
                            setup=options.setup,
                            context=context,
                            tokens=tokens,
                            gaps_ms=gaps,
                            append_ms=taken,
                            provenance=made,
                        )
                    )
            await engine.reset()
            print(f"round {round_ + 1} of {options.rounds}", file=sys.stderr)
        for spec in filter(None, options.profile.split(",")):
            context, tokens = map(int, spec.split(":"))
            for path in await engine.profiled(context, tokens, f"profile {spec}", folder):
                steps, top = device_steps(read_trace(path), shape.layers)
                if steps:
                    keep(
                        StepProfile(
                            setup=options.setup,
                            context=context,
                            tokens=tokens,
                            steps=steps,
                            top=top,
                            provenance=made,
                        )
                    )
    finally:
        llm.shutdown()


def model_shape(model: Path) -> ModelShape:
    """What the model's configuration says."""
    return msgspec.json.decode((model / "config.json").read_bytes(), type=ModelShape)


def lone(model: Path) -> Iterator[LoneKernel]:
    """Matrices and attention of a model by themselves, and the device's memory given back."""
    import torch

    shape = model_shape(model)
    yield from matrices(shape, LONE_ROWS)
    torch.cuda.empty_cache()
    yield from attention(shape, [0, 15, 31, 63, 95, 127, 191, 255, 511], [2048, 4096, 8192, 12288], SPLITS)
    torch.cuda.empty_cache()


def report(rows: Iterable[Row]) -> str:
    """Tables: step times by context and tokens, kernels alone, profiles."""
    rows = list(rows)
    lines: list[str] = []
    setups = list(dict.fromkeys(row.setup for row in rows if isinstance(row, MixedStep)))
    for setup in setups:
        gaps: dict[tuple[int, int], list[float]] = {}
        for row in rows:
            if isinstance(row, MixedStep) and row.setup == setup:
                gaps.setdefault((row.context, row.tokens), []).extend(row.gaps_ms)
        contexts, tokens = (sorted({key[at] for key in gaps}) for at in (0, 1))
        lines += [f"{setup}: median ms of a step, by context (down) and appended tokens (across)"]
        lines += [" " * 7 + "".join(f"{count:>8}" for count in tokens)]
        for context in contexts:
            cells = [gaps.get((context, count), []) for count in tokens]
            lines += [f"{context:>7}" + "".join(f"{statistics.median(c):8.2f}" if c else " " * 8 for c in cells)]
    alone = [row.alone for row in rows if isinstance(row, LoneRow)]
    if alone:
        lines += ["matrices alone: " + "  ".join(f"{k.rows}: {k.ms:.2f}" for k in alone if k.what == "matrices")]
        for split in sorted({k.splits for k in alone if k.what == "attention"}):
            for context in sorted({k.context for k in alone if k.what == "attention"}):
                row = [k for k in alone if k.what == "attention" and (k.splits, k.context) == (split, context)]
                times = "  ".join(f"{k.rows}: {k.ms:.2f}" for k in row)
                lines += [f"attention alone, splits {split}, context {context}: {times}"]
    for row in rows:
        if isinstance(row, StepProfile):
            lines += [f"profile {row.setup} {row.context}:{row.tokens}, each step on the device:"]
            for step in row.steps:
                kinds = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(step.kernels.items()))
                lines += [f"  busy {step.busy:.2f} of {step.wall:.2f} ms, {step.launches} launches; {kinds}"]
    return "\n".join(lines)


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """All rows of some results files."""
    return [row for path in paths for row in read_lines(path, Row)]  # type: ignore[type-var,arg-type]


def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    rows = read_rows(options.report) if options.report else asyncio.run(measure(options))
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
