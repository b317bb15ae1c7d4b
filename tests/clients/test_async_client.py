"""AsyncClient over a fake transport: every method, and everything that can go wrong on the way."""

import asyncio

import msgspec
import pytest

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.codec import encode
from pingpong_bus.errors import (
    ChainError,
    ChainFailed,
    ChainNotFound,
    DaemonUnavailable,
    DataError,
    MessageError,
    Overloaded,
)
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    Attach,
    Cancel,
    Done,
    Drain,
    ErrorReply,
    Forget,
    GetResult,
    GetStatus,
    ListChains,
    ResetCaches,
    Submit,
    SubmitOptions,
)

HANG_S = 20


async def test_run_submits_follows_and_returns_the_result(link, daemon, chain):
    async with link.client() as client:
        result = await client.run(chain, {"topic": "storms"}, SubmitOptions(mode="serial"))
    assert result.state == "finished"
    assert [agent.text for agent in result.agents] == ["text of writer", "text of critic"]
    submit = daemon.requests[0]
    assert isinstance(submit, Submit)
    assert submit.follow
    assert submit.inputs == {"topic": "storms"}
    assert submit.options.mode == "serial"
    assert all(request.version == PROTOCOL_VERSION for request in daemon.requests)
    assert link.transports[0].closed


async def test_every_request_has_a_number_of_its_own(link, daemon, chain):
    async with link.client() as client:
        await asyncio.gather(*(client.run(chain) for _ in range(20)))
    numbers = [request.request for request in daemon.requests]
    assert len(set(numbers)) == len(numbers) == 40


async def test_follow_gives_every_event_of_its_own_chain_in_order(link, chain):
    async with link.client() as client:
        ids = [await client.submit(chain, follow=True) for _ in range(3)]
        for chain_id in reversed(ids):
            events = [event async for event in client.follow(chain_id)]
            assert {event.chain for event in events} == {chain_id}
            assert [event.kind for event in events[:3]] == ["started", "opened", "reading"]
            assert events[-1].kind == "ended"
            assert len(events) == 14


async def test_follow_attaches_to_a_chain_that_was_submitted_before(link, daemon, chain, until):
    daemon.hold = True
    async with link.client() as client:
        chain_id = await client.submit(chain)
        events = client.follow(chain_id)
        first = asyncio.ensure_future(anext(events))
        await until(lambda: any(isinstance(request, Attach) for request in daemon.requests))
        daemon.finish(chain_id)
        assert (await first).kind == "started"
        assert [event.kind async for event in events][-1] == "ended"


async def test_follow_of_an_ended_chain_has_no_events(link, chain):
    async with link.client() as client:
        chain_id = await client.submit(chain)
        assert [event async for event in client.follow(chain_id)] == []
        assert (await client.wait(chain_id)).state == "finished"


async def test_the_other_requests(link, daemon, chain):
    daemon.hold = True
    async with link.client() as client:
        chain_id = await client.submit(chain)
        assert (await client.status()).instance == "default"
        assert [summary.id for summary in await client.list()] == [chain_id]
        await client.reset_caches()
        await client.cancel(chain_id)
        assert (await client.attach(chain_id)).state == "cancelled"
        daemon.hold = False
        await client.drain("w0", deadline_s=3.0)
        await client.forget(chain_id)
        chain_id = await client.submit(chain)
        assert (await client.result(chain_id)).agents[0].prompt_ids is None
        assert (await client.result(chain_id, prompt_ids=True)).agents[0].prompt_ids == [1, 2, 0]
    kinds = [type(request) for request in daemon.requests]
    assert kinds == [
        Submit, GetStatus, ListChains, ResetCaches, Cancel, Attach, Drain, Forget, Submit, GetResult, GetResult
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["failed", "cancelled"])
async def test_run_raises_when_the_chain_does_not_finish(link, daemon, chain, state):
    daemon.edit = lambda submit, result: msgspec.structs.replace(result, state=state, error="worker w0 died")
    async with link.client() as client:
        with pytest.raises(ChainFailed, match="c0"):
            await client.run(chain)
        assert (await client.wait("c0")).state == state


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("cancelled", "the chain c0 was cancelled."),
        ("the daemon was stopped", "the chain c0 was cancelled: the daemon was stopped."),
    ],
)
async def test_a_cancelled_chain_says_why_if_there_is_more_to_say(link, daemon, chain, error, says):
    daemon.edit = lambda submit, result: msgspec.structs.replace(result, state="cancelled", error=error)
    async with link.client() as client:
        with pytest.raises(ChainFailed) as caught:
            await client.run(chain)
    assert str(caught.value) == says


async def test_a_request_larger_than_the_daemon_takes_is_not_sent(link, daemon, chain, monkeypatch):
    monkeypatch.setattr("pingpong_client.connection.MAX_CONTROL_BYTES", 1000)
    async with link.client() as client:
        with pytest.raises(DataError, match=r"the request is 1\d\d\d bytes long, the daemon takes 1000\."):
            await client.submit(chain, {"topic": "x" * 1000})
        assert daemon.requests == []
        assert (await client.run(chain)).state == "finished"


async def test_a_refusal_comes_back_as_the_daemons_error(link, daemon, chain):
    daemon.refuse[Submit] = Overloaded("all slots are taken.", hint="Try later.", field="agents")
    async with link.client() as client:
        with pytest.raises(Overloaded) as caught:
            await client.submit(chain)
        assert str(caught.value) == "agents: all slots are taken. Try later."
        with pytest.raises(ChainNotFound):
            await client.result("nope")
        with pytest.raises(ChainNotFound):
            await client.cancel("nope")
        with pytest.raises(ChainNotFound):
            async for _ in client.follow("nope"):
                pass


async def test_a_bad_chain_is_found_before_the_daemon_is_asked(link, daemon):
    async with link.client() as client:
        with pytest.raises(ChainError, match=r"agents\[0\]\.max_tokens"):
            await client.submit(Chain(name="bad", agents=[Agent(name="a", prompt="x", max_tokens=0)]))
        with pytest.raises(ChainError, match="names no agent"):
            await client.submit(Chain(name="bad", agents=[Agent(name="a", prompt="{{b}}")]))
        with pytest.raises(ChainError, match="no input"):
            await client.submit(Chain(name="bad", agents=[Agent(name="a", prompt="x")]), {"topic": "tides"})
    assert daemon.requests == []


async def test_a_daemon_that_does_not_answer_in_time(link, daemon):
    daemon.silent = {GetStatus}
    async with link.client(timeout_s=0.05) as client:
        with pytest.raises(DaemonUnavailable, match=r"/fake/control\.sock did not answer within 0.05 s"):
            await client.status()
        assert await client.list() == []  # one late answer does not end the connection


async def test_a_reply_that_comes_too_late_is_ignored(link, daemon):
    daemon.silent = {GetStatus}
    async with link.client(timeout_s=0.05) as client:
        with pytest.raises(DaemonUnavailable):
            await client.status()
        daemon.send(Done(request=daemon.requests[0].request))
        assert await client.list() == []


async def test_a_running_chain_has_no_time_limit_while_the_daemon_answers_pings(link, daemon, chain, until):
    daemon.hold = True
    async with link.client(timeout_s=5, ping_s=0.01) as client:
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: sum(isinstance(request, Attach) for request in daemon.requests) >= 5)
        assert not run.done()
        daemon.finish("c0")
        assert (await run).state == "finished"


async def test_a_submission_may_take_long_while_the_daemon_answers_pings(link, daemon, chain, until):
    daemon.silent = {Submit}
    async with link.client(timeout_s=0.2, ping_s=0.01) as client:
        submit = asyncio.ensure_future(client.submit(chain))
        await until(lambda: sum(isinstance(request, GetStatus) for request in daemon.requests) >= 40)
        assert not submit.done()
        submit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submit


async def test_a_daemon_that_falls_silent_under_a_running_chain(link, daemon, chain):
    daemon.hold = True
    daemon.silent = {Attach, GetStatus}
    async with link.client(timeout_s=0.05, ping_s=0.01, reconnect_s=0) as client:
        with pytest.raises(DaemonUnavailable, match="did not answer"):
            await asyncio.wait_for(client.run(chain), HANG_S)


async def test_a_lost_daemon_ends_everything_that_waits(link, daemon, chain, until):
    daemon.hold = True
    daemon.silent = {GetStatus}
    async with link.client(reconnect_s=0) as client:
        waiting = [asyncio.ensure_future(client.run(chain)), asyncio.ensure_future(client.status())]
        await until(lambda: len(daemon.requests) == 2)
        link.transports[0].lose()
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), HANG_S)
        assert [type(outcome) for outcome in outcomes] == [DaemonUnavailable, DaemonUnavailable]


async def test_the_call_after_a_loss_connects_anew(link, daemon, until):
    async with link.client() as client:
        await client.status()
        link.transports[0].lose()
        await until(lambda: client._link._connection.error is not None)
        assert (await client.status()).instance == "default"
    assert len(link.transports) == 2
    assert all(transport.closed for transport in link.transports)


async def test_the_end_of_a_chain_whose_events_were_dropped_is_still_seen(link, daemon, chain):
    daemon.drop_events = True
    async with link.client(ping_s=0.01) as client:
        result = await asyncio.wait_for(client.run(chain), HANG_S)
    assert result.state == "finished"


async def test_a_chain_that_was_forgotten_while_its_events_were_dropped(link, daemon, chain):
    daemon.drop_events = True
    async with link.client(ping_s=0.01) as client:
        chain_id = await client.submit(chain, follow=True)
        del daemon.results[chain_id]
        with pytest.raises(ChainNotFound):
            await asyncio.wait_for(client.wait(chain_id), HANG_S)
        assert (await client.status()).instance == "default"


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"hello", encode(Done(request=1))[:-1], b"\x80"])
async def test_garbage_from_the_daemon_is_one_sentence(link, daemon, frame, until):
    daemon.silent = {GetStatus}
    async with link.client() as client:
        status = asyncio.ensure_future(client.status())
        await until(lambda: daemon.requests)
        daemon.send_frame(frame)
        with pytest.raises(MessageError) as caught:
            await asyncio.wait_for(status, HANG_S)
        assert "\n" not in str(caught.value)


async def test_a_refusal_of_the_frame_itself_reaches_whoever_waits(link, daemon, chain, until):
    daemon.silent = {Submit}
    async with link.client() as client:
        submit = asyncio.ensure_future(client.submit(chain))
        await until(lambda: daemon.requests)
        daemon.send(ErrorReply(request=0, code="MessageError", message="The message is of protocol version 1."))
        with pytest.raises(MessageError, match="protocol version"):
            await asyncio.wait_for(submit, HANG_S)


async def test_a_reply_of_the_wrong_kind(link, daemon, until):
    daemon.silent = {GetStatus}
    async with link.client() as client:
        status = asyncio.ensure_future(client.status())
        await until(lambda: daemon.requests)
        daemon.send(Done(request=daemon.requests[0].request))
        with pytest.raises(MessageError, match="Done where StatusReply was due"):
            await asyncio.wait_for(status, HANG_S)


async def test_events_of_chains_that_nobody_follows_are_ignored(link, daemon, chain):
    daemon.hold = True
    async with link.client() as client:
        chain_id = await client.submit(chain)
        daemon.finish(chain_id)
        assert (await client.status()).instance == "default"


async def test_closing_ends_what_waits(link, daemon, chain, until):
    daemon.hold = True
    async with link.client() as client:
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: daemon.requests)
    with pytest.raises(DaemonUnavailable, match="was closed"):
        await asyncio.wait_for(run, HANG_S)


async def test_concurrent_first_calls_share_one_connection(link):
    client = link.client()
    await asyncio.gather(*(client.status() for _ in range(10)))
    await client.close()
    assert len(link.transports) == 1
