"""A supervisor with its sweeper and one worker, and nothing else: ``supervisor_process.py RUNTIME_DIR [KIND...]``.

Prints one JSON object; the end of its standard input stops it cleanly. The kinds are `family_process.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

from pingpong_worker.shared_memory_names import PREFIX_VARIABLE
from pingpongd.logs import set_up_logging
from pingpongd.process import WorkerProcess
from pingpongd.runtime_dir import RuntimeDir
from pingpongd.sweeper import Sweeper

FAMILY = Path(__file__).with_name("family_process.py")


async def main(path: Path, kinds: list[str]) -> None:
    with RuntimeDir(path, "test") as runtime:
        async with Sweeper(runtime) as sweeper:
            with socket.socket(socket.AF_UNIX) as control:
                control.bind(str(path / "control.sock"))
                (runtime.temporary / "scratch").write_text("of an engine")
                environment = os.environ | {PREFIX_VARIABLE: runtime.segment_prefix}
                command = [sys.executable, str(FAMILY), *kinds]
                worker = WorkerProcess(command, b"", environment, [], sweeper)
                lines: asyncio.Queue[str] = asyncio.Queue()
                worker.on_line = lines.put_nowait
                family = json.loads(await lines.get())
                family["pids"]["supervisor"] = os.getpid()
                family["prefix"] = runtime.segment_prefix

                def say() -> None:
                    family["pids"]["sweeper"] = sweeper.pid
                    sys.stdout.write(json.dumps(family) + "\n")
                    sys.stdout.flush()

                say()
                while await asyncio.to_thread(sys.stdin.readline):
                    say()
                os.kill(worker.pid, signal.SIGTERM)
                await worker.over()


if __name__ == "__main__":
    set_up_logging("info", "json")
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
