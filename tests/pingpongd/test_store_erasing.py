"""What the chain store erases, when, and that nothing of it is left in the files."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pingpong_bus.messages import AgentResult, ChainResult
from pingpongd.config import StoreConfig
from pingpongd.store import Store
from pingpongd.store_body import PAGE_BYTES, content, pack
from store_samples import job, outcome, result

DAY = 86400.0
MIB = 1024 * 1024


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store.open(tmp_path, StoreConfig())
    yield store
    await store.close()


async def ended(store: Store, chain_id: str, *, at: float = 0.0, fetched: bool = False, size: int = 10) -> None:
    await store.add(chain_id, job(store.next_number, key=f"key of {chain_id}"))
    await store.ended(chain_id, result(chain_id, "x" * size), at)
    if fetched:
        await store.result(chain_id, fetched=True)


def files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


# ---------------------------------------------------------------------------------------------------------- forgetting


async def test_forget_erases_an_ended_chain_and_no_other(store: Store) -> None:
    await store.add("0000000a", job(1))
    await ended(store, "0000000b")
    await ended(store, "0000000c")
    assert not await store.forget("0000000a")
    assert not await store.forget("0000000d")
    assert await store.forget("0000000b")
    assert not await store.forget("0000000b")
    assert not store.knows("0000000b")
    assert await store.result("0000000b", fetched=True) is None
    assert [chain.id for chain in await store.list(9)] == ["0000000c"]
    assert store.knows("0000000a")
    assert store.status().chains == 2


@pytest.mark.parametrize("seed", [6, 27])  # with these, rows were moved between pages, and left copies behind
async def test_nothing_of_a_forgotten_chain_is_in_any_file(store: Store, tmp_path: Path, seed: int) -> None:
    choices = random.Random(seed)

    def text(chain_id: str) -> str:
        return f"<{chain_id}>" * choices.choice([1, 5, 20, 60, 200, 400, 700, 2000])

    live: list[str] = []
    over: list[str] = []
    forgotten: list[bytes] = []
    for number in range(1, 400):
        chosen = choices.random()
        if chosen < 0.5 or not live:
            chain_id = f"{choices.getrandbits(32):08x}"
            await store.add(chain_id, job(number, text(chain_id), key=text(chain_id)[:128]))
            live.append(chain_id)
        elif chosen < 0.75:
            chain_id = live.pop(choices.randrange(len(live)))
            for agent in range(choices.randrange(3)):
                store.agent_finished(chain_id, agent, outcome(text(chain_id)))
            agents = [AgentResult(name="a", text=text(chain_id))]
            name = text(chain_id)[:200]
            await store.ended(chain_id, ChainResult(id=chain_id, name=name, state="finished", agents=agents), 5.0)
            over.append(chain_id)
        elif over:
            chain_id = over.pop(choices.randrange(len(over)))
            assert await store.forget(chain_id)
            forgotten.append(f"<{chain_id}>".encode())
            assert forgotten[-1] not in files(tmp_path)
    data = files(tmp_path)
    assert [mark for mark in forgotten if mark in data] == []
    assert len(forgotten) > 20
    assert f"<{over[-1]}>".encode() in data


@pytest.mark.parametrize("size", [0, 1, 1000, 3000, 3570, 3571, 3572, 3600, 4000, 4100, 8000, 100_000])
@pytest.mark.parametrize("number", [1, 2**53])
def test_no_content_stands_on_a_page_of_the_table(size: int, number: int, tmp_path: Path) -> None:
    """Only the root page of the table is read here: a row's overflow pages are elsewhere in the file."""
    body = pack(b"c" * size, head=b"h" * 10)
    assert content(body) == b"c" * size
    connection = sqlite3.connect(tmp_path / "db")
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("CREATE TABLE outcome (number INTEGER, agent INTEGER, body BLOB)")
    connection.execute("INSERT INTO outcome VALUES (?, ?, ?)", (number, number, body))
    connection.commit()
    (root,) = connection.execute("SELECT rootpage FROM sqlite_schema").fetchone()
    connection.close()
    page = (tmp_path / "db").read_bytes()[(root - 1) * PAGE_BYTES : root * PAGE_BYTES]
    assert b"h" not in page
    assert b"c" not in page


# ------------------------------------------------------------------------------------------------------------- expiry


@pytest.mark.parametrize(
    ("fetched", "age_days", "gone"),
    [
        (True, 0.0, False),
        (True, 7.0, False),
        (True, 7.01, True),
        (False, 7.01, False),
        (False, 30.0, False),
        (False, 30.01, True),
        (True, -1.0, False),
        (True, -1000.0, False),
        (False, -1000.0, False),
    ],
)
async def test_age(store: Store, fetched: bool, age_days: float, gone: bool) -> None:
    now = 2000 * DAY
    await ended(store, "0000000a", at=now - age_days * DAY, fetched=fetched)
    assert await store.expire(now) == (["0000000a"] if gone else [])
    assert store.knows("0000000a") is not gone
    assert (store.find_key("key of 0000000a") is None) is gone


async def test_kept_for_no_time_means_until_it_is_older_than_that(store: Store) -> None:
    store.configure(StoreConfig(keep_days=0))
    await ended(store, "0000000a", at=1000.0, fetched=True)
    await ended(store, "0000000b", at=1000.0)
    assert await store.expire(500.0) == []
    assert await store.expire(1000.0) == []
    assert await store.expire(1000.5) == ["0000000a"]


async def test_a_live_chain_never_expires(store: Store) -> None:
    store.configure(StoreConfig(keep_days=0, keep_unfetched_days=0, keep_mib=1))
    await store.add("0000000a", job(1, "x" * 3 * MIB, submitted_at=0.0))
    assert await store.expire(1e9) == []
    assert store.knows("0000000a")


@pytest.mark.parametrize(
    ("sizes", "fetched", "gone"),
    [
        ([0.3, 0.3, 0.3], [], []),
        ([0.5, 0.4, 0.4], [], ["0"]),
        ([0.5, 0.4, 0.4], ["2"], ["2"]),
        ([0.5, 0.4, 0.4], ["1", "2"], ["1"]),
        ([0.1, 0.8, 0.8], [], ["0", "1"]),
        ([0.1, 0.8, 0.8], ["1"], ["1"]),
        ([1.5], [], ["0"]),
    ],
)
async def test_size(store: Store, sizes: list[float], fetched: list[str], gone: list[str]) -> None:
    """The oldest go first, those that were fetched before all others."""
    store.configure(StoreConfig(keep_mib=1))
    for index, size in enumerate(sizes):
        # A result holds the text twice, see store_samples. Ends are in order of the list, clocks run backwards.
        await ended(store, f"{index:08x}", at=-index, fetched=str(index) in fetched, size=int(size * MIB / 2))
    erased = await store.expire(0.0)
    assert sorted(erased) == [f"{int(index):08x}" for index in gone]


async def test_many_expire_and_the_files_shrink(store: Store, tmp_path: Path) -> None:
    for number in range(600):
        await ended(store, f"{number:08x}", size=20_000 if number % 10 == 0 else 10)
    before = (tmp_path / "chains.db").stat().st_size
    assert len(await store.expire(31 * DAY)) == 600
    assert await store.list(9) == []  # comes after the log was emptied
    assert (tmp_path / "chains.db").stat().st_size < before / 10
    assert (tmp_path / "chains.db-wal").stat().st_size == 0
    assert store.status().chains == 0


async def test_what_a_store_knows_by_heart_goes_with_its_chains(store: Store) -> None:
    """Else memory would grow with every chain that ever was."""
    for number in range(300):
        await ended(store, f"{number:08x}")
    await store.expire(31 * DAY)
    held = {name: value for name, value in vars(store).items() if isinstance(value, dict | set | list)}
    assert len(held) >= 5
    assert {name: len(value) for name, value in held.items() if value} == {}
