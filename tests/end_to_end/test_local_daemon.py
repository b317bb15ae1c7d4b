"""A benchmark's own daemon: what it leaves behind holds nobody up for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import local_daemon
from daemon_process import HANG_SECONDS

PROGRAM = """
import json, os, signal, subprocess, sys

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open({pid!r}, "w") as file:
    file.write(str(child.pid))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if {ready}:
    print(json.dumps({{"event": "daemon_ready"}}), file=sys.stderr, flush=True)
    signal.pause()
sys.exit("it has no engine")
"""


@pytest.mark.parametrize("ready", [True, False])
async def test_what_outlives_a_daemon_with_its_log_open_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ready: bool
) -> None:
    monkeypatch.setattr(local_daemon, "LINGER_S", 0.2)
    program, pid = folder / "program.py", folder / "pid"
    program.write_text(PROGRAM.format(pid=str(pid), ready=ready))

    async def started_and_ended() -> bool:
        async with local_daemon.local_daemon(folder / "config.toml", program=[str(program)]):
            return True

    try:
        running = asyncio.wait_for(started_and_ended(), HANG_SECONDS)
        if ready:
            assert await running
        else:
            with pytest.raises(local_daemon.DaemonEnded, match="it has no engine"):
                await running
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert "outlived" in capsys.readouterr().err
