"""The real transport: a ROUTER, or something that is none, on the other end of a unix socket."""

import asyncio
import os
import socket

import msgspec
import pytest

from pingpong_bus.codec import encode
from pingpong_bus.errors import DaemonUnavailable, MessageError
from pingpong_bus.messages import PROTOCOL_VERSION, Attach, GetStatus, Submit
from pingpong_client import AsyncClient
from pingpong_client.transport import ZmqTransport

HANG_S = 20


async def test_a_chain_over_a_real_socket(serving, daemon, chain, tmp_path):
    async with serving(tmp_path / "control.sock"), AsyncClient(tmp_path) as client:
        result = await client.run(chain)
        assert [agent.name for agent in result.agents] == ["writer", "critic"]
        assert isinstance(daemon.requests[0], Submit)


async def test_a_large_result_arrives_whole(serving, daemon, chain, tmp_path):
    ids = list(range(200_000))

    def with_many_ids(submit, result):
        agents = [msgspec.structs.replace(agent, output_ids=ids) for agent in result.agents]
        return msgspec.structs.replace(result, agents=agents)

    daemon.edit = with_many_ids
    async with serving(tmp_path / "control.sock"), AsyncClient(tmp_path) as client:
        result = await client.run(chain)
    assert result.agents[1].output_ids == ids


async def test_no_daemon(tmp_path):
    path = tmp_path / "control.sock"
    with pytest.raises(DaemonUnavailable) as caught:
        async with AsyncClient(path):
            pass
    assert str(caught.value) == (
        f"no daemon answers at {path}. Start it with `pingpongd --config FILE`, or name its socket with --socket."
    )


async def test_a_socket_file_that_a_dead_daemon_left(tmp_path):
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(DaemonUnavailable, match="no daemon answers"):
        await asyncio.wait_for(AsyncClient(path).status(), HANG_S)


async def test_a_file_that_is_no_socket(tmp_path):
    path = tmp_path / "control.sock"
    path.write_text("hello")
    with pytest.raises(DaemonUnavailable, match="no daemon answers"):
        await asyncio.wait_for(AsyncClient(path).status(), HANG_S)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use any socket")
async def test_a_socket_of_somebody_else(serving, tmp_path):
    path = tmp_path / "control.sock"
    async with serving(path):
        path.chmod(0)
        with pytest.raises(DaemonUnavailable, match="may not be used by this user"):
            await AsyncClient(path).status()


async def test_a_stopped_daemon_does_not_even_shake_hands(tmp_path):
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        with pytest.raises(DaemonUnavailable, match=r"did not answer within 0\.2 s"):
            await asyncio.wait_for(AsyncClient(path, timeout_s=0.2).status(), HANG_S)


async def test_something_else_listens_there(tmp_path):
    path = tmp_path / "control.sock"

    async def serve(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        with pytest.raises((MessageError, DaemonUnavailable)) as caught:
            await asyncio.wait_for(AsyncClient(path, timeout_s=0.3).status(), HANG_S)
    assert str(path) in str(caught.value)


async def test_the_daemon_goes_away_under_a_running_chain(serving, daemon, chain, tmp_path, until):
    daemon.hold = True
    # Neither a ping nor a time limit can be what notices.
    patient = AsyncClient(tmp_path, ping_s=1000, timeout_s=1000, reconnect_s=0)
    async with serving(tmp_path / "control.sock") as router, patient as client:
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: daemon.requests)
        router.close(linger=0)
        with pytest.raises(DaemonUnavailable, match="went away"):
            await asyncio.wait_for(run, HANG_S)


async def test_what_the_daemon_sent_before_it_left_is_read_first(serving, daemon, tmp_path):
    path = tmp_path / "control.sock"
    async with serving(path) as router:
        transport = ZmqTransport(path)
        await transport.open()
        await transport.send(encode(GetStatus(request=1, version=PROTOCOL_VERSION)))
        first = await transport.receive()
        for _ in range(100):
            daemon.send_frame(first)
        router.close(linger=2000)
        for _ in range(100):
            assert await asyncio.wait_for(transport.receive(), HANG_S) == first
        with pytest.raises(DaemonUnavailable, match="went away"):
            await asyncio.wait_for(transport.receive(), HANG_S)
        await transport.close()


async def test_a_daemon_that_is_silent_but_alive_is_waited_for(serving, daemon, chain, tmp_path, until):
    daemon.hold = True
    async with serving(tmp_path / "control.sock"), AsyncClient(tmp_path, ping_s=0.02) as client:
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: sum(isinstance(request, Attach) for request in daemon.requests) >= 3)
        daemon.finish("c0")
        assert (await asyncio.wait_for(run, HANG_S)).state == "finished"


async def test_garbage_on_the_socket(serving, daemon, tmp_path, until):
    daemon.silent = {GetStatus}
    async with serving(tmp_path / "control.sock"), AsyncClient(tmp_path) as client:
        status = asyncio.ensure_future(client.status())
        await until(lambda: daemon.requests)
        daemon.send_frame(b"\xff\x00garbage")
        with pytest.raises(MessageError):
            await asyncio.wait_for(status, HANG_S)


@pytest.mark.parametrize("method", ["status", "submit"])
async def test_a_daemon_of_another_protocol_version(serving, chain, tmp_path, monkeypatch, method):
    monkeypatch.setattr("pingpong_client.client.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    async with serving(tmp_path / "control.sock"), AsyncClient(tmp_path) as client:
        with pytest.raises(MessageError, match="protocol version") as caught:
            await asyncio.wait_for(client.status() if method == "status" else client.submit(chain), HANG_S)
    assert "same release" in str(caught.value)


async def test_closing_twice_and_closing_unopened(serving, tmp_path):
    path = tmp_path / "control.sock"
    await ZmqTransport(path).close()
    async with serving(path):
        transport = ZmqTransport(path)
        await transport.open()
        await transport.close()
        await transport.close()


async def test_a_daemon_that_is_started_anew_on_the_same_socket(serving, daemon, chain, tmp_path, until):
    path = tmp_path / "control.sock"
    daemon.hold = True
    # Neither a ping nor a time limit can be what notices.
    client = AsyncClient(tmp_path, ping_s=1000, timeout_s=1000)
    async with serving(path):
        run = asyncio.ensure_future(client.run(chain))
        await until(lambda: "c0" in daemon.results)
        daemon.finish_agent("c0", 0)
    path.unlink(missing_ok=True)
    await until(lambda: client.away_s is not None)
    daemon.hold = False
    async with serving(path):
        assert (await asyncio.wait_for(run, HANG_S)).state == "finished"
        await client.close()
