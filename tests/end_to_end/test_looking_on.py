"""What people see of a real daemon with simulated engines: its start on a terminal, waiting for it, and `top`."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

from daemon_process import HANG_SECONDS, DaemonProcess, StartDaemon, simulated_config
from screen import Screen

SLOW_START = simulated_config().replace("step_ms = 1.0", "step_ms = 1.0\nstart_ms = 3000")


async def command(daemon: DaemonProcess, *words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pingpong_client", "--socket", str(daemon.socket), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), HANG_SECONDS)
    return process.returncode, out.decode(), err.decode()


def chain_of(folder: Path, tokens: int) -> str:
    path = folder / "chain.json"
    agent = {"name": "writer", "prompt_ids": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
    path.write_text(json.dumps({"name": "tides", "agents": [agent]}))
    return str(path)


async def test_submit_waits_for_a_start_and_says_how_far_it_has_come(start_daemon: StartDaemon, folder: Path) -> None:
    daemon = await start_daemon(SLOW_START, wait=False)
    async with asyncio.timeout(HANG_SECONDS):
        while not daemon.socket.exists():
            await asyncio.sleep(0.01)
    code, out, err = await command(daemon, "submit", chain_of(folder, 8), "--wait", "--json")
    assert code == 0, err
    assert json.loads(out)["state"] == "finished"
    told = err.splitlines()
    assert told[0] == "pingpong-client: the daemon is starting"
    assert any(": loading the weights" in line for line in told)
    assert len(told) == len(set(told)), "each stage is told once"


async def test_top_shows_groups_that_decode_and_the_chain_that_they_work_on(
    start_daemon: StartDaemon, folder: Path
) -> None:
    daemon = await start_daemon(simulated_config(step_ms=5.0))
    code, chain, _ = await command(daemon, "submit", chain_of(folder, 3900), "--detach")
    assert code == 0
    async with asyncio.timeout(HANG_SECONDS):
        while True:  # until heartbeats have told of tokens
            code, out, err = await command(daemon, "top", "--interval", "1.2")
            assert code == 0, err
            lines = out.splitlines()
            table = [*lines[lines.index("") + 1 :], ""]
            groups = [line.split() for line in table[1 : table.index("")] if line.startswith(("a ", "b "))]
            # On a machine that is busy with other tests they may well be degraded.
            assert {words[1] for words in groups} <= {"serving", "degraded", "recovering"}
            if any("━" in line for line in lines) and any(words[2] != "-" for words in groups):
                break
    [row] = [line for line in lines if line.startswith(chain.strip())]
    assert "writer on " in row
    assert "tides" in row
    assert "tokens/s" in lines[0]
    busy = next(words for words in groups if words[2] != "-")
    assert 4.0 < float(busy[2]) < 500.0, "ITL p50 in ms, of steps of 5 ms on a machine that may be busy"
    assert (await command(daemon, "cancel", chain.strip()))[0] == 0


async def test_on_a_terminal_the_daemon_shows_its_start_under_its_log(folder: Path) -> None:
    (folder / "config.toml").write_text(f'state_dir = "{folder / "state"}"\n{SLOW_START}')
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    arguments = ["--config", str(folder / "config.toml"), "--runtime-dir", str(folder / "run")]
    daemon = subprocess.Popen(  # noqa: ASYNC220 - it is waited for below, without blocking
        [sys.executable, "-m", "pingpongd", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=slave,
        env=environ | {"TERM": "xterm-256color"},
    )
    screen, text, decoder = Screen(), "", codecs.getincrementaldecoder("utf-8")()

    def read() -> None:
        nonlocal text
        more = decoder.decode(os.read(master, 65536))
        text += more
        screen.feed(more)

    async def until(*words: str) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not any(all(word in line for word in words) for line in screen.lines):
                assert daemon.poll() is None, text
                await asyncio.sleep(0.01)

    asyncio.get_running_loop().add_reader(master, read)
    try:
        await until("a ", "loading the weights", " of ", "shards")
        assert screen.cursor_hidden
        await until("daemon_ready")
        async with asyncio.timeout(HANG_SECONDS):
            while screen.cursor_hidden:
                await asyncio.sleep(0.01)
        assert not any("━" in line for line in screen.lines), "the bars are gone"
        plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)
        assert plain.count("stage='loading the tokenizer'") == 2, "lines of the log are whole, and each is there once"
        assert "worker_ready" in " ".join([*screen.scrolled, *screen.lines])
        daemon.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG_SECONDS):
            while daemon.poll() is None:
                await asyncio.sleep(0.01)
        assert daemon.returncode == 0
    finally:
        asyncio.get_running_loop().remove_reader(master)
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()
        os.close(slave)
        os.close(master)
