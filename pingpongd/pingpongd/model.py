"""Getting the model, once for all workers, in a process that a signal can end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import Progress
from pingpong_worker.shared_memory_names import PREFIX_VARIABLE, worker_prefix
from pingpongd.process import Guard
from pingpongd.runtime_dir import RuntimeDir

_log = structlog.get_logger()


async def fetch_model(
    name: str, runtime: RuntimeDir, guard: Guard, on_progress: Callable[[Progress], None] = lambda _: None
) -> str:
    """A folder or a Hugging Face name for `name`; the embedded model is fetched and converted where it is not yet.

    Cancelled, it ends the fetching; what was fetched so far is thrown away.

    Args:
        name: as configured.
        runtime: where the process has its temporary files.
        guard: ends the process, and what it runs, should this one be killed.
        on_progress: is told how far it has come; its stages are logged as well.

    Raises:
        ConfigError: there is no such folder, or the model cannot be had.
    """
    prefix = worker_prefix(runtime.segment_prefix)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pingpong_worker.model_fetch",
        name,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
        env=os.environ | {"TMPDIR": str(runtime.temporary), PREFIX_VARIABLE: prefix},
    )
    guard.watch(process.pid, prefix)
    try:
        assert process.stdout is not None  # noqa: S101 - asked for above
        last: dict[str, Any] = {}
        async for line in process.stdout:
            last = json.loads(line)
            if "stage" in last:
                _log.info("model_stage", model=name, stage=last["stage"])
                on_progress(Progress(stage=last["stage"]))
            if "progress" in last:
                on_progress(msgspec.convert(last["progress"], Progress))
        code = await process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        guard.forget(process.pid)
    if "error" in last:
        raise ConfigError(**last["error"])
    if "path" not in last:
        raise ConfigError(
            f"fetching the model ended with exit code {code}.", field="model", hint="See the lines above."
        )
    return str(last["path"])
