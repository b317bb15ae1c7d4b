"""A worker's process: ``python -m pingpong_worker.main``, with its `WorkerConfig` as JSON on standard input.

Exit codes: 0 after `Stop` or SIGTERM, else that of the error that ended it (see `pingpong_bus.errors`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from pingpong_bus.errors import ConfigError
from pingpong_worker.config import WorkerConfig
from pingpong_worker.parent_death import die_with_parent
from pingpong_worker.pinning import pin
from pingpong_worker.shared_memory_names import use_own_names
from pingpong_worker.vllm_plugin import end_with_worker
from pingpong_worker.worker import Parts, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pingpong_bus.messages import Progress, TokenizerSource
    from pingpong_worker.prompt import PromptCodec
    from pingpong_worker.simulated_engine import SimulatedEngine
    from pingpong_worker.text import TextCodec
    from pingpong_worker.vllm_engine import VllmEngine

_SWITCH_INTERVAL_S = 0.0005
"""How long a thread that tokenizes may keep the interpreter from the event loop; Python's default is ten times that."""


def main() -> None:
    """Run a worker until it is told to stop; never returns."""
    # The terminal's Ctrl-C goes to the whole foreground group, and it is for the supervisor to decide what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = read_config(sys.stdin.buffer.read())
    except ConfigError as error:
        logging.getLogger("pingpong_worker").critical("%s", error)
        sys.exit(error.exit_code)
    if not die_with_parent(config.supervisor_pid):
        sys.exit("the supervisor is gone")
    os.environ.update(config.environment)
    use_own_names()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    sys.exit(asyncio.run(_run(config)))


def read_config(data: bytes) -> WorkerConfig:
    """Decode what the supervisor wrote.

    Raises:
        ConfigError: it is no `WorkerConfig`.
    """
    try:
        return msgspec.json.decode(data, type=WorkerConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the worker's configuration cannot be read: {error}.", hint="Workers are started by pingpongd."
        ) from None


async def _run(config: WorkerConfig) -> int:
    worker = Worker(config, simulated_parts(config) if config.engine == "simulated" else vllm_parts(config))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    return await worker.run()


def vllm_parts(config: WorkerConfig) -> Parts[VllmEngine]:
    """A real engine; what it needs is imported once the environment is set and the devices are checked."""

    def make_engine(on_progress: Callable[[Progress], object]) -> VllmEngine:
        from pingpong_worker.vllm_engine import VllmEngine

        return VllmEngine(config, on_progress)

    def load_prompts(engine: VllmEngine) -> PromptCodec | None:
        source = engine.tokenizer
        if source is None:
            return None
        from pingpong_worker.prompt import Prompts

        return Prompts.load(source.model, revision=source.revision, trust_remote_code=source.trust_remote_code)

    def load_tokenizer(source: TokenizerSource) -> TextCodec:
        from pingpong_worker.output_decoder import OutputDecoder

        return OutputDecoder.load(source)

    return Parts(lambda: pin(config.devices, config.cores), make_engine, load_prompts, load_tokenizer)


def simulated_parts(config: WorkerConfig) -> Parts[SimulatedEngine]:
    """A simulated engine: its devices are names only, for it also plays machines that are not there."""
    from pingpong_worker.simulated_engine import SimulatedEngine
    from pingpong_worker.simulated_prompts import simulated_prompts

    return Parts(
        lambda: None,
        lambda on_progress: SimulatedEngine(config, on_progress=on_progress),
        lambda _: simulated_prompts(config.model),
        lambda source: simulated_prompts(source.model),
    )


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # A process that vLLM spawns imports this module first, under this name.
    end_with_worker()
    use_own_names()
