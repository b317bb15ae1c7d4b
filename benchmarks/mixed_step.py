"""What a step takes in which one answer decodes beside so many appended tokens, by their number and their context.

    python benchmarks/mixed_step.py --config examples/cpu.toml --contexts 256,1024 --tokens 0,16,64 --out steps.jsonl
    python benchmarks/mixed_step.py --config benchmarks/h200.toml --alone --profile 2048:63,12288:0 --out steps.jsonl
    python benchmarks/mixed_step.py --report steps.jsonl

One engine, without a daemon, with the arguments that a worker would give it; its scheduler is told the size of each
step. An answer decodes behind `context` tokens; beside it a prompt grows by some steps' worth, around the same context.
The gaps between the answer's tokens are the steps. --alone times the model's matrix products and its attention by
themselves first, and --profile takes the engine's own profile of some of the steps: how long the device was busy, and
with what. Both need a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from commands import command
from lone_kernels import lone_kernels, model_shape
from mixed_engine import ForcedEngine, forced_engine
from mixed_report import render
from mixed_rows import LoneRow, MixedStep, Row, StepProfile
from mixed_trace import device_steps
from pingpong_bus.errors import UsageError
from pingpong_worker.config import WorkerConfig
from pingpong_worker.model_store import resolve_model
from pingpong_worker.pinning import pin
from pingpongd.config import DaemonConfig, GroupConfig, load_config
from progress_bar import counted
from provenance import command_line, provenance
from runs import append_line, decoded_lines

Keep = Callable[[Row], None]
Size = tuple[int, int]
"""Context, and appended tokens."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a decode step takes beside appends.")
    parser.add_argument("--config", type=Path, help="a daemon's configuration; its first group's engine is measured")
    parser.add_argument("--group", help="another group of it, by name")
    parser.add_argument("--setup", default="default", help="a name for what --engine-args changes")
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, metavar="JSON", help="raw vLLM arguments over the configuration's"
    )
    parser.add_argument("--contexts", type=_numbers, default=[2048, 4096, 8192, 12288], metavar="N,...")
    parser.add_argument(
        "--tokens",
        type=_numbers,
        default=[0, 1, 15, 31, 47, 63, 95, 127, 159, 191, 255, 383, 511],
        metavar="N,...",
        help="appended in each step",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="time matrices and attention by themselves too")
    parser.add_argument("--profile", type=_sizes, default=[], metavar="CONTEXT:TOKENS,...", help="profile these steps")
    parser.add_argument("--out", type=Path, help="JSONL file that rows are added to")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="measure nothing, report these files")
    options = parser.parse_args(arguments)
    if options.config is None and options.report is None:
        parser.error("--config: there is no engine to measure")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _sizes(text: str) -> list[Size]:
    pairs = (part.partition(":") for part in text.split(","))
    return [(int(context), int(tokens)) for context, _, tokens in pairs]


async def measure(options: argparse.Namespace) -> list[Row]:
    """Start the engine, time everything that was asked for and return the rows.

    Raises:
        ConfigError: the configuration is off. UsageError: it has no such group, or no decode-first scheduler.
    """
    config = load_config(options.config)
    group = chosen_group(config, options.group)
    model = Path(await asyncio.to_thread(resolve_model, config.model))
    made = {**provenance(), "model": model.name, "group": group.name, "arguments": command_line()}
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        if options.out:
            append_line(options.out, row)

    os.environ.update(config.environment | group.environment)
    pin(group.devices, group.cores)
    if options.alone:
        for kernel in lone_kernels(model_shape(model)):
            keep(LoneRow(alone=kernel, provenance=made))
    worker = worker_config(config, group, str(model), options.engine_args)
    async with forced_engine(worker, profiler=bool(options.profile)) as engine:
        await _time_steps(engine, options, made, keep)
        if options.profile:
            await _profile_steps(engine, options, model_shape(model).layers, made, keep)
    return rows


def chosen_group(config: DaemonConfig, name: str | None) -> GroupConfig:
    """The group of this name; None: the first one.

    Raises:
        UsageError: there is none, or its engine has no scheduler of ours to tell anything.
    """
    found = [group for group in config.groups if name in (None, group.name)]
    if not found:
        raise UsageError(f"--group: there is no group {name!r}.", hint=", ".join(one.name for one in config.groups))
    if not config.decode_first.enabled:
        raise UsageError("--config: decode_first is not enabled, and the size of steps is told to that scheduler.")
    return found[0]


def worker_config(config: DaemonConfig, group: GroupConfig, model: str, engine_args: dict[str, Any]) -> WorkerConfig:
    """What a worker of the group would be told, as far as its engine depends on it."""
    return WorkerConfig(
        name=group.name,
        devices=group.devices,
        model=model,
        dtype=config.dtype,
        engine_args=config.vllm | group.vllm | engine_args,
        slab_fd=-1,
        control="",
        bell="",
        supervisor_pid=os.getppid(),
    )


async def _time_steps(engine: ForcedEngine, options: argparse.Namespace, made: dict[str, Any], keep: Keep) -> None:
    """All sizes round by round, every other round backwards; some of them before, to warm up."""
    sizes: list[Size] = [(context, tokens) for context in options.contexts for tokens in options.tokens]
    for context, tokens in sizes[:: max(1, len(sizes) // 4)]:
        await engine.steps(context, tokens, f"warm-up {context} {tokens}")
    for index in counted(range(options.rounds), "rounds"):
        await engine.reset()
        for context, tokens in sizes[::-1] if index % 2 else sizes:
            gaps_ms, append_ms = await engine.steps(context, tokens, f"{index} {context} {tokens}")
            keep(
                MixedStep(
                    setup=options.setup,
                    context=context,
                    tokens=tokens,
                    gaps_ms=gaps_ms,
                    append_ms=append_ms,
                    provenance=made,
                )
            )
        print(f"round {index + 1} of {options.rounds}", file=sys.stderr)


async def _profile_steps(
    engine: ForcedEngine, options: argparse.Namespace, layers: int, made: dict[str, Any], keep: Keep
) -> None:
    for context, tokens in options.profile:
        for trace in await engine.profile(context, tokens, f"profile {context} {tokens}"):
            steps, top = device_steps(trace, layers)
            if steps:
                keep(
                    StepProfile(
                        setup=options.setup, context=context, tokens=tokens, steps=steps, top=top, provenance=made
                    )
                )


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """All rows of some results files.

    Raises:
        DataError: a file cannot be read, or a line is no such row.
    """
    return [row for path in paths for row in decoded_lines(path, Row, "row of mixed_step.py")]


@command
def main() -> int:
    """Run the command; returns its exit code."""
    options = parse_arguments()
    rows = read_rows(options.report) if options.report else asyncio.run(measure(options))
    print(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
