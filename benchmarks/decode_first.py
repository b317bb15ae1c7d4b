"""What a decode bears beside appends, under vLLM's own scheduler, its flags, and the decode-first scheduler.

    python benchmarks/decode_first.py --rounds 8 --out benchmarks/results/decode-first-cpu.jsonl
    python benchmarks/decode_first.py --report decode-first-cpu.jsonl --plot docs/images/decode_first.svg

An answer of 64 tokens decodes while another prompt of 1,500 tokens is appended: its static prefix of 1,000 at once, the
rest 32 at a time, each append as soon as the one before is computed, from the first token of the answer on. That is the
most that a downstream agent asks of an engine it shares with its upstream. Measured are the gaps between the tokens of
the answer, and when the last append was computed.

All engines are up together and take turns, one measurement at a time, so that whatever else the machine does hits all
alike. They are bare AsyncLLMs with the worker's arguments, on one core each and all on the same one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from decode_first_report import Measurement, plot, report
from pingpong_worker.config import WorkerConfig
from pingpong_worker.model_store import resolve_model
from pingpong_worker.step_board import STEP_BOARD, StepBoard
from pingpong_worker.vllm_settings import engine_arguments, engine_environment
from pingpong_worker.vllm_versions import installed_version
from progress_bar import counted
from provenance import command_line, provenance
from runs import append_line, read_lines

ANSWER_TOKENS = 64
ANSWER_PROMPT_TOKENS = 200
STATIC_TOKENS = 1000
GROWING_TOKENS = 500
APPEND_TOKENS = 32
WARM_UP_ROUNDS = 1
"""Engines take their first steps in it, and the scheduler learns its prices."""
DEFAULT_TARGETS = "1.1,1.2,1.3,1.5,2,3"


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the comparison."""

    name: str
    decode_first: bool
    flags: dict[str, Any] = {}
    """vLLM's arguments beside the worker's own."""


SETUPS = (
    EngineSetup(name="stock", decode_first=False),
    EngineSetup(name="long_prefill_token_threshold=32", decode_first=False, flags={"long_prefill_token_threshold": 32}),
    EngineSetup(name="max_num_batched_tokens=64", decode_first=False, flags={"max_num_batched_tokens": 64}),
    EngineSetup(name="decode first", decode_first=True),
)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, for an engine's process."""

    seed: int
    appends: Literal["none", "beside", "alone"]
    """Beside the answer, or without it."""
    target: float | None = None
    """`itl_ratio` of the answer."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    gaps_ms: list[float] = []
    answer_ms: float = 0.0
    """First token to last."""
    appends_ms: float = 0.0
    """From their start, at the answer's first token, to the last one's end."""
    beside_tokens: int | None = None
    """Append tokens that were computed beside the answer; None where the scheduler does not say."""


# ------------------------------------------------------------------------------------------------- an engine's process


def serve(setup: EngineSetup, model: str, dtype: str, core: int) -> None:
    """Run an engine and do what standard input asks for, a line of JSON each."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # vLLM writes to standard output
    config = WorkerConfig(
        name="engine",
        devices=[f"cpu:{core}"],
        dtype=dtype,
        decode_first=setup.decode_first,
        engine_args={"max_model_len": 4096, **setup.flags},
        slab_fd=-1,
        control="",
        bell="",
        supervisor_pid=os.getppid(),
    )
    for name, value in engine_environment(config, os.environ).items():
        if value is not None:
            os.environ[name] = value
    with tempfile.TemporaryDirectory() as folder:
        board = StepBoard(Path(folder) / "board")
        os.environ[STEP_BOARD] = str(Path(folder) / "board")
        asyncio.run(_serve(engine_arguments(config, model, installed_version()), board, replies))


async def _serve(arguments: dict[str, Any], board: StepBoard, replies: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        replies.write(msgspec.json.encode(Outcome()) + b"\n")
        before = 0
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            outcome = await _measure(llm, msgspec.json.decode(line, type=Task))
            if state := board.state():
                outcome = msgspec.structs.replace(outcome, beside_tokens=state.append_tokens - before)
                before = state.append_tokens
            replies.write(msgspec.json.encode(outcome) + b"\n")
    finally:
        llm.shutdown()


async def _measure(llm: Any, task: Task) -> Outcome:
    while not await llm.reset_prefix_cache():  # noqa: ASYNC110  a request just ended holds its blocks for a step more
        await asyncio.sleep(0.05)
    draw = random.Random(task.seed)
    answer_prompt, grown = (
        [draw.randrange(1000, 40000) for _ in range(count)]
        for count in (ANSWER_PROMPT_TOKENS, STATIC_TOKENS + GROWING_TOKENS)
    )
    if task.appends == "alone":
        return Outcome(appends_ms=await _append(llm, grown))
    times: list[float] = []
    appending: asyncio.Task[float] | None = None
    mark = {} if task.target is None else {"itl_ratio": task.target}
    async for _ in _tokens(llm, answer_prompt, ANSWER_TOKENS, mark):
        times.append(time.perf_counter())
        if len(times) == 1 and task.appends == "beside":
            appending = asyncio.create_task(_append(llm, grown))
    return Outcome(
        gaps_ms=[(after - before) * 1e3 for before, after in itertools.pairwise(times)],
        answer_ms=(times[-1] - times[0]) * 1e3,
        appends_ms=await appending if appending is not None else 0.0,
    )


async def _append(llm: Any, ids: Sequence[int]) -> float:
    """Grow a prompt; milliseconds that it took."""
    started = time.perf_counter()
    for end in [*range(STATIC_TOKENS, len(ids), APPEND_TOKENS), len(ids)]:
        async for _ in _tokens(llm, ids[:end], 1, {"append": True}):
            pass
    return (time.perf_counter() - started) * 1e3


_serials = itertools.count()


async def _tokens(llm: Any, prompt: Sequence[int], count: int, mark: dict[str, Any]) -> AsyncIterator[int]:
    """Tokens as they come, one item each."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"pingpong": mark} if mark else None,
    )
    async for output in llm.generate(TokensPrompt(prompt_token_ids=list(prompt)), params, f"r{next(_serials)}"):
        for token in output.outputs[0].token_ids:
            yield token


# ------------------------------------------------------------------------------------------------------- the comparison


class EngineProcess:
    """A child of this script, as its parent sees it."""

    def __init__(self, setup: EngineSetup, model: str, dtype: str, core: int) -> None:
        self.setup = setup
        description = msgspec.json.encode([setup, model, dtype, core]).decode()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", description], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait_until_ready(self) -> None:
        """Return when the engine serves."""
        self._receive()

    def run(self, task: Task) -> Outcome:
        """One measurement."""
        assert self._process.stdin is not None  # noqa: S101  asked for above
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        self._process.stdin.flush()
        return self._receive()

    def end(self) -> None:
        """Close its input, upon which it ends."""
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.close()
        self._process.wait(60)

    def _receive(self) -> Outcome:
        assert self._process.stdout is not None  # noqa: S101
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f'decode_first.py: the engine "{self.setup.name}" ended with {self._process.wait()}.')
        return msgspec.json.decode(line, type=Outcome)


def measure(options: argparse.Namespace) -> list[Measurement]:
    """Start the engines and take turns."""
    model = str(resolve_model(options.model))
    targets = [float(text) for text in options.targets.split(",")]
    core = min(os.sched_getaffinity(0)) if options.core is None else options.core
    made_with = {**provenance(), "model": Path(model).name, "dtype": options.dtype, "arguments": command_line()}
    engines: list[EngineProcess] = []
    found: list[Measurement] = []
    try:
        engines += [EngineProcess(setup, model, options.dtype, core) for setup in SETUPS]
        for engine in engines:
            engine.wait_until_ready()
            print(f"{engine.setup.name} is up", file=sys.stderr)
        for round_ in counted(range(-WARM_UP_ROUNDS, options.rounds), "rounds"):
            for engine, task in _turns(engines, targets, round_):
                outcome = engine.run(task)
                if round_ < 0:
                    continue
                measurement = Measurement(
                    engine=engine.setup.name,
                    appends=task.appends,
                    target=task.target,
                    round=round_,
                    gaps_ms=outcome.gaps_ms,
                    answer_ms=outcome.answer_ms,
                    appends_ms=outcome.appends_ms,
                    beside_tokens=outcome.beside_tokens,
                    provenance=made_with,
                )
                found.append(measurement)
                if options.out:
                    append_line(options.out, measurement)
            print(f"round {round_ + 1} of {options.rounds}", file=sys.stderr)
    finally:
        for engine in engines:
            engine.end()
    return found


def _turns(engines: Sequence[EngineProcess], targets: Sequence[float], round_: int) -> list[tuple[EngineProcess, Task]]:
    """All measurements of a round; every other round goes backwards, so that drift hits all alike."""
    turns: list[tuple[EngineProcess, Task]] = []
    for engine in engines:
        turns.append((engine, Task(seed=round_, appends="none")))
        chosen = targets if engine.setup.decode_first else [None]
        turns += [(engine, Task(seed=round_, appends="beside", target=target)) for target in chosen]
        if not engine.setup.flags:
            turns.append((engine, Task(seed=round_, appends="alone")))
    return turns[::-1] if round_ % 2 else turns


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="What a decode bears beside appends.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--core", type=int, help="of the engines; default: the first that is allowed")
    parser.add_argument("--targets", default=DEFAULT_TARGETS, help="itl_ratio values (%(default)s)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add to")
    parser.add_argument("--report", type=Path, nargs="+", help="measure nothing, report these files")
    parser.add_argument("--plot", type=Path, help="a picture to draw, SVG or PNG")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        setup, model, dtype, core = msgspec.json.decode(options.serve, type=tuple[EngineSetup, str, str, int])
        serve(setup, model, dtype, core)
        return 0
    if options.report:
        found = [one for path in options.report for one in read_lines(path, Measurement)]
    else:
        found = measure(options)
    print(report(found))
    if options.plot:
        plot(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
