"""A process with a real engine, for tests of how it starts and ends: ``engine_process.py MODEL ARGS_AS_JSON``.

Prints one line: "ready", or the error as JSON; "ready" is followed by waiting for the end of standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys

from pingpong_bus.errors import PingpongError
from pingpong_worker.config import WorkerConfig
from pingpong_worker.vllm_engine import VllmEngine
from pingpong_worker.vllm_plugin import end_with_worker


async def main(model: str, engine_args: str) -> None:
    engine = VllmEngine(
        WorkerConfig(
            name="test",
            devices=["cpu:0"],
            model=model,
            engine_args=json.loads(engine_args),
            slab_fd=-1,
            control="",
            bell="",
            supervisor_pid=0,
        )
    )
    try:
        await engine.start()
    except PingpongError as error:
        sys.stdout.write(f"answer {json.dumps({'code': error.code, 'field': error.field, 'text': str(error)})}\n")
    else:
        sys.stdout.write("answer ready\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
elif __name__ == "__mp_main__":
    end_with_worker()
