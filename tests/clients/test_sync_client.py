"""The blocking client, over a fake transport and over a real socket."""

import asyncio
import threading

import pytest

from pingpong_bus.errors import ChainNotFound, DaemonUnavailable
from pingpong_client import Client


@pytest.fixture
def client(link):
    with Client("/fake", transport=link.transport) as client:
        yield client


def test_every_method(client, chain):
    assert client.run(chain).state == "finished"
    chain_id = client.submit(chain, {"topic": "storms"}, follow=True)
    assert [event.kind for event in client.follow(chain_id)][-1] == "ended"
    assert client.wait(chain_id).id == chain_id
    assert client.attach(chain_id).id == chain_id
    assert client.result(chain_id, prompt_ids=True).agents[0].prompt_ids == [1, 2, 0]
    assert [summary.id for summary in client.list()] == ["c0", "c1"]
    assert client.status().instance == "default"
    assert [summary.id for summary in client.list(limit=1)] == ["c1"]
    assert client.submit(chain, key="mine") == client.submit(chain, key="mine") == "c2"
    assert client.run(chain, key="mine").id == "c2"
    assert client.away_s is None
    assert client.score([1, 2], [3, 4], grid=64) == [-0.5, -0.75]
    client.cancel(chain_id)
    client.forget(chain_id)
    client.drain(deadline_s=1.0)
    client.reset_caches()


def test_errors_are_the_same(client):
    with pytest.raises(ChainNotFound):
        client.result("nope")
    with pytest.raises(ChainNotFound):
        list(client.follow("nope"))


def test_following_may_stop_early(client, chain):
    chain_id = client.submit(chain, follow=True)
    events = client.follow(chain_id)
    assert next(events).kind == "started"
    events.close()
    assert client.result(chain_id).state == "finished"


def test_an_iterator_that_outlives_the_connection_starts_nothing(link, chain):
    client = Client("/fake", transport=link.transport)
    chain_id = client.submit(chain, follow=True)
    dropped, read_on = client.follow(chain_id), client.follow(client.submit(chain, follow=True))
    assert next(dropped).kind == next(read_on).kind == "started"
    client.close()
    before = threading.active_count()
    dropped.close()
    with pytest.raises(DaemonUnavailable, match="was closed"):
        next(read_on)
    assert threading.active_count() == before


def test_no_daemon_leaves_no_thread(tmp_path):
    before = threading.active_count()
    with pytest.raises(DaemonUnavailable), Client(tmp_path):
        pass
    assert threading.active_count() == before


def test_without_the_context_manager(link):
    client = Client("/fake", transport=link.transport)
    assert client.status().instance == "default"
    client.close()
    client.close()


async def test_it_works_where_an_event_loop_runs_already(serving, chain, tmp_path):
    def block():
        with Client(tmp_path) as client:
            return client.run(chain)

    async with serving(tmp_path / "control.sock"):
        assert (await asyncio.to_thread(block)).state == "finished"


async def test_it_works_inside_a_running_loop(link):
    # As in a notebook: the caller's thread has a loop, and blocks it.
    with Client("/fake", transport=link.transport) as client:
        assert client.status().instance == "default"
