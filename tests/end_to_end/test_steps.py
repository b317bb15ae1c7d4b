"""Steps between agents in the whole daemon, with the simulated engine and real commands."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon_process import DaemonProcess, StartDaemon, simulated_config, until
from pingpong_bus.chain import Chain, Exactness, parse_chain
from pingpong_bus.errors import ChainError, ConfigError
from pingpong_bus.messages import AgentResult, ChainResult, SubmitOptions

SERIAL = SubmitOptions(mode="serial")
PING_PONG = SubmitOptions(mode="ping-pong")
STATIC = " ".join(f"rule {number}" for number in range(200))
WRITER = {"name": "writer", "prompt": "write", "max_tokens": 12, "ignore_eos": True}


def chain(*agents: dict[str, Any], **more: Any) -> Chain:
    return parse_chain(json.dumps({"name": "steps", "agents": list(agents), **more}).encode())


def reader(step: str = "step", name: str = "reader") -> dict[str, Any]:
    prompt = f"{STATIC}\n{{{{{step}}}}}\nanswer"
    return {"name": name, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}


def calls(**scripts: str) -> str:
    """The configuration with calls of shell scripts, which have no quotes in them."""
    lines = [f"[calls.{name}]\ncommand = ['sh', '-c', '''{script}''']\n" for name, script in scripts.items()]
    return simulated_config().replace("max_model_len = 4096", "max_model_len = 16384") + "".join(lines)


def by_name(result: ChainResult) -> dict[str, AgentResult]:
    return {agent.name: agent for agent in result.agents}


def waits_for(file: Path) -> str:
    return f"while [ ! -e {file} ]; do sleep 0.02; done"


async def test_extract_and_call_turn_an_output_into_what_the_next_one_reads(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(calls(shout="tr a-z A-Z"))
    steps = chain(
        WRITER,
        {"name": "packed", "input": '{"said": ["{{input.word}}", 1]} {{writer}}', "call": "shout", "max_chars": 500},
        {"name": "word", "input": "{{packed}}", "extract": {"json": "$.SAID[0]"}},
        {"name": "first", "input": "{{writer}}", "extract": {"regex": r"\S+"}},
        {"name": "block", "input": "```\n{{word}}\n```", "extract": {"fenced": ""}},
        reader("block"),
        inputs={"word": "hello"},
    )
    async with daemon.client() as client:
        serial = await client.run(steps, options=SERIAL)
        ahead = await client.run(steps, options=PING_PONG)
    assert serial.state == ahead.state == "finished", (serial.error, ahead.error)
    found = by_name(ahead)
    assert found["packed"].text == ('{"said": ["hello", 1]} ' + found["writer"].text).upper().removesuffix("\n")
    assert found["word"].text == found["block"].text == "HELLO"
    assert found["first"].text == found["writer"].text.split()[0]
    assert [agent.kind for agent in ahead.agents] == ["agent", "call", "extract", "extract", "extract", "agent"]
    assert found["word"].output_ids == []
    assert found["word"].output_tokens == 5
    assert found["word"].worker == ""
    assert found["word"].finish_reason == "stop"
    (hop,) = found["packed"].hops
    assert (hop.worker, hop.state, hop.tokens) == ("", "finished", len(found["packed"].text))
    assert [agent.text for agent in serial.agents] == [agent.text for agent in ahead.agents]
    assert found["reader"].output_ids == by_name(serial)["reader"].output_ids
    assert found["reader"].prompt_digest == by_name(serial)["reader"].prompt_digest


async def test_static_parts_are_read_ahead_while_the_step_runs(start_daemon: StartDaemon, folder: Path) -> None:
    go = folder / "go"
    daemon = await start_daemon(calls(hold=f"{waits_for(go)}; echo result"))
    held = chain(WRITER, {"name": "step", "input": "{{writer}}", "call": "hold"}, reader())
    kinds: list[tuple[str, str]] = []
    async with daemon.client() as client:
        number = await client.submit(held, options=PING_PONG)
        async for event in client.follow(number):
            kinds.append((event.kind, event.agent))
            if event.kind == "reading" and event.agent == "reader":
                assert ("agent_finished", "step") not in kinds
                go.touch()
        result = await client.result(number)
    assert result.state == "finished", result.error
    step, last = by_name(result)["step"], by_name(result)["reader"]
    assert step.text == "result"
    assert step.last_token_ms is not None
    assert last.appends[0].tokens >= 400
    assert last.appends[0].at_ms < step.last_token_ms
    assert last.cached_tokens >= 400
    assert kinds.index(("tokens", "step")) < kinds.index(("agent_finished", "step"))


@pytest.mark.parametrize(("held_at", "quick_at"), [("grid", "fast"), ("fast", "grid")])
async def test_a_chain_that_waits_for_a_call_holds_up_nobody(
    start_daemon: StartDaemon, folder: Path, held_at: Exactness, quick_at: Exactness
) -> None:
    go = folder / "go"
    daemon = await start_daemon(calls(hold=f"{waits_for(go)}; echo result"))
    held = chain(WRITER, {"name": "step", "input": "{{writer}}", "call": "hold"}, reader())
    async with daemon.client() as client:
        number = await client.submit(held, options=SubmitOptions(mode="ping-pong", exactness=held_at))
        async for event in client.follow(number):
            if event.kind == "reading" and event.agent == "reader":
                break
        group = by_name(await client.result(number))["reader"].worker
        quick = await client.run(chain(WRITER), options=SubmitOptions(group=group, exactness=quick_at))
        assert (quick.state, go.exists()) == ("finished", False)
        go.touch()
        result = await client.wait(number)
    assert result.state == "finished", result.error
    last = by_name(result)["reader"]
    assert [hop.state for hop in last.hops] == ["aborted", "finished"]
    assert last.cached_tokens >= 400, "what it had read ahead is in the prefix cache"


async def test_a_follower_gets_the_text_of_steps_once(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(calls(long="head -c 7000 /dev/zero | tr '\\0' x; head -c 500 /dev/zero | tr '\\0' y"))
    long = chain(WRITER, {"name": "step", "input": "{{writer}}", "call": "long"})
    async with daemon.client() as client:
        number = await client.submit(long, options=PING_PONG)
        seen, ends = "", []
        async for event in client.follow(number):
            if event.agent == "step" and event.kind == "tokens":
                assert event.data["ids"] == []
                seen += event.data["text"]
            if event.agent == "step" and event.kind == "agent_finished":
                ends.append(event.data)
        result = await client.result(number)
    assert seen == "x" * 7000 + "y" * 500 == by_name(result)["step"].text
    assert [end["characters"] for end in ends] == [7500]


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (
            {"call": "fail"},
            'step "step": call "fail": it ended with exit code 7; the end of its error output: "bad luck"',
        ),
        ({"call": "slow"}, 'step "step": call "slow": it took longer than 0.3 s'),
        ({"call": "cat", "max_chars": 5}, "max_chars is 5"),
        ({"extract": {"json": "$.x"}}, 'step "step": there is no JSON value in it'),
        ({"extract": {"regex": "(.*)*(.*)*(.*)*(.*)*(.*)*NO"}}, None),
    ],
)
async def test_a_step_that_fails_ends_the_chain_with_the_reason(
    start_daemon: StartDaemon, step: dict[str, Any], says: str | None
) -> None:
    config = calls(fail="echo bad luck >&2; exit 7", cat="cat", slow="sleep 300") + "timeout_s = 0.3\n"
    daemon = await start_daemon(config)
    async with daemon.client() as client:
        failing = chain(WRITER, {"name": "step", "input": "so {{writer}}", **step}, reader())
        result = await client.wait(await client.submit(failing))
        assert result.state == "failed"
        assert says is None or says in result.error
        assert by_name(result)["step"].state == "failed"
        status = await client.status()
        assert status.slots_free == status.slots_total
        assert (await client.run(chain(WRITER))).state == "finished"


async def test_calls_that_are_not_allowed_are_refused(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(calls(one="true", two="true"))
    async with daemon.client() as client:
        with pytest.raises(ChainError, match=r'no call "three".*one, two'):
            await client.submit(chain(WRITER, {"name": "s", "input": "{{writer}}", "call": "three"}))


async def test_a_reload_allows_another_call(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(calls(one="true"))
    steps = chain(WRITER, {"name": "s", "input": "{{writer}}", "call": "two"})
    file = daemon.folder / "config.toml"
    async with daemon.client() as client:
        with pytest.raises(ChainError):
            await client.submit(steps)
        before = file.read_text()
        file.write_text(before + "[calls.two]\ncommand = ['sh', '-c', 'echo two']\nenvironment = {A = '$NO_SUCH'}\n")
        daemon.signal(signal.SIGHUP)
        await until(lambda: bool(daemon.log_events("config_not_reloaded")), "the refusal of the reload")
        file.write_text(before + "[calls.two]\ncommand = ['sh', '-c', 'echo two']\n")
        daemon.signal(signal.SIGHUP)
        await until(lambda: bool(daemon.log_events("config_reloaded")), "the reload")
        assert by_name(await client.run(steps))["s"].text == "two"


async def test_a_chain_whose_call_a_reload_takes_away_waits_for_it(start_daemon: StartDaemon, folder: Path) -> None:
    go = folder / "go"
    daemon = await start_daemon(calls(hold=waits_for(go), two="echo two"))
    held = {"name": "held", "input": "{{writer}}", "call": "hold"}
    steps = chain(WRITER, held, {"name": "s", "input": "{{held}}", "call": "two"}, reader("s"))
    file = daemon.folder / "config.toml"
    before = file.read_text()
    async with daemon.client() as client:
        number = await client.submit(steps)
        file.write_text(before[: before.index("[calls.two]")])
        daemon.signal(signal.SIGHUP)
        await until(lambda: bool(daemon.log_events("config_reloaded")), "the reload")
        go.touch()
        async with asyncio.timeout(30):
            while not any('waits for the call "two"' in one.why for one in await client.list()):
                await asyncio.sleep(0.02)
        file.write_text(before)
        daemon.signal(signal.SIGHUP)
        assert by_name(await client.wait(number))["s"].text == "two"


async def test_expressions_that_take_for_ever_hold_up_their_like_alone(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(calls())
    evil = {"name": "s", "input": "a" * 60 + "b", "extract": {"regex": "(a+)+$"}}
    async with daemon.client() as client:
        running = [await client.submit(chain(WRITER, evil)) for _ in range(6)]
        for extract in ({"json": "$.a"}, {"regex": "[0-9]"}):
            step = {"name": "s", "input": '{"a": 1}', "extract": extract}
            assert by_name(await client.run(chain(WRITER, step)))["s"].text == "1"
        states = [one for one in await client.list() if one.id in running]
        assert [one.state for one in states].count("running") >= 4  # two at a time are given up, after 5 s
        assert any("waits for its turn behind other extract steps" in one.why for one in states)
        for number in running:
            await client.cancel(number)


async def test_a_call_that_names_a_variable_that_is_not_there_keeps_the_daemon_from_starting(
    start_daemon: StartDaemon,
) -> None:
    config = calls(one="true") + "environment = {A = '$NO_SUCH_VARIABLE'}\n"
    daemon = await start_daemon(config, wait=False)
    assert await daemon.ended() == ConfigError.exit_code
    assert "calls.one.environment.A" in daemon.log.read_text()


async def test_a_cancelled_chain_ends_its_command(start_daemon: StartDaemon, folder: Path) -> None:
    began = folder / "began"
    daemon = await start_daemon(calls(hold=f"touch {began}; sleep 300 & wait"))
    async with daemon.client() as client:
        number = await client.submit(chain(WRITER, {"name": "step", "input": "{{writer}}", "call": "hold"}, reader()))
        await until(began.exists, "the beginning of the call")
        commands = _commands_of(daemon, str(began))
        assert commands
        await client.cancel(number)
        result = await client.wait(number)
        assert result.state == "cancelled"
        assert by_name(result)["step"].state == "cancelled"
        await until(lambda: not any(map(_runs, commands)), "the end of the command")
        status = await client.status()
        assert status.slots_free == status.slots_total


async def test_a_deadline_ends_the_command(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(calls(hold="sleep 300"))
    steps = chain(WRITER, {"name": "step", "input": "{{writer}}", "call": "hold"})
    async with daemon.client() as client:
        result = await client.wait(await client.submit(steps, options=SubmitOptions(deadline_s=1.5)))
    assert result.state == "failed"
    assert "deadline" in result.error


async def test_a_drain_lets_a_step_finish(start_daemon: StartDaemon, folder: Path) -> None:
    began, go = folder / "began", folder / "go"
    daemon = await start_daemon(calls(hold=f"touch {began}; {waits_for(go)}; echo done"))
    async with daemon.client() as client:
        number = await client.submit(chain(WRITER, {"name": "step", "input": "{{writer}}", "call": "hold"}, reader()))
        await until(began.exists, "the beginning of the call")
        daemon.note_children()
        daemon.signal(signal.SIGTERM)
        await until(lambda: bool(daemon.log_events("daemon_draining")), "the drain")
        go.touch()
        result = await client.wait(number)
    assert result.state == "finished"
    assert await daemon.ended() == 0
    await daemon.leaves_nothing()


async def test_a_call_under_way_at_a_kill_is_made_again_and_one_that_was_through_is_not(
    start_daemon: StartDaemon, folder: Path
) -> None:
    first, second, go = folder / "first", folder / "second", folder / "go"
    script = "echo x >> {file}; wc -l < {file}"
    config = calls(first=script.format(file=first), second=script.format(file=second) + f"; {waits_for(go)}; echo end")
    config = f'state_dir = "{folder / "state"}"\n{config}'
    daemon = await start_daemon(config)
    steps = chain(
        WRITER,
        {"name": "one", "input": "{{writer}}", "call": "first"},
        {"name": "two", "input": "{{one}}", "call": "second"},
        reader("two"),
    )
    async with daemon.client() as client:
        number = await client.submit(steps, options=PING_PONG)
        await until(second.exists, "the second call")
        daemon.note_children()
        commands = _commands_of(daemon, str(second))
        assert commands
        daemon.signal(signal.SIGKILL)
    await daemon.ended()
    await until(lambda: not any(map(_runs, commands)), "the end of the command", 10)
    await daemon.leaves_nothing(sockets=False)
    go.touch()
    again = await start_daemon(config)
    async with again.client() as client:
        result = await client.wait(number)
    assert result.state == "finished", result.error
    found = by_name(result)
    assert first.read_text() == "x\n"
    assert second.read_text() == "x\nx\n"
    assert found["one"].text.strip() == "1"
    assert found["two"].text.split() == ["2", "end"]
    assert found["one"].resumed == []
    (entry,) = found["two"].resumed
    assert "may have been running" in entry.why
    assert [line["agent"] for line in again.log_events("call_repeated")] == ["two"]


def _commands_of(daemon: DaemonProcess, mark: str) -> list[psutil.Process]:
    """The daemon's descendants that run a script which names `mark`, and their children."""
    found = []
    for process in psutil.Process(daemon.process.pid).children(recursive=True):
        try:
            if any(mark in word for word in process.cmdline()):
                found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_many_chains_with_steps_run_beside_each_other(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(calls(cat="cat"))
    steps = chain(
        WRITER,
        {"name": "step", "input": "{{input.n}} {{writer}}", "call": "cat"},
        {"name": "number", "input": "{{step}}", "extract": {"regex": r"^\d+"}},
        reader("number"),
        inputs={"n": None},
    )
    async with daemon.client() as client:
        results = await asyncio.gather(*(client.run(steps, inputs={"n": str(at)}) for at in range(20)))
    assert [result.state for result in results] == ["finished"] * 20
    assert [by_name(result)["number"].text for result in results] == [str(at) for at in range(20)]
