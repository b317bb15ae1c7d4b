"""The chain store: what goes in comes out, in order and after a restart; keys name one chain."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from pingpong_bus.errors import StoreError
from pingpongd.config import StoreConfig
from pingpongd.store import KeyTaken, Store, default_state_dir
from pingpongd.stored import AgentOutcome, Job
from store_samples import job, jobs, outcome, outcomes, result


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store.open(tmp_path / "state", StoreConfig())
    yield store
    await store.close()


async def reopened(store: Store, folder: Path) -> Store:
    await store.close()
    return Store.open(folder, StoreConfig())


@given(job=jobs, finished=outcomes)
@settings(max_examples=40)
def test_a_job_and_its_outcomes_come_back_as_they_were(job: Job, finished: AgentOutcome) -> None:
    async def there_and_back(folder: Path) -> None:
        store = Store.open(folder, StoreConfig())
        await store.add("0000000a", job)
        store.agent_finished("0000000a", 7, finished)
        store = await reopened(store, folder)
        (chain,) = store.live()
        assert (chain.id, chain.job, chain.outcomes) == ("0000000a", job, {7: finished})
        assert not chain.started
        assert store.next_number == job.number + 1
        await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(there_and_back(Path(folder)))


async def test_live_chains_come_in_the_order_of_their_numbers(store: Store, tmp_path: Path) -> None:
    numbers = [5, 1, 9, 3]
    await asyncio.gather(*(store.add(f"{number:08x}", job(number)) for number in numbers))
    await store.ended(f"{3:08x}", result("00000003"), 5.0)
    store = await reopened(store, tmp_path / "state")
    assert [chain.job.number for chain in store.live()] == [1, 5, 9]
    assert store.next_number == 10
    await store.close()


async def test_attempts_count_the_starts_of_the_daemon(store: Store, tmp_path: Path) -> None:
    await store.add("0000000a", job(1))
    await store.add("0000000b", job(2))
    attempts = []
    for _ in range(3):
        store = await reopened(store, tmp_path / "state")
        attempts.append([(chain.started, chain.attempt) for chain in store.live()])
        store.started("0000000a")
    assert attempts == [[(False, 2), (False, 2)], [(True, 3), (False, 3)], [(True, 4), (False, 4)]]
    await store.close()


async def test_an_attempt_that_was_begun_meanwhile_is_not_given_again(store: Store, tmp_path: Path) -> None:
    await store.add("0000000a", job(1))
    store.attempt("0000000a", 7)
    store.attempt("0000000a", 3)
    store = await reopened(store, tmp_path / "state")
    assert [chain.attempt for chain in store.live()] == [8]
    await store.close()


async def test_a_later_outcome_of_an_agent_takes_the_place_of_the_earlier(store: Store, tmp_path: Path) -> None:
    await store.add("0000000a", job(1))
    store.agent_finished("0000000a", 0, outcome("first"))
    store.agent_finished("0000000a", 0, outcome("second"))
    store = await reopened(store, tmp_path / "state")
    assert store.live()[0].outcomes == {0: outcome("second")}
    await store.close()


async def test_a_result_is_there_after_the_end_and_after_a_restart(store: Store, tmp_path: Path) -> None:
    await store.add("0000000a", job(1))
    assert await store.result("0000000a", fetched=False) is None
    ending = asyncio.ensure_future(store.ended("0000000a", result("0000000a"), 5.0))
    await asyncio.sleep(0)
    assert await store.result("0000000a", fetched=False) == result("0000000a")
    await ending
    assert await store.result("0000000a", fetched=True) == result("0000000a")
    assert await store.result("0000000b", fetched=True) is None
    store = await reopened(store, tmp_path / "state")
    assert store.live() == []
    assert store.knows("0000000a")
    assert await store.result("0000000a", fetched=False) == result("0000000a")
    await store.close()


async def test_list_shows_the_latest_that_ended_whatever_the_clock_says(store: Store) -> None:
    for number in range(1, 6):
        await store.add(f"{number:08x}", job(number, submitted_at=100.0 + number))
    for number in (4, 2, 5, 1):
        await store.ended(f"{number:08x}", result(f"{number:08x}"), 1000.0 - number)
    chains = await store.list(3)
    assert [chain.id for chain in chains] == ["00000002", "00000005", "00000001"]
    last = chains[-1]
    assert (last.name, last.state, last.agents, last.finished_agents) == ("name written", "failed", 2, 1)
    assert (last.submitted_at, last.ended_at, last.e2e_ms) == (101.0, 999.0, 12.5)
    assert await store.list(0) == []


async def test_of_submissions_with_one_key_one_is_added(store: Store, tmp_path: Path) -> None:
    outcomes = await asyncio.gather(
        *(store.add(f"{number:08x}", job(number, key="k")) for number in range(1, 9)), return_exceptions=True
    )
    taken = [problem for problem in outcomes if isinstance(problem, KeyTaken)]
    assert len(taken) == 7
    assert {problem.chain_id for problem in taken} == {"00000001"}
    assert store.find_key("k") == "00000001"
    assert store.status().chains == 1
    store = await reopened(store, tmp_path / "state")
    assert store.find_key("k") == "00000001"
    await store.ended("00000001", result("00000001"), 5.0)
    assert store.find_key("k") == "00000001"
    assert await store.forget("00000001")
    assert store.find_key("k") is None
    await store.add("0000000a", job(10, key="k"))
    await store.close()


async def test_a_key_is_seen_while_its_chain_is_on_its_way(store: Store) -> None:
    adding = asyncio.create_task(store.add("0000000a", job(1, key="k")))
    await asyncio.sleep(0)
    assert store.find_key("k") == "0000000a"
    assert store.knows("0000000a")
    await store.added("0000000a")
    await adding
    assert store.find_key("") is None


async def test_a_cancelled_add_keeps_nothing(store: Store, tmp_path: Path) -> None:
    adding = asyncio.create_task(store.add("0000000a", job(1, key="k")))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(store.added("0000000a"))
    await asyncio.sleep(0)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    with pytest.raises(StoreError, match="was not kept"):
        await waiting
    assert store.find_key("k") is None
    await store.add("0000000b", job(2, key="k"))
    store = await reopened(store, tmp_path / "state")
    assert [chain.id for chain in store.live()] == ["0000000b"]
    await store.close()


@pytest.mark.parametrize("chain_id", ["0000000a", "", "a", "0000000A", "0000000g", "0x00000a", "0_0000_0"])
async def test_ids_are_new_and_8_hex_digits(store: Store, chain_id: str) -> None:
    await store.add("0000000a", job(1))
    with pytest.raises(ValueError, match="not the id of a new chain"):
        await store.add(chain_id, job(2))
    assert not await store.forget(chain_id)
    assert await store.result(chain_id, fetched=True) is None


async def test_a_chain_that_is_not_live_cannot_go_on(store: Store) -> None:
    await store.add("0000000a", job(1))
    await store.ended("0000000a", result("0000000a"), 5.0)
    with pytest.raises(ValueError, match="not live"):
        store.started("0000000a")
    with pytest.raises(ValueError, match="not live"):
        await store.ended("0000000a", result("0000000a"), 5.0)


async def test_status_counts_what_is_kept(store: Store, tmp_path: Path) -> None:
    await store.add("0000000a", job(1))
    await store.add("0000000b", job(2))
    await store.ended("0000000b", result("0000000b"), 5.0)
    status = store.status()
    assert (status.chains, status.pending, status.error) == (2, 0, "")
    assert status.path == str(tmp_path / "state" / "chains.db")
    assert status.bytes > 0


async def test_a_number_is_not_given_twice_though_its_chain_is_forgotten(store: Store, tmp_path: Path) -> None:
    await store.add("0000000a", job(41))
    await store.ended("0000000a", result("0000000a"), 5.0)
    await store.forget("0000000a")
    store = await reopened(store, tmp_path / "state")
    assert store.next_number == 42
    await store.close()


async def test_nothing_is_taken_after_close(tmp_path: Path) -> None:
    store = Store.open(tmp_path, StoreConfig())
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.add("0000000a", job(1))
    assert not store.knows("0000000a")


@pytest.mark.parametrize(
    ("variables", "instance", "expected"),
    [
        ({"STATE_DIRECTORY": "/var/lib/pingpongd"}, "default", "/var/lib/pingpongd"),
        ({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "XDG_STATE_HOME": "/x"}, "b", "/var/lib/a"),
        ({"XDG_STATE_HOME": "/x"}, "default", "/x/pingpongd"),
        ({"XDG_STATE_HOME": "/x"}, "two", "/x/pingpongd-two"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/home/me"}, "default", "/home/me/.local/state/pingpongd"),
        ({"HOME": "/home/me"}, "two", "/home/me/.local/state/pingpongd-two"),
    ],
)
def test_where_chains_are_kept(
    variables: dict[str, str], instance: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_state_dir(instance) == Path(expected)
