"""The command as people run it: exit codes, one sentence on standard error, no traceback."""

import asyncio
import errno
import json
import os
import signal
import sys

import pytest

from pingpong_bus.errors import UsageError
from pingpong_client import cli
from pingpong_client.cli import COMMANDS, build_parser

HANG_S = 30
AGENT = {"name": "a", "prompt": "hello"}


async def start(*words, socket, stdin=b"", **pipes):
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PINGPONG", "XDG"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pingpong_client", "--socket", str(socket), *words,
        stdin=asyncio.subprocess.PIPE, stdout=pipes.get("stdout", asyncio.subprocess.PIPE),
        stderr=asyncio.subprocess.PIPE, env=environ,
    )  # fmt: skip
    process.stdin.write(stdin)
    process.stdin.close()
    return process


async def finish(process):
    async with asyncio.timeout(HANG_S):
        out, err = await process.communicate()
    return process.returncode, (out or b"").decode(), err.decode()


async def command(*words, socket, stdin=b""):
    return await finish(await start(*words, socket=socket, stdin=stdin))


def one_sentence(err):
    """Whether standard error holds one line of ours."""
    return err.startswith("pingpong-client: ") and err.count("\n") == 1 and "Traceback" not in err


def chain_of(*agents, **fields):
    return json.dumps({"name": "x", "agents": list(agents)} | fields).encode()


BAD_CHAINS = {
    "not JSON": (b"{", "is not JSON"),
    "empty": (b"", "is not JSON"),
    "not UTF-8": (b'{"name": "\xff"}', "is not UTF-8: byte 10 is 0xff"),
    "not an object": (b"[]", "expected `object`"),
    "unknown field": (chain_of(AGENT, speed=1), "speed: there is no such field"),
    "unknown field of an agent": (chain_of(AGENT | {"top_k": 1}), "agents[0].top_k: there is no such field"),
    "missing field": (b'{"name": "x"}', "agents: the field is missing"),
    "no agents": (chain_of(), "agents: the list is empty"),
    "no prompt": (chain_of({"name": "a"}), "agents[0].prompt: the agent has no prompt"),
    "empty prompt": (chain_of({"name": "a", "prompt": ""}), "agents[0].prompt: the prompt is empty"),
    "duplicate names": (chain_of(AGENT, AGENT), 'agents[1].name: two agents are called "a"'),
    "cycle": (chain_of({"name": "a", "prompt": "{{a}}"}), "which is a cycle"),
    "later agent": (chain_of({"name": "a", "prompt": "{{b}}"}, {"name": "b", "prompt": "x"}), "comes later"),
    "unknown agent": (chain_of({"name": "a", "prompt": "{{z}}"}), '"{{z}}" names no agent'),
    "no max_tokens": (chain_of(AGENT | {"max_tokens": 0}), "agents[0].max_tokens"),
    "negative max_tokens": (chain_of(AGENT | {"max_tokens": -3}), "agents[0].max_tokens"),
    "input without value": (chain_of(AGENT, inputs={"topic": None}), "inputs.topic"),
    "deep nesting": (b"[" * 100_000, ""),
}


@pytest.mark.parametrize("kind", BAD_CHAINS)
async def test_a_bad_chain_is_65_though_no_daemon_runs(kind, tmp_path):
    data, says = BAD_CHAINS[kind]
    path = tmp_path / "chain.json"
    path.write_bytes(data)
    for name in ("submit", "verify") if kind == "cycle" else ("submit",):
        code, out, err = await command(name, str(path), socket=tmp_path)
        assert (code, out) == (65, "")
        assert one_sentence(err)
        assert says in err


async def test_a_chain_file_over_the_limit_is_called_too_large(tmp_path):
    path = tmp_path / "chain.json"
    with path.open("wb") as file:
        file.truncate(60 * 2**20)
    code, _, err = await command("submit", str(path), socket=tmp_path)
    assert code == 65
    assert one_sentence(err)
    assert f"{path} is larger than 16777216 bytes." in err


async def test_a_chain_file_that_is_not_there(tmp_path):
    code, _, err = await command("submit", str(tmp_path / "nope.json"), socket=tmp_path)
    assert code == 65
    assert one_sentence(err)
    assert "No such file" in err


async def test_a_daemon_whose_folder_is_not_there_yet_is_waited_for(serving, tmp_path):
    process = await start("status", "--wait", "--json", socket=tmp_path / "run" / "pp")
    async with asyncio.timeout(HANG_S):
        told = await process.stderr.readline()
    assert told.decode() == (f"pingpong-client: no daemon is at {tmp_path}/run/pp/control.sock yet: waiting for one.\n")
    (tmp_path / "run" / "pp").mkdir(parents=True)
    async with serving(tmp_path / "run" / "pp" / "control.sock"):
        code, out, err = await finish(process)
    assert (code, err) == (0, "")
    assert json.loads(out)["state"] == "ready"


@pytest.mark.parametrize("words", [["submit", "-"], ["verify", "-"], ["status"], ["list"], ["result", "c0"]])
async def test_no_daemon_is_69(words, tmp_path):
    code, out, err = await command(*words, socket=tmp_path, stdin=chain_of(AGENT))
    assert (code, out) == (69, "")
    assert one_sentence(err)
    assert f"no daemon answers at {tmp_path}/control.sock. Start it with `pingpongd --config FILE`" in err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["frobnicate"],
        ["submit", "x", "--mode", "fast"],
        ["submit", "x", "--concurrency", "many"],
        ["verify", "x", "--runs", "0"],
        ["result"],
        ["status", "--instance", "red"],
        ["submit"],
        ["submit", "x", "--priority", "101"],
        ["submit", "x", "--deadline", "0"],
        ["submit", "x", "--deadline", "nan"],
        ["list", "--limit", "0"],
        ["list", "--limit", "10001"],
        ["forget"],
        ["drain", "--timeout", "-1"],
    ],
)
async def test_usage_is_2(words, tmp_path):
    code, out, err = await command(*words, socket=tmp_path)
    assert (code, out) == (2, "")
    assert one_sentence(err)


async def test_a_chain_over_the_real_socket(serving, chain_file, tmp_path):
    async with serving(tmp_path / "control.sock"):
        code, out, err = await command("submit", str(chain_file), socket=tmp_path)
        assert (code, err) == (0, "")
        assert out.startswith("== writer ==\ntext of writer\n")
        assert "\x1b" not in out
        code, out, err = await command("submit", str(chain_file), "--json", socket=tmp_path)
        assert (code, err) == (0, "")
        assert json.loads(out)["state"] == "finished"


@pytest.mark.parametrize(("reconnect", "says"), [("0", "went away."), ("0.5", "pingpong-client attach c0")])
async def test_the_daemon_goes_away_under_a_running_chain(
    serving, daemon, chain_file, tmp_path, until, reconnect, says
):
    daemon.hold = True
    async with serving(tmp_path / "control.sock") as router:
        process = await start("submit", str(chain_file), "--reconnect", reconnect, socket=tmp_path)
        await until(lambda: daemon.requests)
        router.close(linger=0)
        code, _, err = await finish(process)
    assert code == 69
    *notes, last = err.splitlines(keepends=True)
    assert one_sentence(last)
    assert says in last
    assert notes == (
        [] if reconnect == "0" else ["pingpong-client: the daemon is away, waiting for it to come back.\n"]
    )


@pytest.mark.parametrize(
    ("number", "options", "code"),
    [
        (signal.SIGINT, [], 130),
        (signal.SIGINT, ["--cancel-on-exit"], 130),
        (signal.SIGTERM, ["--cancel-on-exit"], 143),
        (signal.SIGHUP, ["--cancel-on-exit"], 129),
        (signal.SIGHUP, [], 129),
    ],
)
async def test_a_signal_leaves_or_cancels_the_chain(
    serving, daemon, chain_file, tmp_path, until, number, options, code
):
    daemon.hold = True
    async with serving(tmp_path / "control.sock"):
        process = await start("submit", str(chain_file), *options, socket=tmp_path)
        await until(lambda: "c0" in daemon.results)
        daemon.finish_agent("c0", 0)
        line = await asyncio.wait_for(process.stdout.readline(), HANG_S)
        assert line == b"== writer ==\n"
        process.send_signal(number)
        found, _, err = await finish(process)
    assert found == code
    assert one_sentence(err)
    if options:
        assert daemon.results["c0"].state == "cancelled"
        assert "cancelled c0." in err
    else:
        assert daemon.results["c0"].state == "finished"
        assert "`pingpong-client result c0`" in err


async def test_a_reader_that_goes_is_no_traceback(serving, daemon, chain, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = await start("schema", socket=tmp_path, stdout=writing)
    finally:
        os.close(writing)
    code, _, err = await finish(process)
    assert (code, err) == (141, "")


@pytest.mark.parametrize(("words", "code"), [("status >&-", 69), ("schema >&- <&-", 0), ("submit - <&-", 65)])
async def test_closed_standard_streams_are_no_traceback(words, code, tmp_path):
    process = await asyncio.create_subprocess_shell(
        f"{sys.executable} -m pingpong_client --socket {tmp_path} {words}", stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(HANG_S):
        _, err = await process.communicate()
    assert process.returncode == code
    assert err == b"" if code == 0 else one_sentence(err.decode())


def test_the_daemons_name_may_stand_before_or_after_the_command():
    parser = build_parser()
    assert parser.parse_args(["--socket", "a", "status"]).socket == "a"
    assert parser.parse_args(["status", "--socket", "a"]).socket == "a"
    assert parser.parse_args(["--socket", "a", "status", "--socket", "b"]).socket == "b"
    assert parser.parse_args(["status"]).socket is None
    with pytest.raises(UsageError):
        parser.parse_args(["status", "--sock"])


async def test_a_full_disk_is_one_sentence(tmp_path):
    with open("/dev/full", "wb") as full:  # noqa: ASYNC230, PTH123
        code, _, err = await finish(await start("schema", socket=tmp_path, stdout=full))
    assert code == 74
    assert one_sentence(err)
    assert "cannot be written" in err


@pytest.mark.parametrize(
    ("words", "with_chains"),
    [
        (["submit", "x"], True), (["attach", "c1"], True), (["verify", "x"], True),
        (["timeline", "c1"], False), (["jitter", "x"], False), (["schema"], False),
    ],
)  # fmt: skip
def test_a_full_disk_is_said_to_leave_chains_alone_only_where_some_run(words, with_chains, monkeypatch, capsys):
    async def run(context):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(COMMANDS[words[0]], "run", run)
    monkeypatch.setattr(cli, "_drop_output", lambda: None)
    assert cli.main(words) == 74
    err = capsys.readouterr().err
    assert one_sentence(err)
    assert ("Chains go on" in err) == with_chains


async def test_help_lists_the_exit_codes(tmp_path):
    code, out, _ = await command("--help", socket=tmp_path)
    assert code == 0
    listed = [int(line.split()[0]) for line in out.partition("exit codes:\n")[2].splitlines()]
    assert listed == [0, 1, 2, 3, 65, 69, 70, 74, 78, 129, 130, 141, 143]


async def test_it_says_its_version(tmp_path):
    code, out, _ = await command("--version", socket=tmp_path)
    assert code == 0
    assert out.startswith("pingpong-client ")
