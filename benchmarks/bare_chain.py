"""A chain on bare vLLM, in series and read ahead, without any daemon: what pingpongd has to match.

    python benchmarks/bare_chain.py --config examples/cpu.toml --profile cpu --runs 3

One process drives one AsyncLLM per device group, with the model, the vLLM arguments and the devices of a daemon's
configuration. Reading ahead is the plainest that works: a growing prompt is re-submitted with `max_tokens` 1 whenever
32 more tokens have come and the last such request is done; the prefix cache keeps what it computed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from pingpong_bus.chain import Chain
from pingpong_worker.model_store import resolve_model
from pingpongd.config import DaemonConfig, load_config
from presend import presend_ids
from profiles import PROFILES, ids_chain

BareMode = Literal["serial", "ping-pong"]
APPEND_TOKENS = 32


class BareAgent(msgspec.Struct, frozen=True):
    """An agent whose prompt is its prefix, the upstream's output and its suffix."""

    prefix: list[int]
    suffix: list[int]
    max_tokens: int


class BareRun(msgspec.Struct, frozen=True):
    """What one run gave."""

    e2e_ms: float
    ttft_ms: list[float]
    """Of each agent: first token minus the upstream's last one, or minus the start."""
    outputs: list[list[int]]


def bare_agents(chain: Chain) -> list[BareAgent]:
    """The agents of a chain of ids.

    Raises:
        DataError: it is no simple chain given as `prompt_ids`.
    """
    return [BareAgent(one.prefix, one.suffix, one.agent.max_tokens) for one in presend_ids(chain)]


class _Hop:
    """One agent's run: its tokens as they come, for itself and for the agent that reads them."""

    def __init__(self, agent: BareAgent, engine: Any) -> None:
        self.agent = agent
        self.ids: list[int] = []
        self.first_s = self.last_s = 0.0
        self.ended = False
        self.changed = asyncio.Event()
        self._engine = engine

    async def decode(self, prompt: Sequence[int]) -> None:
        """Decode after the whole prompt."""
        async for ids in _tokens(self._engine, prompt, self.agent.max_tokens):
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
            self.ids += ids
            self.changed.set()
        self.ended = True
        self.changed.set()

    async def read_ahead(self, upstream: _Hop) -> None:
        """Append-prefill from the upstream's first token on, then decode."""
        sent = 0
        appending: asyncio.Task[None] | None = None
        while True:
            await upstream.changed.wait()
            upstream.changed.clear()
            if upstream.ended:
                break
            known = [*self.agent.prefix, *upstream.ids]
            if (appending is None or appending.done()) and len(known) - sent >= APPEND_TOKENS:
                sent = len(known)
                appending = asyncio.create_task(self._fill(known))
        await self.decode([*self.agent.prefix, *upstream.ids, *self.agent.suffix])
        if appending is not None:
            await appending

    async def _fill(self, prompt: Sequence[int]) -> None:
        async for _ in _tokens(self._engine, prompt, 1):
            pass


class BareEngines:
    """The engines of one configuration; made by `bare_engines`."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = engines  # the caller's own list: once that is emptied, nothing keeps vLLM's objects alive

    async def reset_caches(self) -> None:
        """Empty all prefix caches."""
        for engine in self._engines:
            # A request just ended holds its blocks for one step more, and vLLM tells nobody when it lets go.
            while not await engine.reset_prefix_cache():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def run(self, agents: Sequence[BareAgent], mode: BareMode) -> BareRun:
        """Run the agents once."""
        count = 1 if mode == "serial" else len(self._engines)
        hops = [_Hop(agent, self._engines[index % count]) for index, agent in enumerate(agents)]
        started = time.perf_counter()
        if mode == "serial":
            upstream_ids: list[int] = []
            for hop in hops:
                await hop.decode([*hop.agent.prefix, *upstream_ids, *hop.agent.suffix])
                upstream_ids = hop.ids
        else:
            reading = [hop.read_ahead(upstream) for upstream, hop in itertools.pairwise(hops)]
            await asyncio.gather(hops[0].decode([*hops[0].agent.prefix, *hops[0].agent.suffix]), *reading)
        ready = [started, *(hop.last_s for hop in hops[:-1])]
        return BareRun(
            e2e_ms=(hops[-1].last_s - started) * 1e3,
            ttft_ms=[(hop.first_s - at) * 1e3 for hop, at in zip(hops, ready, strict=True)],
            outputs=[hop.ids for hop in hops],
        )


@asynccontextmanager
async def bare_engines(config: DaemonConfig) -> AsyncIterator[BareEngines]:
    """Start one engine per group, one after the other, and shut them down at the end."""
    model = str(resolve_model(config.model))
    engines: list[Any] = []
    try:
        for group in config.groups:
            os.environ.update(_environment(config, group.devices))
            engines.append(_make_engine(config, group.vllm, model))
        yield BareEngines(engines)
    finally:
        while engines:  # their finalizers fail if they run as late as the interpreter's end
            engine = engines.pop()
            engine.shutdown()
            if engine.output_handler is not None:
                await asyncio.wait([engine.output_handler])
            del engine


def _environment(config: DaemonConfig, devices: Sequence[str]) -> dict[str, str]:
    numbers = ",".join(device.partition(":")[2] for device in devices)
    where = "VLLM_CPU_OMP_THREADS_BIND" if devices[0].startswith("cpu:") else "CUDA_VISIBLE_DEVICES"
    # As the daemon's engines have it, huge pages too: what is measured is the daemon, not its settings.
    common = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    return {**common, **config.environment, where: numbers}


def _make_engine(config: DaemonConfig, group_arguments: dict[str, Any], model: str) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": model,
        "dtype": config.dtype,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    if all(device.startswith("cpu:") for group in config.groups for device in group.devices):
        arguments["block_size"] = 32
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**{**arguments, **config.vllm, **group_arguments}))


async def _tokens(engine: Any, prompt: Sequence[int], count: int) -> AsyncIterator[list[int]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(TokensPrompt(prompt_token_ids=list(prompt)), sampling, uuid.uuid4().hex):
        yield list(output.outputs[0].token_ids)


async def _main(options: argparse.Namespace) -> None:
    agents = bare_agents(ids_chain(PROFILES[options.profile]))
    async with bare_engines(load_config(options.config)) as engines:
        await engines.run(agents, "serial")
        for index in range(options.runs):
            for mode in ("serial", "ping-pong"):
                await engines.reset_caches()
                run = await engines.run(agents, mode)
                ttft = ", ".join(f"{ms:.0f}" for ms in run.ttft_ms)
                print(f"{index + 1} {mode}: {run.e2e_ms:,.0f} ms, TTFT {ttft} ms", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A chain on bare vLLM, in series and read ahead.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--profile", default="cpu", choices=list(PROFILES))
    parser.add_argument("--runs", type=int, default=3)
    sys.exit(asyncio.run(_main(parser.parse_args())))
