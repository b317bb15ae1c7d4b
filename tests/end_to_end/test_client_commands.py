"""The commands against a real daemon with the simulated engine."""

from __future__ import annotations

import asyncio
import json
import platform
import signal
import sys
from pathlib import Path

import pytest

from daemon_process import HANG_SECONDS, DaemonProcess, StartDaemon, simulated_config

ONE_GROUP = simulated_config().rpartition("[[groups]]")[0]


@pytest.fixture
def chain_file(folder: Path) -> Path:
    agents: list[dict[str, object]] = [{"name": "a0", "prompt_ids": list(range(300)), "max_tokens": 40}]
    for at in range(1, 4):
        prompt = [*range(at * 50, at * 50 + 300), f"{{{{a{at - 1}}}}}", 5]
        agents.append({"name": f"a{at}", "prompt_ids": prompt, "max_tokens": 40})
    path = folder / "chain.json"
    path.write_text(json.dumps({"name": "four", "agents": agents}))
    return path


async def start(daemon: DaemonProcess, *words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "pingpong_client", "--socket", str(daemon.socket), *words]
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


async def finish(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), HANG_SECONDS)
    return process.returncode, out.decode(), err.decode()


async def command(daemon: DaemonProcess, *words: str) -> tuple[int | None, str, str]:
    return await finish(await start(daemon, *words))


async def test_every_command(start_daemon: StartDaemon, chain_file: Path) -> None:
    daemon = await start_daemon()
    code, out, err = await command(daemon, "submit", str(chain_file), "--json", "--mode", "ping-pong")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["state"], result["placement"]) == ("finished", "ping-pong")
    assert all(agent["text"] and agent["appends"] for agent in result["agents"][1:])

    code, out, _ = await command(daemon, "submit", str(chain_file))
    assert code == 0
    for agent in result["agents"]:
        assert f"== {agent['name']} ==" in out
    assert out.splitlines()[-1].split(",")[0].endswith(": finished")

    code, out, _ = await command(daemon, "result", result["id"], "--json")
    assert (code, json.loads(out)) == (0, result)
    code, out, _ = await command(daemon, "attach", result["id"])
    assert code == 0
    code, out, _ = await command(daemon, "list")
    assert out.count("finished") == 2
    code, out, _ = await command(daemon, "status", "--json")
    assert json.loads(out)["chains"]["finished"] == 2
    code, out, err = await command(daemon, "cancel", "nope")
    assert (code, out) == (1, "")


async def test_engines_are_measured_and_a_chain_is_explained_and_then_does_what_was_said(
    start_daemon: StartDaemon, chain_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where figures are kept
    daemon = await start_daemon(simulated_config().replace("calibrate = false", "calibrate = true"))
    code, out, err = await command(daemon, "submit", str(chain_file), "--explain", "--json")
    assert (code, err) == (0, "")
    explained = json.loads(out)
    assert {each["placement"] for each in explained["predictions"]} == {"serial", "ping-pong", "overlap"}
    assert explained["chosen"] in explained["predictions"]
    _, out, _ = await command(daemon, "list")
    assert out == "no chains\n"  # it was not run
    code, out, _ = await command(daemon, "submit", str(chain_file), "--json")
    result = json.loads(out)
    assert result["placement"] == explained["placement"]
    assert result["predicted_ms"] == explained["chosen"]["e2e_ms"]
    code, out, _ = await command(daemon, "result", result["id"])
    assert out.splitlines()[-2].startswith("predicted ")
    _, out, _ = await command(daemon, "status")
    assert out.count(" tokens/s, jitter ") == 2


async def test_detached_then_attached(start_daemon: StartDaemon, chain_file: Path) -> None:
    daemon = await start_daemon()
    _, out, _ = await command(daemon, "submit", str(chain_file), "--detach")
    code, out, err = await command(daemon, "attach", out.strip(), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["state"] == "finished"


async def test_verify_certifies_that_both_modes_agree(
    start_daemon: StartDaemon, chain_file: Path, tmp_path: Path
) -> None:
    daemon = await start_daemon()
    kept = tmp_path / "certificate.json"
    code, out, err = await command(daemon, "verify", str(chain_file), "--runs", "2", "--json", "-o", str(kept))
    assert (code, err) == (0, "")
    certificate = json.loads(out)
    assert certificate == json.loads(kept.read_text())
    assert (certificate["verdict"], certificate["equal_pairs"]) == ("equal", 2)
    assert all(agent["output_tokens"] for run in certificate["runs"] for agent in run["agents"])
    assert (certificate["exactness"], certificate["proof"], certificate["no_proof"]) == ("grid", True, [])
    assert certificate["grid"] > 0
    assert certificate["python"] == platform.python_version()
    code, out, _ = await command(daemon, "list", "--json")
    assert [(chain["placement"], chain["exactness"]) for chain in json.loads(out)] == [
        ("serial", "grid"),
        ("ping-pong", "grid"),
    ] * 2

    code, out, err = await command(daemon, "verify", str(chain_file), "--against", str(kept), "--runs", "1")
    assert (code, err) == (0, "")
    assert ": tokens equal, 0 changes in all" in out
    kept.write_text(kept.read_text().replace(certificate["runs"][0]["agents"][2]["output_digest"], "0" * 64))
    code, out, err = await command(daemon, "verify", str(chain_file), "--against", str(kept), "--runs", "1")
    assert code == 3
    assert "run 1, agent a2, output digest: 000000000000 then, " in err
    code, out, err = await command(daemon, "verify", str(chain_file), "--mode", "overlap", "--exactness", "grid")
    assert (code, out) == (2, "")
    assert 'exactness: exactness "grid" cannot be kept: ' in err


async def test_the_daemon_scores_tokens(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    async with daemon.client() as client:
        once = await client.score(list(range(300)), [5, 6])
        again = await client.score(list(range(300)), [6, 5])
    assert once == again[::-1]


async def test_verify_on_one_group_is_refused(start_daemon: StartDaemon, chain_file: Path) -> None:
    daemon = await start_daemon(ONE_GROUP)
    for words, says in (([], "agents that overlap share a device"), (["--mode", "ping-pong"], "a second device group")):
        code, out, err = await command(daemon, "verify", str(chain_file), *words)
        assert (code, out) == (2, "")
        assert says in err
        assert err.count("\n") == 1
    code, out, _ = await command(daemon, "verify", str(chain_file), "--exactness", "fast", "--json")
    certificate = json.loads(out)
    assert (code, certificate["mode"], certificate["proof"]) == (0, "overlap", False)


async def test_many_from_one_file(start_daemon: StartDaemon, chain_file: Path) -> None:
    daemon = await start_daemon()
    lines = chain_file.parent / "many.jsonl"
    lines.write_text("".join(json.dumps({"path": chain_file.name}) + "\n" for _ in range(6)))
    code, out, err = await command(daemon, "submit", "--jsonl", str(lines), "--concurrency", "3")
    assert (code, err) == (0, "")
    assert sorted(json.loads(line)["line"] for line in out.splitlines()) == [1, 2, 3, 4, 5, 6]


async def test_an_interrupted_client_leaves_the_chain_or_cancels_it(
    start_daemon: StartDaemon, chain_file: Path
) -> None:
    daemon = await start_daemon(simulated_config(step_ms=20))
    for options, state in ((["--cancel-on-exit"], "cancelled"), ([], "finished")):
        process = await start(daemon, "submit", str(chain_file), "--mode", "serial", *options)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), HANG_SECONDS) == b"== a0 ==\n"
        process.send_signal(signal.SIGINT)
        code, _, _ = await finish(process)
        assert code == 130
        async with daemon.client() as client:
            chain = (await client.list())[-1].id
            assert (await client.wait(chain)).state == state


async def test_a_killed_daemon_under_a_running_chain(start_daemon: StartDaemon, chain_file: Path) -> None:
    daemon = await start_daemon(simulated_config(step_ms=20))
    process = await start(daemon, "submit", str(chain_file), "--mode", "serial", "--reconnect", "1")
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), HANG_SECONDS)
    daemon.note_children()
    daemon.signal(signal.SIGKILL)
    code, _, err = await finish(process)
    assert code == 69
    away, gone = err.splitlines()
    assert away == "pingpong-client: the daemon is away, waiting for it to come back."
    assert gone.startswith(f"pingpong-client: the daemon at {daemon.socket} has gone and did not come back within 1 s.")
    assert "`pingpong-client attach " in gone
    await daemon.ended()


async def test_a_drain_says_what_is_kept_and_the_next_daemon_what_that_waits_for(
    start_daemon: StartDaemon, chain_file: Path
) -> None:
    daemon = await start_daemon(simulated_config(step_ms=100))
    _, out, _ = await command(daemon, "submit", str(chain_file), "--mode", "serial", "--detach")
    chain = out.strip()
    code, out, err = await command(daemon, "drain", "--timeout", "0")
    assert (code, err) == (0, "")
    first, *_, last = out.splitlines()
    assert first.endswith("waits for 1 running chain")
    assert last == (
        "the daemon has ended; 1 chain had not finished when it last answered: what is left goes on at its next start"
    )
    await daemon.ended()

    config = (daemon.folder / "config.toml").read_text()
    again = await start_daemon(config.replace("max_model_len = 4096", "max_model_len = 320"))
    told = f"{chain} is queued: it does not fit any more: "
    for name in ("list", "status"):
        code, out, _ = await command(again, name)
        assert code == 0
        assert any(line.startswith(told) for line in out.splitlines())
    code, out, _ = await command(again, "result", chain)
    assert code == 0
    assert out.splitlines()[-1].startswith(f"{chain}: queued, it does not fit any more: ")
    attached = await start(again, "attach", chain)
    assert attached.stderr is not None
    line = await asyncio.wait_for(attached.stderr.readline(), HANG_SECONDS)
    assert line.decode().startswith(f"pingpong-client: {told}")
    code, _, _ = await command(again, "cancel", chain)
    assert code == 0
    assert (await finish(attached))[0] == 1
    code, out, _ = await command(again, "forget", chain)
    assert (code, out) == (0, f"forgot {chain}\n")


async def test_a_group_that_is_not_there(start_daemon: StartDaemon, chain_file: Path) -> None:
    daemon = await start_daemon()
    for words in (("drain", "--group", "nosuch"), ("submit", str(chain_file), "--group", "nosuch")):
        code, out, err = await command(daemon, *words)
        assert (code, out) == (2, "")
        assert 'there is no device group "nosuch"' in err
        assert "There are: a, b." in err
