"""The control socket: requests and their answers, followers, strangers, garbage, clients that ask or hold too much."""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import structlog
import zmq

from control_desk import CHAIN, Desk, open_desk, submit, until
from pingpong_bus import codec
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attach,
    Cancel,
    ChainEvent,
    ChainList,
    Done,
    Drain,
    ErrorReply,
    Explain,
    Explained,
    Forget,
    GetResult,
    GetStatus,
    ListChains,
    ResetCaches,
    ResultReply,
    Score,
    Scored,
    Seen,
    Snapshot,
    StatusReply,
)
from pingpongd.client_ledger import ClientLimits
from pingpongd.log_limits import EventLimits
from pingpongd.peers import Doorkeeper

V = PROTOCOL_VERSION


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pp-") as path:
        Path(path).chmod(0o755)  # what is closed to others is the runtime directory inside
        yield Path(path)


def status(number: int) -> GetStatus:
    return GetStatus(request=number, version=V)


def tokens(chain: str, first_index: int) -> ChainEvent:
    return ChainEvent(chain=chain, kind="tokens", at_ms=1.0, agent="a", data={"ids": [7], "first_index": first_index})


async def test_every_request_has_its_answer(folder: Path) -> None:
    async with open_desk(folder) as desk:
        client = desk.client()
        assert await client.ask(submit) == Accepted(request=1, chain="chain-0")
        assert isinstance(await client.ask(lambda n: ListChains(request=n, version=V)), ChainList)
        assert isinstance(await client.ask(status), StatusReply)
        result = await client.ask(lambda n: GetResult(request=n, version=V, chain="chain-0", prompt_ids=True))
        assert isinstance(result, ResultReply)
        scored = await client.ask(lambda n: Score(request=n, version=V, ids=[5, 6], tokens=[1, 9], grid=4))
        assert scored == Scored(request=5, logprobs=[-1.0, None])
        for build in (
            lambda n: Cancel(request=n, version=V, chain="chain-0"),
            lambda n: Forget(request=n, version=V, chain="chain-0"),
            lambda n: ResetCaches(request=n, version=V),
            lambda n: Drain(request=n, version=V, group="g", deadline_s=2.0),
        ):
            assert isinstance(await client.ask(build), Done)
        assert desk.chains.calls == [
            "start_waiting",
            "result chain-0 True",
            "score [5, 6] [1, 9] 4",
            "cancel chain-0",
            "forget chain-0",
            "reset_caches",
        ]
        assert desk.drained == [("g", 2.0)]
        missing = await client.ask(lambda n: Forget(request=n, version=V, chain="chain-0"))
        assert isinstance(missing, ErrorReply)
        assert missing.code == "ChainNotFound"
        assert desk.control.refused_frames == 0


async def test_a_follower_gets_each_event_once_and_after_the_answer(folder: Path) -> None:
    async with open_desk(folder) as desk:
        client, other = desk.client(), desk.client()
        accepted = await client.ask(lambda n: submit(n, follow=True))
        assert isinstance(accepted, Accepted)
        desk.control.publish(tokens(accepted.chain, 0))
        snapshot = await other.ask(lambda n: Attach(request=n, version=V, chain=accepted.chain))
        assert isinstance(snapshot, Snapshot)
        again = await other.ask(lambda n: Attach(request=n, version=V, chain=accepted.chain))
        assert isinstance(again, Snapshot)
        desk.control.publish(tokens(accepted.chain, 1))
        desk.control.publish(desk.chains.end(accepted.chain))
        desk.control.publish(tokens(accepted.chain, 2))  # nobody follows any more
        assert [await client.receive() for _ in range(2)] == [tokens(accepted.chain, at) for at in (0, 1)]
        assert await other.receive() == tokens(accepted.chain, 1)
        for one in (client, other):
            last = await one.receive()
            assert isinstance(last, ChainEvent)
            assert last.kind == "ended"
        assert isinstance(await client.ask(status), StatusReply)


async def test_a_known_key_attaches_and_an_ended_one_ends_at_once(folder: Path) -> None:
    async with open_desk(folder) as desk:
        first, second = desk.client(), desk.client()
        one = await first.ask(lambda n: submit(n, follow=True, key="k"))
        two = await second.ask(lambda n: submit(n, follow=True, key="k"))
        assert isinstance(one, Accepted)
        assert isinstance(two, Accepted)
        assert one.chain == two.chain
        desk.control.publish(tokens(one.chain, 0))
        assert await first.receive() == await second.receive() == tokens(one.chain, 0)
        desk.chains.end(one.chain)
        late = desk.client()
        assert isinstance(await late.ask(lambda n: submit(n, follow=True, key="k")), Accepted)
        last = await late.receive()
        assert last == ChainEvent(chain=one.chain, kind="ended", at_ms=7.0, data={"state": "finished", "error": ""})


@pytest.mark.parametrize(
    "frames",
    {
        "garbage": [b"\xc1\xff"],
        "empty": [b""],
        "two frames": [codec.encode(status(1)), b"more"],
        "no such message": [msgspec.msgpack.encode({"type": "Explode", "request": 5})],
        "a wrong field": [msgspec.msgpack.encode({"type": "Cancel", "request": 5, "version": V, "chain": 5})],
        "another version": [codec.encode(GetStatus(request=5, version=V + 1))],
        "a long value": [msgspec.msgpack.encode({"type": "x" * 100_000, "request": 5})],
    }.items(),
    ids=lambda pair: pair[0],
)
async def test_garbage_is_counted_and_answered(folder: Path, frames: tuple[str, list[bytes]]) -> None:
    async with open_desk(folder) as desk:
        client = desk.client()
        await client.socket.send_multipart(frames[1])
        reply = await client.receive()
        assert isinstance(reply, ErrorReply)
        assert reply.code == "MessageError"
        assert reply.request == (5 if len(frames[1]) == 1 and len(frames[1][0]) > 10 else 0)
        assert len(reply.message) < 1000
        assert desk.control.refused_frames == 1
        assert isinstance(await client.ask(status), StatusReply)


async def test_garbage_is_logged_at_a_limited_rate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    structlog.configure(processors=[EventLimits(), structlog.processors.JSONRenderer()])
    try:
        async with open_desk(folder) as desk:
            client = desk.client()
            for _ in range(500):
                await client.socket.send(b"\xc1")
            await until(lambda: desk.control.refused_frames == 500, "500 refused frames")
    finally:
        structlog.reset_defaults()
    assert 1 <= capsys.readouterr().out.count("frame_refused") <= 5


class _Closed(Doorkeeper):
    """Lets nobody in, so that a test run by root has strangers too."""

    def allowed(self, uid: int, gid: int) -> bool:
        return False


async def test_a_stranger_is_told_once_and_then_cut_off(folder: Path) -> None:
    async with open_desk(folder, doorkeeper=_Closed()) as desk:
        stranger = desk.client()
        await stranger.send(status(1))
        reply = await stranger.receive()
        assert isinstance(reply, ErrorReply)
        assert reply.code == "UsageError"
        assert "may not use this daemon" in reply.message
        stranger.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = stranger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await stranger.send(status(2))
        async with asyncio.timeout(60):
            await monitor.recv_multipart()
        stranger.socket.disable_monitor()
        monitor.close()
        assert desk.control.refused_frames == 2
        assert desk.control.clients == 0


async def test_submissions_of_one_client_do_not_hold_up_anything_else(folder: Path) -> None:
    async with open_desk(folder) as desk:
        greedy, modest = desk.client(), desk.client()
        desk.chains.tokenizing.clear()
        for number in range(100, 200):
            await greedy.send(submit(number))
        await until(lambda: desk.chains.under_way == 32, "32 of a client's submissions under way")
        assert isinstance(await greedy.ask(status), StatusReply)
        await modest.send(submit(1))
        await until(lambda: desk.chains.under_way == 33, "another client's submission beside them")
        desk.chains.tokenizing.set()
        assert isinstance(await modest.receive(), Accepted)
        assert sorted(message.request for message in [await greedy.receive() for _ in range(100)]) == [  # type: ignore[union-attr]
            *range(100, 200)
        ]
        assert desk.chains.most_under_way == 33


@pytest.mark.parametrize("text", ["x", "x" * 5000], ids=["small", "large"])
async def test_too_many_requests_are_answered_at_once(folder: Path, text: str) -> None:
    async with open_desk(folder, limits=ClientLimits(requests=5)) as desk:
        client, other = desk.client(), desk.client()
        desk.chains.tokenizing.clear()
        for number in range(1, 9):
            await client.send(submit(number, text=text))
        refused = [await client.receive() for _ in range(3)]
        for number, reply in zip((6, 7, 8), refused, strict=True):
            assert isinstance(reply, ErrorReply)
            assert (reply.request, reply.code) == (number, "Overloaded")
        assert isinstance(await other.ask(status), StatusReply)
        desk.chains.tokenizing.set()
        assert {type(await client.receive()) for _ in range(5)} == {Accepted}
        assert isinstance(await client.ask(status), StatusReply)


async def test_more_clients_than_fit_are_answered_and_make_room_when_they_go(folder: Path) -> None:
    async with open_desk(folder, limits=ClientLimits(clients=2)) as desk:
        first, second, third = desk.client(), desk.client(), desk.client()
        for client in (first, second):
            assert isinstance(await client.ask(status), StatusReply)
        reply = await third.ask(status)
        assert isinstance(reply, ErrorReply)
        assert reply.code == "Overloaded"
        first.close()
        await until(lambda: desk.control.clients == 1, "the first client's account is closed")
        assert isinstance(await third.ask(status), StatusReply)


async def test_what_a_client_sent_before_it_left_is_done_and_nothing_is_kept_of_it(folder: Path) -> None:
    async with open_desk(folder) as desk:
        desk.chains.tokenizing.clear()
        for _ in range(5):
            client = desk.client()
            client.socket.setsockopt(zmq.LINGER, 5000)
            await client.send(submit(1, follow=True))
            client.close()
        await until(lambda: desk.chains.under_way == 5, "five submissions under way")
        desk.chains.tokenizing.set()
        await until(lambda: len(desk.chains.results) == 5, "five chains")
        await until(lambda: desk.control.clients == 0, "no account left")
        for chain in desk.chains.results:
            desk.control.publish(tokens(chain, 0))


async def test_scores_of_one_client_are_asked_one_at_a_time_and_not_once_it_has_gone(folder: Path) -> None:
    async with open_desk(folder) as desk:
        desk.chains.tokenizing.clear()
        client, other = desk.client(), desk.client()
        for number in range(1, 4):
            await client.send(Score(request=number, version=V, ids=[number], tokens=[1]))
        await other.send(Score(request=1, version=V, ids=[9], tokens=[1]))
        await until(lambda: len(desk.chains.calls) == 2, "a client holds up another one")
        assert sorted(desk.chains.calls) == ["score [1] [1] None", "score [9] [1] None"]
        client.close()
        await until(lambda: desk.control.clients == 1, "a client that has gone has an account")
        desk.chains.tokenizing.set()
        assert await other.receive() == Scored(request=1, logprobs=[-1.0])
        assert isinstance(await other.ask(status), StatusReply)
        assert len(desk.chains.calls) == 2, "an engine was asked for a client that has gone"


async def test_what_a_client_has_explained_is_bounded_and_ends_when_it_goes(folder: Path) -> None:
    async with open_desk(folder) as desk:
        desk.chains.tokenizing.clear()
        client, other = desk.client(), desk.client()
        for number in range(1, 41):
            await client.send(Explain(request=number, version=V, chain=CHAIN))
        await other.send(Explain(request=1, version=V, chain=CHAIN))
        await until(lambda: len(desk.chains.calls) == 33, "32 of one client and one of another")
        client.close()
        await until(lambda: desk.control.clients == 1, "a client that has gone has an account")
        desk.chains.tokenizing.set()
        assert isinstance(await other.receive(), Explained)
        assert isinstance(await other.ask(status), StatusReply)
        assert desk.chains.calls == ["explain"] * 33, "a chain was explained to a client that has gone"


async def test_a_client_that_does_not_read_is_sent_so_much_and_no_more(folder: Path) -> None:
    limits = ClientLimits(unread_messages=10, refusals=3)
    async with open_desk(folder, limits=limits) as desk:
        client, reader = desk.client(), desk.client()
        chain = await _followed(desk, client, reader)
        for at in range(20):
            desk.control.publish(tokens(chain, at))
        await client.send(status(99))
        got = [await client.receive() for _ in range(10)]  # with the Accepted: ten messages, and a refusal
        assert got == [*(tokens(chain, at) for at in range(9)), got[9]]
        assert isinstance(got[9], ErrorReply)
        assert (got[9].request, got[9].code) == (99, "Overloaded")
        await client.send(Seen(messages=11))
        snapshot = await client.ask(lambda n: Attach(request=n, version=V, chain=chain))
        assert isinstance(snapshot, Snapshot)
        desk.control.publish(tokens(chain, 20))
        assert await client.receive() == tokens(chain, 20)


async def _followed(desk: Desk, *clients: object) -> str:
    """A chain that the first client follows."""
    client = desk.clients[0]
    accepted = await client.ask(lambda n: submit(n, follow=True))
    assert isinstance(accepted, Accepted)
    return accepted.chain


async def test_answers_that_would_fill_memory_are_replaced_by_small_ones(folder: Path) -> None:
    limits = ClientLimits(unread_bytes=1_000_000)
    async with open_desk(folder, limits=limits) as desk:
        desk.chains.error = "e" * 900_000
        client = desk.client()
        chain = await _followed(desk)
        for number in range(100, 110):
            await client.send(GetResult(request=number, version=V, chain=chain))
        replies = [await client.receive() for _ in range(10)]
        assert sum(isinstance(reply, ResultReply) for reply in replies) == 1
        assert all(reply.code == "Overloaded" for reply in replies if isinstance(reply, ErrorReply))
        await client.send(Seen(messages=11))
        assert isinstance(await client.ask(lambda n: GetResult(request=n, version=V, chain=chain)), ResultReply)


async def test_an_answer_longer_than_a_message_is_a_clear_refusal(folder: Path) -> None:
    async with open_desk(folder) as desk:
        desk.chains.error = "e" * (codec.MAX_CONTROL_BYTES + 1)
        client = desk.client()
        chain = await _followed(desk)
        reply = await client.ask(lambda n: GetResult(request=n, version=V, chain=chain))
        assert isinstance(reply, ErrorReply)
        assert reply.code == "DataError"


async def test_bytes_that_are_no_zeromq_hurt_nobody_and_leak_no_descriptors(folder: Path) -> None:
    async with open_desk(folder) as desk:
        client = desk.client()
        assert isinstance(await client.ask(status), StatusReply)
        before = psutil.Process().num_fds()
        greeting = b"\xff" + b"\x00" * 8 + b"\x7f"
        raw = [
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00" * 300,
            greeting,
            greeting + b"\x03garbage" * 40,
            greeting + b"\x03\x01NULL" + b"\x00" * 49 + b"\x04\xff" + b"\x7f" * 300,
            greeting + b"\x03\x00NULL" + b"\x00" * 48 + b"\x06" + b"\xff" * 8 + b"x" * 100,
        ]
        for data in raw * 20:
            with socket.socket(socket.AF_UNIX) as stream:
                stream.connect(str(desk.path))
                stream.sendall(data)
            await asyncio.sleep(0)
        assert isinstance(await client.ask(status), StatusReply)
        await until(lambda: psutil.Process().num_fds() <= before, "no descriptor is left of them")
        assert desk.control.clients == 1
        assert desk.control.refused_frames > 0


async def test_connections_without_end_are_cut_off_before_descriptors_run_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pingpongd.connections.MAX_CONNECTIONS", 40)
    async with open_desk(folder) as desk:
        client = desk.client()
        assert isinstance(await client.ask(status), StatusReply)
        before = psutil.Process().num_fds()
        streams = [socket.socket(socket.AF_UNIX) for _ in range(100)]
        try:
            for stream in streams:
                stream.connect(str(desk.path))
            await until(lambda: psutil.Process().num_fds() <= before + 100 + 20, "the surplus was cut off")
            assert isinstance(await client.ask(status), StatusReply)
            assert desk.control.refused_frames >= 80
        finally:
            for stream in streams:
                stream.close()
        assert isinstance(await desk.client().ask(status), StatusReply)


_ASK = """
import os, sys, zmq
from pingpong_bus import codec
from pingpong_bus.messages import PROTOCOL_VERSION, GetStatus
os.setgroups([])
os.setgid(int(sys.argv[3]))
os.setuid(54321)
with zmq.Context() as context, context.socket(zmq.DEALER) as client:
    client.setsockopt(zmq.LINGER, 0)
    client.connect("ipc://" + sys.argv[1])
    client.send(codec.encode(GetStatus(request=1, version=PROTOCOL_VERSION)))
    heard = client.poll(int(sys.argv[2]))
    print(type(codec.decode_daemon_message(client.recv())).__name__ if heard else "nothing")
"""


async def test_members_of_the_client_group_come_in_and_other_users_do_not(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, os.getegid()))

    async def ask(gid: int, wait_ms: int) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _ASK, str(desk.path), str(wait_ms), str(gid)), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        return output.decode().strip()

    async with open_desk(folder, client_group=group.gr_name) as desk:
        assert await ask(group.gr_gid, 60_000) == "StatusReply"
        assert await ask(54_321, 1000) == "nothing"
        assert desk.control.refused_frames == 0  # they do not come as far as the socket
        desk.path.parent.chmod(0o755)
        desk.path.chmod(0o666)  # as if somebody had opened it
        assert await ask(54_321, 60_000) == "ErrorReply"
        assert desk.control.refused_frames == 1
