"""The whole daemon with the simulated engine: chains, followers, refusals, ends."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest
import zmq
import zmq.asyncio

from daemon_process import DaemonProcess, StartDaemon, simulated_config, until
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import ChainError, ChainNotFound, Overloaded, UsageError
from pingpong_bus.messages import ChainResult, SubmitOptions

SERIAL = SubmitOptions(mode="serial")
PING_PONG = SubmitOptions(mode="ping-pong")


def chain(*agents: dict[str, Any], **more: Any) -> Chain:
    return parse_chain(json.dumps({"name": "test", "agents": list(agents), **more}).encode())


def ids_chain(agents: int = 5, prefix: int = 200, output: int = 24, salt: int = 0) -> Chain:
    """A chain given as ids: each agent reads a prefix of its own, the output before, and a suffix."""
    steps: list[dict[str, Any]] = []
    for index in range(agents):
        ids: list[Any] = [(salt * 31 + index * 101 + at * 7) % 3000 + 300 for at in range(prefix)]
        if index:
            ids += [f"{{{{a{index - 1}}}}}", 301 + index, 302, 303]
        steps.append({"name": f"a{index}", "prompt_ids": ids, "max_tokens": output, "ignore_eos": True})
    return chain(*steps)


def outputs(result: ChainResult) -> list[list[int]]:
    return [agent.output_ids for agent in result.agents]


async def test_read_ahead_gives_the_output_of_series(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    async with daemon.client() as client:
        serial = await client.run(ids_chain(), options=SERIAL)
        ahead = await client.run(ids_chain(), options=PING_PONG)
    assert serial.state == ahead.state == "finished"
    assert (serial.placement, ahead.placement) == ("serial", "ping-pong")
    assert outputs(ahead) == outputs(serial)
    assert all(len(ids) == 24 for ids in outputs(serial))
    assert [agent.prompt_digest for agent in ahead.agents] == [agent.prompt_digest for agent in serial.agents]
    assert {agent.worker for agent in serial.agents} == {"a"}
    assert [agent.worker for agent in ahead.agents] in (list("ababa"), list("babab"))
    for agent in ahead.agents[1:]:
        assert agent.appends[0].sent >= 192  # the prefix's whole cache blocks
        assert agent.ttft_ms is not None
        assert agent.first_token_ms is not None
        assert agent.opened_ms is not None
        assert agent.opened_ms < agent.first_token_ms
    for before, after in zip(ahead.agents, ahead.agents[1:], strict=False):
        assert before.first_token_ms is not None
        assert before.last_token_ms is not None
        assert after.opened_ms is not None
        assert before.first_token_ms < after.opened_ms < before.last_token_ms


async def test_the_last_agent_may_read_two(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    fan_in = chain(
        {"name": "x", "prompt": "first", "max_tokens": 20, "ignore_eos": True},
        {"name": "y", "prompt": "second", "max_tokens": 9, "ignore_eos": True},
        {"name": "z", "prompt": "read {{y}} and {{x}} and {{y}}", "max_tokens": 8, "ignore_eos": True},
    )
    async with daemon.client() as client:
        serial = await client.run(fan_in, options=SERIAL)
        for options in (PING_PONG, SubmitOptions(mode="ping-pong", session="streaming-input")):
            ahead = await client.run(fan_in, options=options)
            assert outputs(ahead) == outputs(serial)
        full = await client.result(ahead.id, prompt_ids=True)
    x, y, z = full.agents
    assert z.prompt_ids is not None
    spliced = ",".join(map(str, z.prompt_ids))
    assert spliced.count(",".join(map(str, y.output_ids))) >= 2
    assert ",".join(map(str, x.output_ids)) in spliced


async def test_an_immediate_chain_starts_every_agent_at_once(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(step_ms=5.0))
    eager = Chain(name="eager", agents=ids_chain(3).agents, start="immediate")
    async with daemon.client() as client:
        result = await client.run(eager, options=PING_PONG)
        serial = await client.run(eager, options=SERIAL)
    assert outputs(result) == outputs(serial)
    first, *_, last = result.agents
    assert last.opened_ms is not None
    assert first.first_token_ms is not None
    assert last.opened_ms < first.first_token_ms


async def test_many_chains_share_few_logs(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(slots=12))
    chains = [ids_chain(agents=3, prefix=40, output=10, salt=salt) for salt in range(20)]
    async with daemon.client() as client:
        alone = [outputs(await client.run(one, options=SERIAL)) for one in chains]
        together = await asyncio.gather(*(client.run(one, options=PING_PONG) for one in chains))
        status = await client.status()
    assert [outputs(result) for result in together] == alone
    assert status.slots_free == status.slots_total == 12


async def test_a_follower_gets_every_token_once(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(step_ms=5.0))
    async with daemon.client() as client:
        number = await client.submit(ids_chain(3), options=PING_PONG)
        seen: dict[str, list[int]] = {}
        kinds: list[str] = []
        async for event in client.follow(number):
            kinds.append(event.kind)
            if event.kind == "tokens":
                seen.setdefault(event.agent, []).extend(event.data["ids"])
        result = await client.result(number)
    assert kinds[-1] == "ended"
    assert result.state == "finished"
    late = {agent.name: agent.output_ids for agent in result.agents}
    for agent, ids in seen.items():
        assert ids == late[agent][-len(ids) :]


async def test_attach_shows_where_a_chain_stands_and_goes_on(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(step_ms=5.0))
    async with daemon.client() as first, daemon.client() as second:
        number = await first.submit(ids_chain(4, output=40), options=PING_PONG)
        while not (so_far := await second.attach(number)).agents[0].output_ids:
            await asyncio.sleep(0.01)
        result = await second.wait(number)
    assert so_far.state == "running"
    assert result.state == "finished"
    assert result.agents[0].output_ids[: len(so_far.agents[0].output_ids)] == so_far.agents[0].output_ids


async def test_cancel_frees_everything(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(step_ms=20.0))
    async with daemon.client() as client:
        number = await client.submit(ids_chain(output=500), options=PING_PONG)
        while (await client.result(number)).state != "running":
            await asyncio.sleep(0.01)
        await client.cancel(number)
        assert (await client.wait(number)).state == "cancelled"
        await client.cancel(number)  # harmless
        status = await client.status()
        assert status.slots_free == status.slots_total
        assert {worker.hops for worker in status.workers} == {0}
        assert (await client.run(ids_chain(2), options=PING_PONG)).state == "finished"


async def test_a_queued_chain_can_be_cancelled(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(step_ms=20.0, slots=5))
    async with daemon.client() as client:
        running = await client.submit(ids_chain(output=300), options=SERIAL)
        waiting = await client.submit(ids_chain(), options=SERIAL)
        assert (await client.result(waiting)).state == "queued"
        await client.cancel(waiting)
        assert (await client.result(waiting)).state == "cancelled"
        await client.cancel(running)


async def test_what_cannot_run_is_refused_and_nothing_changes(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    one = {"name": "a", "prompt": "hi", "max_tokens": 5000}
    async with daemon.client() as client:
        with pytest.raises(ChainError, match=r"agents\[0\]\.max_tokens.*5000.*4096"):
            await client.submit(chain(one))
        with pytest.raises(ChainError, match=r"agents\[0\]\.prompt_ids\[0\]: 999999 is no token"):
            await client.submit(chain({"name": "a", "prompt_ids": [999999]}))
        with pytest.raises(ChainError, match='no input "x"'):
            await client.submit(ids_chain(2), inputs={"x": "y"})
        with pytest.raises(ChainNotFound, match="nope"):
            await client.result("nope")
        status = await client.status()
        assert sum(status.chains.values()) == 0
        assert status.slots_free == status.slots_total


async def test_ping_pong_with_one_group_is_refused(start_daemon: StartDaemon) -> None:
    config = simulated_config().split("[[groups]]")
    daemon = await start_daemon("[[groups]]".join(config[:2]))
    async with daemon.client() as client:
        with pytest.raises(UsageError, match="two device groups"):
            await client.submit(ids_chain(2), options=PING_PONG)
        assert (await client.run(ids_chain(2))).placement == "serial"


async def test_auto_reads_ahead_cold_and_stays_in_series_warm(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    async with daemon.client() as client:
        assert (await client.run(ids_chain())).placement == "ping-pong"
        await client.run(ids_chain(), options=SERIAL)
        warm = await client.run(ids_chain())
        assert warm.placement == "serial"
        assert warm.agents[1].cached_tokens > 0
        await client.reset_caches()
        cold = await client.run(ids_chain())
        assert cold.placement == "ping-pong"
        assert all(agent.cached_tokens < agent.prompt_tokens for agent in cold.agents)


async def test_isolated_hops_find_nothing_in_the_cache(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    isolated = SubmitOptions(mode="serial", isolate=True)
    async with daemon.client() as client:
        await client.run(ids_chain(), options=SERIAL)
        result = await client.run(ids_chain(), options=isolated)
    assert [agent.cached_tokens for agent in result.agents] == [0] * 5


async def test_garbage_is_refused_and_others_are_served(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{daemon.socket}")
    for frames in ([b"\xc1"], [b""], [b"a", b"b"], [b"\x80"], [bytes(range(256))]):
        await socket.send_multipart(frames)
        assert await asyncio.wait_for(socket.recv(), 20)
    socket.close()
    context.term()
    async with daemon.client() as client:
        assert (await client.run(ids_chain(2))).state == "finished"


async def test_a_chain_outlives_its_worker(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(step_ms=10.0))
    async with daemon.client() as client:
        whole = await client.run(ids_chain(3, output=60), options=SERIAL)
        status = await client.status()
        number = await client.submit(ids_chain(3, output=60), options=SubmitOptions(group="a"))
        while len((await client.result(number)).agents[0].output_ids) < 5:
            await asyncio.sleep(0.01)
        kill(daemon, status.workers[0].pid)
        result = await client.wait(number)
        assert result.state == "finished"
        assert result.resumed
        assert outputs(result) == outputs(whole)
        (entry,) = result.agents[0].resumed
        assert entry.worker == "a"
        assert entry.tokens >= 5
        assert "signal 9" in entry.why
        status = await client.status()
        assert [(worker.state, worker.restarts) for worker in status.workers] == [("ready", 1), ("ready", 0)]
        assert status.slots_free == status.slots_total


async def test_a_chain_moves_to_the_other_group_when_its_own_is_lost(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(step_ms=10.0) + "[restart]\nbackoff_s = 60.0\n")
    async with daemon.client() as client:
        whole = await client.run(ids_chain(output=60), options=SERIAL)
        status = await client.status()
        number = await client.submit(ids_chain(output=60), options=PING_PONG)
        while not (result := await client.result(number)).agents[1].opened_ms:
            await asyncio.sleep(0.01)
        lost = result.agents[0].worker
        kill(daemon, next(worker.pid for worker in status.workers if worker.name == lost))
        result = await client.wait(number)
        assert result.state == "finished"
        assert outputs(result) == outputs(whole)
        assert {agent.worker for agent in result.agents} == {"a", "b"} - {lost}
        assert (await client.status()).state == "degraded"


def kill(daemon: DaemonProcess, pid: int | None) -> None:
    found = [child for child in daemon.children if child.pid == pid]
    assert found, f"{pid} is no process of the daemon's"
    found[0].kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_chains_finish(start_daemon: StartDaemon, number: signal.Signals) -> None:
    daemon = await start_daemon(simulated_config(step_ms=10.0))
    async with daemon.client() as client:
        running = asyncio.create_task(client.run(ids_chain(3, output=40), options=PING_PONG))
        await until(lambda: bool(daemon.log_events("chain_started")), "the chain's start")
        daemon.signal(number)
        await until(lambda: bool(daemon.log_events("daemon_draining")), "the draining")
        with pytest.raises(Overloaded, match="shutting down"):
            await client.submit(ids_chain(2))
        assert (await running).state == "finished"
    assert await daemon.ended() == 0
    await daemon.leaves_nothing()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_chain_outlives_the_daemon(start_daemon: StartDaemon, number: signal.Signals) -> None:
    daemon = await start_daemon(simulated_config(step_ms=10.0, drain=0.2))
    async with daemon.client() as client:
        whole = await client.run(ids_chain(3, output=60), options=SERIAL)
        chain = await client.submit(ids_chain(3, output=60), options=PING_PONG, follow=True)
        while (await client.result(chain)).agents[1].state != "writing":
            await asyncio.sleep(0.01)
        daemon.note_children()
        daemon.signal(number)
        assert await daemon.ended() == (0 if number is signal.SIGTERM else -signal.SIGKILL)
        await daemon.leaves_nothing()
        again = await start_daemon((daemon.folder / "config.toml").read_text(), wait=False)
        again.socket = daemon.socket
    again.signal(signal.SIGTERM)
    await again.ended()
    third = await start_daemon(
        (daemon.folder / "config.toml").read_text(), "--runtime-dir", str(daemon.folder / "run"), wait=False
    )
    third.socket = daemon.socket
    await third.ready()
    async with third.client() as client:
        result = await client.wait(chain)
    assert result.state == "finished"
    assert result.resumed
    assert outputs(result) == outputs(whole)
    assert result.agents[0].attempt == 1
    assert result.agents[2].attempt > 1


async def test_a_killed_daemon_leaves_no_process(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(step_ms=20.0))
    async with daemon.client() as client:
        await client.submit(ids_chain(output=500), options=PING_PONG)
    daemon.note_children()
    assert len(daemon.children) >= 4
    daemon.signal(signal.SIGKILL)
    await daemon.ended()
    await daemon.leaves_nothing()


async def test_a_daemon_starts_again_where_one_was_killed(start_daemon: StartDaemon) -> None:
    first = await start_daemon()
    first.signal(signal.SIGKILL)
    await first.ended()
    await first.leaves_nothing(sockets=False)
    again = await start_daemon(None, "--runtime-dir", str(first.folder / "run"), wait=False)
    again.socket = first.socket
    await again.ready()
    async with again.client() as client:
        assert (await client.run(ids_chain(2))).state == "finished"


async def test_a_signal_while_loading_stops_at_once(start_daemon: StartDaemon) -> None:
    config = simulated_config().replace("[simulated]", "[simulated]\nstart_ms = 60000.0")
    daemon = await start_daemon(config, wait=False)
    await until(lambda: len(daemon.log_events("worker_loading")) >= 2, "the loading")
    daemon.note_children()
    async with daemon.client() as client:
        assert (await client.status()).state == "starting"
        with pytest.raises(Overloaded, match="no engine serves yet"):
            await client.submit(ids_chain(2))
    daemon.signal(signal.SIGTERM)
    assert await daemon.ended() == 0
    await daemon.leaves_nothing()
