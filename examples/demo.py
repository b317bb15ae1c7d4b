"""Starts a daemon, runs the five-agent example in series and read ahead, and shows what that changed.

    make demo
    .venv/bin/python examples/demo.py --config FILE --pairs 2

Without --config it takes examples/cpu.toml, on other cores where this process may not use cores 0 and 1. Writes
build/demo.json and, where matplotlib is installed, build/demo.png. Exit codes: 0; 3 where an answer of the run that
read ahead differs from the serial one; otherwise those of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # its modules are no part of the installed package

from cores import on_allowed_cores  # noqa: E402
from figures import difference, downstream_ttft_ratio, median_ttft_ms, saved_percent  # noqa: E402
from local_daemon import LogEvent, local_daemon  # noqa: E402
from pingpong_bus.chain import Agent, Chain  # noqa: E402
from pingpong_bus.errors import NotEqual, PingpongError  # noqa: E402
from pingpong_bus.messages import SubmitOptions  # noqa: E402
from pingpong_client import AsyncClient, load_chain  # noqa: E402
from progress_bar import counted, watched  # noqa: E402
from runs import Run, RunMode  # noqa: E402

EXAMPLE_CONFIG = ROOT / "examples" / "cpu.toml"
MODES: tuple[RunMode, RunMode] = ("serial", "ping-pong")
WARM_UP_TOKENS = 600
"""Of each warm-up prompt: the first prefill of that length in a fresh engine is slower than later ones."""


class Stages:
    """Tells how the start goes, one line for each new stage, where no bars do."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._last = ""

    def __call__(self, event: LogEvent) -> None:
        stage = {
            "model_stage": lambda: f"model {event['model']}: {event['stage']}",
            "worker_loading": lambda: f"engines: {event['stage']}",
            "worker_ready": lambda: f"{event['worker']} is ready",
        }.get(event.get("event", ""), lambda: "")()
        if stage and stage != self._last and not watched():
            self._last = stage
            print(f"  {time.monotonic() - self._started:4.0f} s  {stage}", flush=True)


async def warm_up(client: AsyncClient) -> None:
    """A short chain on every group, so that no measured run is an engine's first."""
    status = await client.status()
    for worker in status.workers:
        agent = Agent(
            name="warm-up", prompt_ids=list(range(1000, 1000 + WARM_UP_TOKENS)), max_tokens=8, ignore_eos=True
        )
        options = SubmitOptions(mode="serial", group=worker.name)
        await client.run(Chain(name="warm-up", agents=[agent]), None, options)


async def run_once(client: AsyncClient, chain: Chain, mode: RunMode, index: int) -> Run:
    """One run with empty prefix caches."""
    await client.reset_caches()
    started = time.monotonic()
    result = await client.run(chain, None, SubmitOptions(mode="serial" if mode == "serial" else "ping-pong"))
    run = Run(
        profile=chain.name,
        mode=mode,
        cache="cold",
        index=index,
        e2e_ms=result.e2e_ms or 0.0,
        wall_ms=(time.monotonic() - started) * 1e3,
        result=result,
        max_tokens=[agent.max_tokens for agent in chain.agents],
    )
    print(f"  {'in series' if mode == 'serial' else 'read ahead':10}  {run.e2e_ms / 1e3:5.1f} s", flush=True)
    return run


def example_config(folder: Path) -> Path:
    """The example's configuration, or one in `folder` that differs from it in the cores.

    Raises:
        ConfigError: too few cores.
    """
    text = EXAMPLE_CONFIG.read_text(encoding="utf-8")
    adapted = on_allowed_cores(text, os.sched_getaffinity(0))
    if adapted == text:
        return EXAMPLE_CONFIG
    path = folder / EXAMPLE_CONFIG.name
    path.write_text(adapted, encoding="utf-8")
    return path


async def run_pairs(config: Path | None, chain: Chain, pairs: int) -> list[Run]:
    """Start the daemon, run everything and stop it; without a configuration, on the example's."""
    with tempfile.TemporaryDirectory(prefix="pingpong-demo-") as private:
        return await _run_pairs(config or example_config(Path(private)), chain, pairs)


async def _run_pairs(config: Path, chain: Chain, pairs: int) -> list[Run]:
    print(f"Starting pingpongd --config {config} ...", flush=True)
    async with local_daemon(config, on_event=Stages()) as folder, AsyncClient(folder) as client:
        await warm_up(client)
        print(f'Running "{chain.name}", {len(chain.agents)} agents, prefix caches emptied before each run:', flush=True)
        order = [(index, mode) for index in range(pairs) for mode in (MODES[::-1] if index % 2 else MODES)]
        runs = [await run_once(client, chain, mode, index) for index, mode in counted(order, "runs")]
        print("Stopping the daemon ...", flush=True)
    return runs


def summary(runs: list[Run]) -> dict[str, Any]:
    """What build/demo.json holds: medians over the runs of each mode; times in ms."""
    serial, ahead = ([run for run in runs if run.mode == mode] for mode in MODES)
    before, after = (statistics.median(run.e2e_ms for run in some) for some in (serial, ahead))
    ttfts = zip(median_ttft_ms(serial), median_ttft_ms(ahead), serial[0].result.agents, strict=True)
    return {
        "serial_ms": round(before, 1),
        "ping_pong_ms": round(after, 1),
        "saved_percent": round(saved_percent(before, after), 1),
        "downstream_ttft_ratio": round(downstream_ttft_ratio(serial, ahead), 3),
        "agents": len(serial[0].result.agents),
        "identical": not any(difference(serial[0], run) for run in runs),
        "exactness": serial[0].result.exactness,
        "ttft_ms": [
            {"agent": agent.name, "serial": round(old, 1), "ping_pong": round(new, 1)} for old, new, agent in ttfts
        ],
    }


def show(runs: list[Run], figures: dict[str, Any]) -> None:
    """The answers, the table and the saving."""
    print()
    for agent in runs[-1].result.agents:
        print(f"{agent.name}\n  " + "\n  ".join(agent.text.strip().splitlines()) + "\n")
    print(f"{'time to first token':22}{'in series':>12}{'read ahead':>12}")
    for row in figures["ttft_ms"]:
        print(f"{row['agent']:22}{row['serial']:9,.0f} ms{row['ping_pong']:9,.0f} ms")
    print(f"{'the whole chain':22}{figures['serial_ms']:9,.0f} ms{figures['ping_pong_ms']:9,.0f} ms")
    print(f"\n{figures['saved_percent']:.0f} % less time, cold caches; ", end="")
    print(f"exactness {figures['exactness']}: ", end="")
    print("every prompt and answer identical." if figures["identical"] else "NOT identical:")
    for run in runs[1:]:
        if found := difference(runs[0], run):
            print(f"  {run.mode}, {found}")


def save_timeline(runs: list[Run], path: Path) -> bool:
    """Draw the last pair; returns whether matplotlib was there to do it."""
    try:
        import matplotlib  # noqa: F401

        from timeline import draw
    except ImportError:
        return False
    last = {run.mode: run.result for run in runs}
    draw(last["serial"], last["ping-pong"], path)
    return True


def main() -> int:
    """Run the demo; returns its exit code."""
    parser = argparse.ArgumentParser(description="Show a chain of five agents in series and read ahead.")
    parser.add_argument("--config", type=Path, help=f"default: {EXAMPLE_CONFIG.name}")
    parser.add_argument("--chain", type=Path, default=ROOT / "examples" / "five_agents.json")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each kind")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="folder for demo.json and demo.png")
    options = parser.parse_args()
    try:
        runs = asyncio.run(run_pairs(options.config, load_chain(options.chain), options.pairs))
    except PingpongError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("demo: stopped.", file=sys.stderr)
        return 130
    figures = summary(runs)
    show(runs, figures)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    drawn = save_timeline(runs, options.out / "demo.png")
    print(f"Figures: {options.out / 'demo.json'}" + (f"; timeline: {options.out / 'demo.png'}" if drawn else ""))
    return 0 if figures["identical"] else NotEqual.exit_code


if __name__ == "__main__":
    sys.exit(main())
