"""A disk that is full or read-only, a damaged or newer database, a clock set back: a clear answer, and nothing lost
that was accepted."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon_process import DaemonProcess, StartDaemon, simulated_config, until
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import StoreError
from pingpong_bus.messages import SubmitOptions
from pingpongd.store_body import content, pack
from pingpongd.stored import Job

SERIAL = SubmitOptions(mode="serial")


def chain(tokens: int = 40, agents: int = 2) -> Chain:
    steps: list[dict[str, Any]] = []
    for index in range(agents):
        reads = [f"{{{{a{index - 1}}}}}"] if index else []
        ids = [*range(300, 330), *reads]
        steps.append({"name": f"a{index}", "prompt_ids": ids, "max_tokens": tokens, "ignore_eos": True})
    return parse_chain(msgspec.json.encode({"name": "c", "agents": steps}))


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = folder / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "pingpongd-test", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is refused here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room on it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


async def start_on(start_daemon: StartDaemon, state: Path) -> DaemonProcess:
    return await start_daemon(f'state_dir = "{state}"\n' + simulated_config(step_ms=10.0))


async def restarted(start_daemon: StartDaemon, state: Path) -> DaemonProcess:
    return await start_daemon(f'state_dir = "{state}"\n' + simulated_config(), wait=False)


async def test_a_full_disk_refuses_what_is_new_and_loses_nothing(disk: Path, start_daemon: StartDaemon) -> None:
    daemon = await start_on(start_daemon, disk / "state")
    async with daemon.client() as client:
        running = await client.submit(chain(100), options=SERIAL)
        filler = fill(disk)
        with pytest.raises(StoreError, match="full"):
            await client.submit(chain(), options=SERIAL)
        assert (await client.wait(running)).state == "finished"
        status = await client.status()
        assert status.store is not None
        assert status.store.pending > 0
        assert "full" in status.store.error
        filler.unlink()
        after = await client.run(chain(), options=SERIAL)
        assert after.state == "finished"
    daemon.signal(signal.SIGKILL)
    await daemon.ended()
    again = await start_on(start_daemon, disk / "state")
    async with again.client() as client:
        assert (await client.result(running)).state == "finished"
        assert (await client.result(after.id)).agents == after.agents


async def test_a_read_only_disk_is_named(disk: Path, start_daemon: StartDaemon) -> None:
    (disk / "state").mkdir()
    mount = await asyncio.create_subprocess_exec("mount", "-o", "remount,ro", str(disk))
    assert await mount.wait() == 0
    daemon = await restarted(start_daemon, disk / "state")
    assert await daemon.ended() == 78
    assert "read-only" in daemon.log.read_text()


@pytest.mark.parametrize("trouble", ["damaged", "newer"])
async def test_a_database_that_cannot_be_used_is_named_and_left_alone(
    start_daemon: StartDaemon, folder: Path, trouble: str
) -> None:
    state = folder / "state"
    daemon = await start_on(start_daemon, state)
    async with daemon.client() as client:
        finished = await client.run(chain(), options=SERIAL)
    daemon.signal(signal.SIGTERM)
    assert await daemon.ended() == 0
    database = state / "chains.db"
    kept = database.read_bytes()
    if trouble == "damaged":
        database.write_bytes(kept[:4096] + bytes(4096) + kept[8192:])
    else:
        with sqlite3.connect(database) as connection:
            connection.execute("PRAGMA user_version = 999")
        connection.close()
    spoiled = database.read_bytes()
    refused = await restarted(start_daemon, state)
    assert await refused.ended() == 78
    assert "chains.db" in refused.log.read_text()
    assert database.read_bytes() == spoiled
    database.write_bytes(kept)  # what was kept is there once it is mended
    again = await start_on(start_daemon, state)
    async with again.client() as client:
        assert (await client.result(finished.id)).agents == finished.agents


async def test_a_clock_that_was_set_back_loses_nothing(start_daemon: StartDaemon, folder: Path) -> None:
    state = folder / "state"
    daemon = await start_on(start_daemon, state)
    async with daemon.client() as client:
        finished = await client.run(chain(), options=SERIAL)
        live = await client.submit(chain(120), options=SubmitOptions(mode="serial", deadline_s=3600))
        await until(lambda: len(daemon.log_events("chain_started")) == 2, "the second chain's start")
    daemon.signal(signal.SIGKILL)
    await daemon.ended()
    years = 3 * 365 * 86400.0  # as if the chains had come from the future
    with sqlite3.connect(state / "chains.db") as connection:
        connection.execute("UPDATE chain SET submitted_at = submitted_at + ?", (years,))
        connection.execute("UPDATE ended SET ended_at = ended_at + ?", (years,))
        (body,) = connection.execute("SELECT body FROM job").fetchone()
        job = msgspec.msgpack.decode(content(body), type=Job)
        later = msgspec.structs.replace(job, submitted_at=job.submitted_at + years)
        connection.execute("UPDATE job SET body = ?", (pack(msgspec.msgpack.encode(later)),))
    connection.close()
    again = await start_on(start_daemon, state)
    async with again.client() as client:
        assert (await client.result(finished.id)).agents == finished.agents
        async with asyncio.timeout(120):
            result = await client.wait(live)
        assert result.state == "finished"
        assert result.e2e_ms is not None
        assert 0 < result.e2e_ms < 1000 * time.monotonic()
        assert all(summary.age_s >= 0 for summary in await client.list())
