"""The chain store under faults: kills, full and read-only disks, damaged and foreign files, a second daemon."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import structlog

from pingpong_bus.errors import ConfigError, StoreError
from pingpongd import store as store_module
from pingpongd.config import StoreConfig
from pingpongd.store import Store
from store_samples import job, outcome, result

BIG = "x" * 1_000_000
"""More than any slack of a disk that is full."""
LIMIT_S = 60


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "pingpongd-test", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is refused here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


# ----------------------------------------------------------------------------------------------------------- kills


def _killed_after(enough: int, folder: Path) -> list[str]:
    """Lines of a process that was killed in the middle of its work after so many."""
    program = Path(__file__).with_name("store_process.py")
    environment = os.environ | {"PYTHONPATH": str(program.parent.parent)}
    command = [sys.executable, str(program), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(enough)]
        process.kill()
        return lines + process.stdout.readlines()


async def test_what_was_said_to_be_kept_outlives_a_kill(tmp_path: Path) -> None:
    added: set[str] = set()
    ended: set[str] = set()
    for enough in (1, 40, 150, 75):
        lines = _killed_after(enough, tmp_path)
        for line in lines:
            if match := re.fullmatch(r"(added|ended) ([0-9a-f]{8})\n", line):
                (added if match[1] == "added" else ended).add(match[2])
        assert len(added | ended) > 0
        store = Store.open(tmp_path, StoreConfig())
        live = {chain.id: chain for chain in store.live()}
        assert {chain_id for chain_id in added if not store.knows(chain_id)} == set()
        assert not ended & live.keys()
        assert store.next_number > max(int(chain_id, 16) for chain_id in added)
        for chain_id, chain in live.items():
            assert chain.job == job(chain.job.number, f"text of {chain_id}" * (chain.job.number % 500))
        for chain_id in ended:
            assert await store.result(chain_id, fetched=False) == result(chain_id, f"text of {chain_id}")
        await store.close()


# ------------------------------------------------------------------------------------------------------- full disks


@dataclass
class Disk:
    folder: Path
    fill: Callable[[Store], None]
    free: Callable[[Store], None]


def _limit_pages(store: Store, pages: int) -> None:
    store._writer.call(lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()).result()


def _fill_up(path: Path) -> None:
    with (path / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(65536))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017


@pytest.fixture(params=["pages", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """A disk that can be filled: SQLite's own limit, and a real one."""
    if request.param == "pages":
        return Disk(
            tmp_path / "state", lambda store: _limit_pages(store, 1), lambda store: _limit_pages(store, 1 << 30)
        )
    path = request.getfixturevalue("small_disk")
    return Disk(path / "state", lambda store: _fill_up(path), lambda store: (path / "filler").unlink())


@pytest.fixture
async def filling(disk: Disk) -> AsyncIterator[Store]:
    """A store with two live chains and an ended one."""
    store = Store.open(disk.folder, StoreConfig())
    for number in (1, 2, 3):
        await store.add(f"{number:08x}", job(number))
    await store.ended("00000003", result("00000003"), 5.0)
    yield store
    await store.close()


async def test_a_chain_that_does_not_fit_is_refused_and_leaves_nothing(filling: Store, disk: Disk) -> None:
    disk.fill(filling)
    with pytest.raises(StoreError, match="the disk is full") as caught:
        await filling.add("0000000a", job(10, BIG, key="k"))
    assert caught.value.hint == "Free some space and submit again."
    assert not filling.knows("0000000a")
    assert filling.find_key("k") is None
    assert "full" in filling.status().error
    assert await filling.result("00000003", fetched=False) == result("00000003")
    disk.free(filling)
    await until(lambda: not filling.status().error)
    await filling.add("0000000a", job(11, BIG, key="k"))
    await filling.close()
    store = Store.open(disk.folder, StoreConfig())
    assert [chain.job.number for chain in store.live()] == [1, 2, 11]
    await store.close()


async def test_changes_wait_for_room_and_lose_nothing(filling: Store, disk: Disk) -> None:
    disk.fill(filling)
    filling.agent_finished("00000001", 0, outcome(BIG))
    filling.started("00000001")
    with pytest.raises(StoreError, match="the disk is full") as caught:
        await filling.ended("00000002", result("00000002", BIG), 6.0)
    assert caught.value.hint == "Free some space; it is tried again."
    assert filling.status().pending == 3
    assert await filling.result("00000002", fetched=True) == result("00000002", BIG)
    assert [chain.id for chain in await filling.list(5)] == ["00000003", "00000002"]
    with pytest.raises(StoreError, match="its end could not be written"):
        await filling.forget("00000002")
    disk.free(filling)
    await until(lambda: filling.status().pending == 0)
    assert filling.status().error == ""
    assert [chain.id for chain in await filling.list(5)] == ["00000003", "00000002"]
    await filling.close()
    store = Store.open(disk.folder, StoreConfig())
    (chain,) = store.live()
    assert (chain.id, chain.started, chain.outcomes) == ("00000001", True, {0: outcome(BIG)})
    assert await store.result("00000002", fetched=False) == result("00000002", BIG)
    # It was fetched while it waited; so it goes after 7 days.
    assert await store.expire(6.0 + 8 * 86400) == ["00000002"]
    await store.close()


async def test_a_small_chain_gets_in_where_a_large_one_does_not(small_disk: Path) -> None:
    store = Store.open(small_disk / "state", StoreConfig())
    adding = [store.add("0000000a", job(10, BIG * 8)), store.add("0000000b", job(11))]
    problems = await asyncio.gather(*adding, return_exceptions=True)
    assert isinstance(problems[0], StoreError)
    assert problems[1] is None
    await store.close()


async def test_closing_on_a_full_disk_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_CLOSE_S", 0.3)
    store = Store.open(tmp_path, StoreConfig())
    await store.add("0000000a", job(1))
    _limit_pages(store, 1)
    store.agent_finished("0000000a", 0, outcome(BIG))
    with pytest.raises(StoreError, match="1 changes to the chain store are lost.*full"):
        await store.close()
    store = Store.open(tmp_path, StoreConfig())
    assert store.live()[0].outcomes == {}
    await store.close()


def test_a_store_cannot_be_made_on_a_full_disk(small_disk: Path) -> None:
    _fill_up(small_disk)
    with pytest.raises(StoreError, match="no space|full"):
        Store.open(small_disk / "state", StoreConfig())
    (small_disk / "filler").unlink()
    store = Store.open(small_disk / "state", StoreConfig())
    asyncio.run(store.close())


# ---------------------------------------------------------------------------------------- folders that cannot be used


async def test_a_read_only_disk_is_named(small_disk: Path) -> None:
    store = Store.open(small_disk / "state", StoreConfig())
    await store.close()
    remount = partial(subprocess.run, check=True, capture_output=True)
    remount(["mount", "-o", "remount,ro", str(small_disk)])
    for folder in (small_disk / "state", small_disk / "other"):
        with pytest.raises(ConfigError, match="state_dir: .* is on a read-only file system"):
            Store.open(folder, StoreConfig())
    remount(["mount", "-o", "remount,rw", str(small_disk)])


@pytest.mark.parametrize("name", ["chains.db", "chains.db-wal"])
@pytest.mark.parametrize("existed", [False, True])
async def test_a_file_that_is_taken_away_is_noticed(tmp_path: Path, name: str, existed: bool) -> None:
    if existed:
        await Store.open(tmp_path, StoreConfig()).close()
    store = Store.open(tmp_path, StoreConfig())
    await store.add("0000000a", job(1))
    assert store.status().error == ""
    aside = (tmp_path / name).rename(tmp_path / "aside")
    with structlog.testing.capture_logs() as logs:
        for replaced in (False, True):
            if replaced:
                (tmp_path / name).touch()
            assert "was removed or replaced" in store.status().error
            with pytest.raises(StoreError, match=f"{name} was removed or replaced"):
                await store.add("0000000b", job(2))
        assert not store.knows("0000000b")
    assert [(line["event"], line["log_level"]) for line in logs] == [("store_removed", "warning")]
    aside.rename(tmp_path / name)
    await store.add("0000000b", job(2))
    await store.close()
    store = Store.open(tmp_path, StoreConfig())
    assert len(store.live()) == 2
    await store.close()


async def test_a_new_store_is_told_from_one_that_was_emptied(tmp_path: Path) -> None:
    async def opened() -> list[tuple[str, str]]:
        with structlog.testing.capture_logs() as logs:
            await Store.open(tmp_path, StoreConfig()).close()
        return [(line["event"], line["log_level"]) for line in logs]

    assert await opened() == [("store_created", "info")]
    assert await opened() == []
    os.truncate(tmp_path / "chains.db", 0)
    assert await opened() == [("store_was_empty", "warning")]


def test_a_database_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "chains.db").mkdir()
    with pytest.raises(ConfigError, match="state_dir: .*/chains.db is a folder"):
        Store.open(tmp_path, StoreConfig())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="state_dir: .*cannot be made or written: Not a directory"):
        Store.open(tmp_path / "file" / "state", StoreConfig())


async def test_the_files_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    store = Store.open(folder, StoreConfig())
    await store.add("0000000a", job(1))
    assert folder.stat().st_mode & 0o777 == 0o700
    files = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert files == {"chains.db": 0o600, "chains.db-wal": 0o600, "lock": 0o600}
    await store.close()


async def test_a_second_daemon_is_told_who_has_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path, StoreConfig())
    with pytest.raises(ConfigError, match=rf"state_dir: another daemon .*\(pid {os.getpid()}\)"):
        Store.open(tmp_path, StoreConfig())
    await store.add("0000000a", job(1))
    await store.close()
    store = Store.open(tmp_path, StoreConfig())
    assert store.knows("0000000a")
    await store.close()


async def test_a_database_that_another_program_holds_is_tried_again_by_the_service(tmp_path: Path) -> None:
    store = Store.open(tmp_path, StoreConfig())
    await store.close()
    with sqlite3.connect(tmp_path / "chains.db") as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="in use by another program"):
            Store.open(tmp_path, StoreConfig())
    holder.close()


# ------------------------------------------------------------------------------------ files that cannot be understood


@pytest.fixture
async def killed(tmp_path: Path) -> Path:
    """A folder as a killed daemon leaves it: a database, and a log that is not in it yet."""
    store = Store.open(tmp_path / "running", StoreConfig())
    for number in range(1, 60):
        await store.add(f"{number:08x}", job(number, "y" * 5000))
    await store._call(lambda connection: connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall())
    await store.add("0000ffff", job(100))
    shutil.copytree(tmp_path / "running", tmp_path / "killed")
    await store.close()
    return tmp_path / "killed"


def contents(folder: Path) -> dict[str, bytes]:
    """What is in the database and its log; reading one may leave an empty log, and shared memory."""
    found = {path.name: path.read_bytes() for path in folder.glob("chains.db*") if not path.name.endswith("-shm")}
    return {name: data for name, data in found.items() if data}


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


async def test_a_log_that_was_left_is_read(killed: Path) -> None:
    assert (killed / "chains.db-wal").stat().st_size > 0
    store = Store.open(killed, StoreConfig())
    assert len(store.live()) == 60
    await store.close()


@pytest.mark.parametrize("damage", ["header", "page", "cut", "text"])
def test_a_damaged_file_is_named_and_left_alone(killed: Path, damage: str) -> None:
    path = killed / "chains.db"
    if damage == "header":
        (killed / "chains.db-wal").unlink()  # it has a whole first page
        overwrite(path, 0, b"\xff" * 100)
    elif damage == "page":
        for page in range(2, 12):
            overwrite(path, page * 4096, b"\xff" * 64)
    elif damage == "cut":
        os.truncate(path, 8 * 4096)
    else:
        path.write_bytes(b"not a database, but a long enough text\n" * 500)
    before = contents(killed)
    with pytest.raises(ConfigError, match="state_dir: .*is damaged: .*Nothing was changed.*\\.recover"):
        Store.open(killed, StoreConfig())
    assert contents(killed) == before


def test_a_newer_schema_is_named_and_left_alone(killed: Path) -> None:
    with sqlite3.connect(killed / "chains.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = contents(killed)
    with pytest.raises(ConfigError, match=r"made by a newer pingpongd \(schema 99, this one knows \d+\)"):
        Store.open(killed, StoreConfig())
    assert contents(killed) == before


def test_a_schema_that_nobody_gives_is_named_and_left_alone(killed: Path) -> None:
    with sqlite3.connect(killed / "chains.db") as connection:
        connection.execute("PRAGMA user_version = -1")
    connection.close()
    before = contents(killed)
    with pytest.raises(ConfigError, match="state_dir: .*has the schema -1, which no pingpongd gives"):
        Store.open(killed, StoreConfig())
    assert contents(killed) == before


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "chains.db") as connection:
        connection.execute("CREATE TABLE theirs (n)")
    connection.close()
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="state_dir: .*database of another program"):
        Store.open(tmp_path, StoreConfig())
    assert contents(tmp_path) == before


async def test_a_live_chain_that_cannot_be_understood_stops_the_start_and_counts_no_attempt(killed: Path) -> None:
    store = Store.open(killed, StoreConfig())
    store.started("00000001")
    await store.close()
    with sqlite3.connect(killed / "chains.db") as connection:
        (body,) = connection.execute("SELECT body FROM job WHERE number = 2").fetchone()
        connection.execute("UPDATE job SET body = ? WHERE number = 2", (body.replace(b"prompt", b"tpmorp"),))
    connection.close()
    store = Store.open(killed, StoreConfig())
    with pytest.raises(ConfigError, match="state_dir: the chain 00000002 .* cannot be read"):
        store.live()
    await store.close()
    with sqlite3.connect(killed / "chains.db") as connection:
        assert connection.execute("SELECT max(attempt) FROM chain").fetchone() == (1,)
        connection.execute("UPDATE job SET body = ? WHERE number = 2", (b"short",))
    connection.close()
    store = Store.open(killed, StoreConfig())
    with pytest.raises(ConfigError, match="too short"):
        store.live()
    await store.close()
