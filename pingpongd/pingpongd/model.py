"""Getting the model, once for all workers, in a process that a signal can end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import structlog

from pingpong_bus.errors import ConfigError

_log = structlog.get_logger()


async def fetch_model(name: str) -> str:
    """A folder or a Hugging Face name for `name`; the embedded model is fetched and converted where it is not yet.

    Cancelled, it ends the fetching; what was fetched so far is thrown away.

    Raises:
        ConfigError: there is no such folder, or the model cannot be had.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pingpong_worker.model_fetch",
        name,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    try:
        assert process.stdout is not None  # noqa: S101 - asked for above
        last: dict[str, Any] = {}
        async for line in process.stdout:
            last = json.loads(line)
            if "stage" in last:
                _log.info("model_stage", model=name, stage=last["stage"])
        code = await process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if "error" in last:
        raise ConfigError(**last["error"])
    if "path" not in last:
        raise ConfigError(
            f"fetching the model ended with exit code {code}.", field="model", hint="See the lines above."
        )
    return str(last["path"])
