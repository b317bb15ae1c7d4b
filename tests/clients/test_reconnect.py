"""Clients outlive connections and daemons, over a fake transport: nothing is run twice, no token comes twice."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chain_script import NAMES, Screen, Script, check
from fake_daemon import FakeDaemon, Link
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.errors import ChainNotFound, DaemonUnavailable, DataError, MessageError, Overloaded
from pingpong_bus.messages import Accepted, Attach, GetResult, GetStatus, Snapshot, Submit
from pingpong_client import connection
from pingpong_client import link as link_module

HANG_S = 20
LOST = DaemonUnavailable("the daemon went away.")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(link_module, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(link_module, "LONGEST_DELAY_S", 0.01)


def asked(daemon, kind):
    return [request for request in daemon.requests if isinstance(request, kind)]


# ------------------------------------------------------------------------------------------------------ following


class ScriptedDaemon(FakeDaemon):
    """Runs one scripted chain, and sends its events only to a client that follows it."""

    def __init__(self, script):
        super().__init__()
        self.script = script
        self.follows = False

    def _answer(self, request):
        if isinstance(request, Submit):
            self.follows = True
            self.send(Accepted(request=request.request, chain="c0"))
        elif isinstance(request, Attach):
            self.follows = self.script.state == "running"
            self.send(Snapshot(request=request.request, result=self.script.snapshot()))
        else:
            super()._answer(request)

    def emit(self, event):
        if self.follows:
            self.send(event)


NAME = st.sampled_from(NAMES)
STEPS = st.lists(
    st.tuples(
        st.one_of(
            st.tuples(st.just("open"), NAME),
            st.tuples(st.just("write"), NAME, st.integers(0, 4), st.integers(0, 6)),
            st.tuples(st.just("resume"), NAME),
            st.tuples(st.just("finish"), NAME),
            st.tuples(st.just("lose")),
            st.tuples(st.just("drop")),
            st.tuples(st.just("restart"), st.sets(NAME)),
        ),
        st.integers(0, 12),
    ),
    max_size=25,
)


async def follow_through(steps):
    script, screen = Script(), Screen()
    daemon = ScriptedDaemon(script)
    chain = Chain(name="n", agents=[Agent(name=name, prompt="x") for name in NAMES])

    async def show(client):
        async for event in client.follow(await client.submit(chain, follow=True)):
            screen.apply([event])

    async with Link(daemon).client(ping_s=0.005) as client:
        showing = asyncio.create_task(show(client))
        while not daemon.follows:
            await asyncio.sleep(0)
        for (step, *words), turns in steps:
            if step in ("lose", "restart"):
                daemon.follows = False
                daemon.send_frame(LOST)
                if step == "restart":
                    script.restart(*words)
            elif step == "drop":
                daemon.follows = False
            elif script.agents[words[0]].state != "finished":
                daemon.emit(getattr(script, step)(*words))
            for _ in range(turns):
                await asyncio.sleep(0)
        for name in NAMES:
            if script.agents[name].state != "finished":
                daemon.emit(script.write(name, 2, 3))
                daemon.emit(script.finish(name))
        daemon.emit(script.end())
        await asyncio.wait_for(showing, HANG_S)
    check(screen, script)
    assert screen.finished == set(NAMES)
    assert screen.end == {"state": "finished", "error": ""}


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_what_follow_yields_is_the_chain_whatever_happens(steps):
    asyncio.run(follow_through(steps))


async def test_a_restarted_daemon_goes_on_where_the_snapshot_is(link, daemon, chain, until):
    daemon.hold = True
    told = []
    async with link.client(on_away=told.append) as client:
        chain_id = await client.submit(chain, follow=True)
        events = []

        async def follow():
            async for event in client.follow(chain_id):
                events.append(event)  # noqa: PERF401 - each as it comes

        following = asyncio.create_task(follow())
        daemon.finish_agent(chain_id, 0)
        await until(lambda: events and events[-1].kind == "agent_finished")
        daemon.away = True
        link.lose()
        await until(lambda: client.away_s is not None)
        assert 0 <= client.away_s < HANG_S
        daemon.away = daemon.hold = False
        await asyncio.wait_for(following, HANG_S)
        assert client.away_s is None
    assert told == [True, False]
    assert [event.data["text"] for event in events if event.kind == "tokens"] == ["text of writer", "text of critic"]
    assert events[-1].kind == "ended"


async def test_a_chain_that_was_submitted_to_be_followed_survives_a_loss_before_it_is(link, daemon, chain):
    async with link.client() as client:
        chain_id = await client.submit(chain, follow=True)
        link.lose()
        events = [event async for event in client.follow(chain_id)]
    texts = [event.data["text"] for event in events if event.kind == "tokens"]
    assert texts == ["text of writer", "text of critic"]
    assert events[-1].kind == "ended"


async def test_a_daemon_that_dies_just_when_it_is_asked_to_follow(link, daemon, chain):
    answer = daemon._answer
    losses = 0

    def lose_first(request):
        nonlocal losses
        if isinstance(request, Attach) and not losses:
            losses += 1
            link.lose()
        else:
            answer(request)

    daemon._answer = lose_first
    async with link.client() as client:
        chain_id = await client.submit(chain)
        result = await asyncio.wait_for(client.wait(chain_id), HANG_S)
    assert result.state == "finished"
    assert losses == 1


async def test_a_daemon_that_does_not_come_back(link, daemon, chain, until):
    daemon.hold = True
    async with link.client(reconnect_s=0.2) as client:
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: daemon.requests)
        daemon.away = True
        link.lose()
        with pytest.raises(DaemonUnavailable) as caught:
            await asyncio.wait_for(run, HANG_S)
    assert str(caught.value) == (
        "the daemon at /fake/control.sock has gone and did not come back within 0.2 s. "
        "Once it runs again, `pingpong-client attach c0` follows the chain to its end."
    )


async def test_a_daemon_that_is_there_and_answers_nothing_has_not_come_back(link, daemon, chain, until):
    daemon.hold = True
    async with link.client(timeout_s=0.02, reconnect_s=0.3) as client:
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: daemon.requests)
        daemon.silent = {GetStatus, Attach}
        link.lose()
        with pytest.raises(DaemonUnavailable, match="did not come back within 0.3 s"):
            await asyncio.wait_for(run, HANG_S)
    assert len(link.transports) > 2


async def test_a_daemon_that_answers_after_a_while_has(link, daemon, chain, until):
    daemon.hold = True
    async with link.client(timeout_s=0.02, ping_s=0.01) as client:
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: daemon.requests)
        daemon.silent = {GetStatus, Attach}
        await until(lambda: client.away_s is not None)
        daemon.silent = set()
        await until(lambda: client.away_s is None)
        daemon.finish("c0")
        assert (await asyncio.wait_for(run, HANG_S)).state == "finished"


async def test_many_followers_share_what_was_made_anew(link, daemon, chain, until):
    daemon.hold = True
    async with link.client() as client:
        runs = [asyncio.ensure_future(client.run(chain)) for _ in range(20)]
        await until(lambda: len(asked(daemon, Submit)) == 20)
        daemon.away = True
        link.lose()
        await until(lambda: client.away_s is not None)
        daemon.away = daemon.hold = False
        results = await asyncio.wait_for(asyncio.gather(*runs), HANG_S)
    assert len({result.id for result in results}) == 20
    assert sum(not transport.closed for transport in link.transports) == 0


async def test_a_chain_that_the_new_daemon_does_not_know(link, daemon, chain, until):
    daemon.hold = True
    async with link.client() as client:
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: daemon.results)
        daemon.results.clear()
        link.lose()
        with pytest.raises(ChainNotFound):
            await asyncio.wait_for(run, HANG_S)


async def test_a_new_daemon_of_another_protocol_is_not_waited_for(link, daemon, chain, until):
    daemon.hold = True
    async with link.client() as client:
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: daemon.requests)
        daemon.refuse[GetStatus] = MessageError("The message is of protocol version 2, this side speaks 3.")
        link.lose()
        with pytest.raises(MessageError, match="this side speaks 3"):
            await asyncio.wait_for(run, HANG_S)


async def test_closing_ends_the_wait(link, daemon, chain, until):
    daemon.hold = True
    client = link.client()
    run = asyncio.ensure_future(client.run(chain))
    await until(lambda: daemon.requests)
    daemon.away = True
    link.lose()
    await until(lambda: client.away_s is not None)
    await client.close()
    with pytest.raises(DaemonUnavailable, match="was closed"):
        await asyncio.wait_for(run, HANG_S)


async def test_the_end_that_a_restart_undid_is_waited_for_again(link, daemon, chain, until):
    async with link.client() as client:
        chain_id = await client.submit(chain, follow=True)
        daemon.refuse[GetResult] = LOST  # it dies between the last event and the result, which was not on disk yet
        wait = asyncio.ensure_future(client.wait(chain_id))
        await until(lambda: asked(daemon, GetResult))
        daemon.hold = True
        daemon.ended.clear()
        daemon.refuse.clear()
        await until(lambda: asked(daemon, Attach))
        daemon.finish(chain_id)
        assert (await asyncio.wait_for(wait, HANG_S)).state == "finished"


# ------------------------------------------------------------------------------------------------------- submitting


@pytest.mark.parametrize("arrived", [False, True])
async def test_a_submission_whose_answer_was_lost_runs_once(link, daemon, chain, until, arrived):
    answer = daemon._answer
    losses = 0

    def lose_first(request):
        nonlocal losses
        if isinstance(request, Submit) and not losses:
            losses += 1
            if arrived:  # and ran to its end
                keep, daemon.send_frame = daemon.send_frame, lambda frame: None
                answer(request)
                daemon.send_frame = keep
            link.lose()
        else:
            answer(request)

    daemon._answer = lose_first
    async with link.client() as client:
        result = await asyncio.wait_for(client.run(chain), HANG_S)
    assert result.state == "finished"
    first, second = asked(daemon, Submit)
    assert first.key == second.key
    assert len(first.key) == 32
    assert list(daemon.results) == ["c0"]


@pytest.mark.parametrize("state", ["starting", "draining"])
async def test_a_daemon_that_was_restarted_under_a_submission_may_load_first(link, daemon, chain, monkeypatch, state):
    monkeypatch.setattr("pingpong_client.client.STARTING_POLL_S", 0.001)
    answer = daemon._answer
    refusals = iter([LOST, Overloaded("no engine serves yet."), Overloaded("no engine serves yet."), None])
    daemon.edit_status = lambda status: msgspec.structs.replace(status, state=state)

    def refuse(request):
        if isinstance(request, Submit) and (error := next(refusals)) is not None:
            raise error
        answer(request)

    daemon._answer = refuse
    async with link.client() as client:
        if state == "starting":
            assert (await asyncio.wait_for(client.run(chain), HANG_S)).state == "finished"
            assert len(asked(daemon, Submit)) == 4
        else:
            with pytest.raises(Overloaded):
                await asyncio.wait_for(client.run(chain), HANG_S)
            assert len(asked(daemon, Submit)) == 2


async def test_a_refusal_is_not_tried_again(link, daemon, chain):
    daemon.refuse[Submit] = Overloaded("the daemon is shutting down.")
    async with link.client() as client:
        with pytest.raises(Overloaded, match="shutting down"):
            await client.submit(chain)
    assert len(asked(daemon, Submit)) == 1


async def test_a_key_of_the_callers_names_one_chain(link, daemon, chain):
    async with link.client() as client:
        first = await client.run(chain, key="nightly")
    async with link.client() as client:
        second = await client.run(chain, key="nightly")
        assert [event.kind async for event in client.follow(await client.submit(chain, follow=True, key="nightly"))]
        with pytest.raises(DataError, match="key: the key has 129 characters"):
            await client.submit(chain, key="x" * 129)
    assert first.id == second.id == "c0"


@pytest.mark.parametrize("state", ["finished", "failed"])
async def test_a_chain_that_had_ended_is_told_from_its_beginning(link, daemon, chain, state):
    daemon.edit = lambda submit, result: msgspec.structs.replace(result, state=state)
    async with link.client() as client:
        for _ in range(2):
            chain_id = await client.submit(chain, follow=True, key="nightly")
            events = [event async for event in client.follow(chain_id)]
            texts = [event.data["text"] for event in events if event.kind == "tokens"]
            assert texts == ["text of writer", "text of critic"]
            assert events[-1].data["state"] == state


async def test_without_a_daemon_nothing_is_waited_for(link, daemon, chain):
    daemon.away = True
    with pytest.raises(DaemonUnavailable, match="no daemon answers"):
        await link.client().submit(chain)


# ----------------------------------------------------------------------------------------------------- flow control


async def test_the_daemon_is_told_how_much_was_read(link, daemon, until):
    async with link.client() as client:
        for _ in range(2 * connection.SEEN_MESSAGES + 5):
            await client.status()
        assert daemon.seen == [connection.SEEN_MESSAGES, 2 * connection.SEEN_MESSAGES]
        link.lose()
        await until(lambda: client._link._connection.error is not None)
        daemon.seen.clear()
        for _ in range(connection.SEEN_MESSAGES):
            await client.status()
    assert daemon.seen == [connection.SEEN_MESSAGES]  # counted anew: it is another connection


async def test_long_messages_are_confirmed_sooner(link, daemon, monkeypatch):
    monkeypatch.setattr(connection, "SEEN_BYTES", 1000)
    async with link.client() as client:
        for _ in range(4):
            status = await client.status()
        size = len(repr(status))
        assert size > 250
    assert daemon.seen
    assert daemon.seen[0] < 4


# --------------------------------------------------------------------------------------------------------- commands


async def test_a_pipe_is_told_that_the_daemon_is_away(link, daemon, chain_file, until):
    daemon.hold = True
    command = asyncio.ensure_future(link.command("submit", str(chain_file)))
    await until(lambda: daemon.results)
    daemon.finish_agent("c0", 0)
    daemon.away = True
    link.lose()
    await until(lambda: "away" in link.stderr.getvalue())
    daemon.away = daemon.hold = False
    outcome = await asyncio.wait_for(command, HANG_S)
    assert outcome.code == 0
    assert outcome.out.startswith("== writer ==\ntext of writer\n\n== critic ==\ntext of critic\n\n")
    assert outcome.out.count("text of writer") == 1
    assert outcome.err == (
        "pingpong-client: the daemon is away, waiting for it to come back.\npingpong-client: the daemon is back.\n"
    )


async def test_a_terminal_shows_that_the_daemon_is_away(link, daemon, chain_file, until, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    daemon.hold = True
    command = asyncio.ensure_future(link.command("submit", str(chain_file), terminal=True))
    await until(lambda: daemon.results)
    daemon.away = True
    link.lose()
    await until(lambda: "the daemon is away, waiting for it to come back (0 s)" in link.stdout.getvalue())
    daemon.away = daemon.hold = False
    outcome = await asyncio.wait_for(command, HANG_S)
    assert (outcome.code, outcome.err) == (0, "")


async def test_jobs_go_on_when_the_daemon_is_back(link, daemon, chain_file, until):
    daemon.hold = True
    lines = b'{"path": "%s"}\n' % str(chain_file).encode() * 5
    command = asyncio.ensure_future(link.command("submit", "--jsonl", "-", "--concurrency", "2", stdin=lines))
    await until(lambda: len(asked(daemon, Submit)) == 2)
    daemon.away = True
    link.lose()
    await until(lambda: "away" in link.stderr.getvalue())
    daemon.away = daemon.hold = False
    outcome = await asyncio.wait_for(command, HANG_S)
    assert outcome.code == 0
    assert outcome.out.count('"state":"finished"') >= 5
    assert len(daemon.results) == 5
