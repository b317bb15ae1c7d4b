"""A daemon that cannot start says why in one sentence, with a documented exit code, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon_process import DaemonProcess, StartDaemon, simulated_config

VLLM = """
model = "{model}"
[[groups]]
name = "a"
devices = ["{device}"]
"""


@pytest.mark.parametrize(
    ("config", "arguments", "sentence"),
    [
        ("slots = ", (), "is not TOML"),
        ("slots = 0\n" + simulated_config().replace("slots = 64", ""), (), "slots: expected `int` >= 1"),
        (simulated_config(slots=10**9), (), "shared memory"),
        (simulated_config(step_ms=-1), (), "simulated.step_ms: -1.0 is below 0"),
        (VLLM.format(model="smollm2-135m", device="cpu:4096"), (), 'groups[0].devices: the device "cpu:4096" does not'),
        (VLLM.format(model="smollm2-135m", device="tpu:0"), (), 'groups[0].devices: "tpu:0" is not a device'),
        (
            VLLM.format(model="smollm2-135m", device="cpu:0")
            + VLLM.format(model="", device="cpu:0-1").replace('"a"', '"b"').replace('model = ""', ""),
            (),
            'groups[1].devices: core 0 is in group "a" already',
        ),
        (VLLM.format(model="/no/such/model", device="cpu:0"), (), "/no/such/model"),
        (simulated_config(), ("--runtime-dir", "/proc/nowhere"), "runtime_dir: the runtime directory"),
    ],
)
async def test_a_wrong_configuration(
    start_daemon: StartDaemon, config: str, arguments: tuple[str, ...], sentence: str
) -> None:
    daemon = await start_daemon(config, *arguments, wait=False)
    assert await daemon.ended() == 78
    assert sentence in reason(daemon)
    assert "Traceback" not in daemon.log.read_text()


def reason(daemon: DaemonProcess) -> str:
    """Why it has not started: in the log, which is JSON throughout; or, before there was one, in a plain line."""
    if events := daemon.log_events("daemon_failed"):
        assert all(line.startswith("{") for line in daemon.log.read_text().splitlines())
        return str(events[-1]["error"])
    (line,) = daemon.log.read_text().splitlines()
    assert line.startswith("pingpongd: ")
    return line


async def test_a_log_for_people_ends_with_the_sentence(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(slots=10**9), "--log-format", "console", wait=False)
    assert await daemon.ended() == 78
    assert daemon.log.read_text().splitlines()[-1].startswith("pingpongd: ")


async def test_a_database_in_disorder_leaves_no_runtime_folder(start_daemon: StartDaemon, folder: Path) -> None:
    (folder / "broken" / "chains.db").mkdir(parents=True)
    config = f'state_dir = "{folder / "broken"}"\n{simulated_config()}'
    daemon = await start_daemon(config, "--runtime-dir", str(folder / "new"), wait=False)
    assert await daemon.ended() == 78
    assert "chains.db is a folder" in reason(daemon)
    assert not (folder / "new").exists()


async def test_no_configuration_file(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(simulated_config(), "--config", "/no/such/file.toml", wait=False)
    assert await daemon.ended() == 78
    assert "there is no configuration file /no/such/file.toml" in daemon.log.read_text()


async def test_a_second_daemon_of_the_same_instance(start_daemon: StartDaemon) -> None:
    first = await start_daemon()
    second = await start_daemon(None, "--runtime-dir", str(first.folder / "run"), wait=False)
    assert await second.ended() == 78
    assert f"already runs in {first.folder}/run (pid {first.process.pid})" in second.log.read_text()
    async with first.client() as client:
        assert (await client.status()).state == "ready"


async def test_something_else_where_the_socket_goes(start_daemon: StartDaemon, folder: Path) -> None:
    taken = folder / "taken"
    (taken / "control.sock").mkdir(parents=True)
    (taken / "lock").touch()
    daemon = await start_daemon(None, "--runtime-dir", str(taken), wait=False)
    assert await daemon.ended() == 78
    assert f"{taken} holds control.sock, which is not pingpongd's" in daemon.log.read_text()
    assert "Traceback" not in daemon.log.read_text()
