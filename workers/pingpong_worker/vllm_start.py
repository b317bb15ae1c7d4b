"""Starting vLLM's processes, and saying in one sentence why they did not start."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pingpong_bus.errors import ConfigError, EngineError, PingpongError
from pingpong_bus.messages import Progress
from pingpong_worker.cache_files import EngineKind
from pingpong_worker.config import WorkerConfig
from pingpong_worker.pinning import on_cpu
from pingpong_worker.price_file import load_prices
from pingpong_worker.start_progress import START_PROGRESS, StartProgress
from pingpong_worker.step_board import STEP_BOARD, StepBoard
from pingpong_worker.vllm_marks import GUESS_VARIABLE
from pingpong_worker.vllm_plugin import FAILURE_FILE
from pingpong_worker.vllm_retention_checks import check_retention
from pingpong_worker.vllm_scheduler_checks import check_guesses_known, check_scheduler
from pingpong_worker.vllm_settings import check_argument_names, is_decode_first

_REASON_CHARS = 300
"""How much of vLLM's own words an error repeats."""
_START_FAILURES = (
    OSError,
    TypeError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    AssertionError,
    ImportError,
    MemoryError,
)
"""What vLLM raises when it does not start, or does not like its configuration."""
_LOG_HINT = "The worker's log has the whole story."
_KILLED = (": -9}", ": -9,")
"""How vLLM says that a process of its own was killed as it started."""
_KILLED_HINT = "It was killed: where the kernel did that, memory ran out; lower max_model_len or the KV cache's share."
_OPTIONAL_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""What fails to be imported beside a torch that it was not built for; text models do without."""
_IMPORT_HINT = f"If these do not fit the installed torch, remove them: pip uninstall {' '.join(_OPTIONAL_PACKAGES)}."


def load(
    config: WorkerConfig, arguments: dict[str, Any], kind: EngineKind, on_progress: Callable[[Progress], object]
) -> tuple[Any, StepBoard]:
    """Start vLLM's processes and load the model; gives the engine and the board of its scheduler.

    Blocks; `on_progress` is called in another thread meanwhile.

    Raises:
        ConfigError: an argument, the model or the memory for it is at fault.
        EngineError: the engine failed to start for another reason.
    """
    try:
        # Here, not at the top: vLLM reads its environment as it is imported, and takes seconds.
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:  # by its native libraries
        raise ConfigError(f"vLLM cannot be imported: {_shorten(str(error))}", hint=_IMPORT_HINT) from error

    check_argument_names(config.engine_args, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    check_vllm(config)
    with tempfile.TemporaryDirectory(prefix="pingpong-start-") as folder:
        failure, board_path = Path(folder) / "failure", Path(folder) / "board"
        board = StepBoard(board_path)
        if prices := load_prices(kind):
            board.offer_prices(prices)
        told = Path(folder) / "progress"
        paths = {FAILURE_FILE: str(failure), STEP_BOARD: str(board_path), START_PROGRESS: str(told)}
        os.environ.update(paths)
        try:
            with StartProgress(told, on_progress):
                return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), board
        except _START_FAILURES as error:
            reason = failure.read_text("utf-8") if failure.exists() else ""
            raise start_error(error, reason, config) from error
        finally:
            for name in paths:
                del os.environ[name]


def check_vllm(config: WorkerConfig) -> None:
    """See that the installed vLLM has all that our scheduler relies on, of what the engine is to do.

    Raises:
        ConfigError: it lacks something.
    """
    if is_decode_first(config):
        check_scheduler()
        if config.keep_prefixes:
            check_retention()
    if os.environ.get(GUESS_VARIABLE, "0") != "0":
        check_guesses_known(on_cpu=on_cpu(config.devices))


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _REASON_CHARS else f"{text[:_REASON_CHARS]}..."


def start_error(error: Exception, reason: str, config: WorkerConfig) -> PingpongError:
    """Say why vLLM did not start: `reason` is what its processes left, if anything."""
    text, field = reason or str(error), "vllm"
    if not reason and hasattr(error, "errors"):  # pydantic's: its text repeats the whole configuration
        first = error.errors()[0]
        text = first["msg"].removeprefix("Value error, ")
        if first["loc"] and first["loc"][0] in config.engine_args:
            field = f"vllm.{first['loc'][0]}"
    text = _shorten(text) or type(error).__name__
    if isinstance(error, ImportError) or any(name in text for name in _OPTIONAL_PACKAGES):
        return ConfigError(f"vLLM cannot be imported: {text}", hint=_IMPORT_HINT)
    if "memory" in text.lower() or "KV cache" in text:
        return ConfigError(
            f"the model and its KV cache do not fit in memory: {text}",
            field=field,
            hint="Lower max_model_len or the share of memory (VLLM_CPU_KVCACHE_SPACE, gpu_memory_utilization).",
        )
    if reason or isinstance(error, (RuntimeError, AssertionError)):
        killed = any(mark in text for mark in _KILLED)
        return EngineError(f"vLLM did not start: {text}", hint=_KILLED_HINT if killed else _LOG_HINT)
    if isinstance(error, OSError) or "repository" in text.lower():
        return ConfigError(
            f'the model "{config.model}" was not found: {text}',
            field="model",
            hint="Give a folder with a Hugging Face model, or a name that can be reached or is cached.",
        )
    return ConfigError(f"vLLM does not take this configuration: {text}", field=field)
