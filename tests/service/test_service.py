"""The service under a real systemd, with the simulated engine: installed, started, used, broken, removed."""

from __future__ import annotations

import json

from service_machine import Machine, pingpong_client, pingpongd

CONFIG = "/etc/pingpongd/config.toml"
CHAIN = "/srv/chain.json"


def config(*, step_ms: float = 1.0, start_ms: float = 0.0, **more: object) -> str:
    """Two groups of the simulated engine, for clients of the group."""
    settings = {"engine": "simulated", "calibrate": False, "client_group": "pingpong", "slots": 64, **more}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    lines += ["[simulated]", f"step_ms = {step_ms}", f"start_ms = {start_ms}", "row_us = 20.0"]
    for name in ("a", "b"):
        lines += ["[[groups]]", f'name = "{name}"', 'devices = ["cpu:0"]']
    return "\n".join(lines) + "\n"


def chain(*, agents: int = 3, tokens: int = 20) -> str:
    """Each agent reads the one before it."""
    steps = []
    for index in range(agents):
        prompt = f"Go on from {{{{a{index - 1}}}}}" if index else "Begin."
        steps.append({"name": f"a{index}", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True})
    return json.dumps({"name": "test", "agents": steps})


def install(machine: Machine, text: str, *arguments: str) -> None:
    machine.write(CONFIG, text)
    machine.write("/etc/systemd/system/pingpongd.service.d/test.conf", "[Service]\nRestartSec=200ms\n")
    machine.run(*pingpongd("install-service", *arguments), check=True)


def start(machine: Machine, unit: str = "pingpongd") -> int:
    """Start the service; its main process."""
    machine.run("systemctl", "start", unit, check=True)
    return int(machine.property(unit, "MainPID"))


def client_user(machine: Machine, name: str = "alice") -> str:
    machine.run("useradd", "--create-home", "--groups", "pingpong", name, check=True)
    machine.write(CHAIN, chain())
    return name


def test_start_returns_when_all_engines_serve(machine: Machine) -> None:
    install(machine, config(start_ms=3000))
    machine.run("systemctl", "start", "--no-block", "pingpongd", check=True)
    machine.until(lambda: "loading" in machine.property("pingpongd", "StatusText"), "word of the loading")
    assert machine.property("pingpongd", "ActiveState") == "activating"
    assert not machine.events("daemon_ready")

    start(machine)
    assert {event["worker"] for event in machine.events("worker_ready")} == {"a", "b"}
    machine.until(lambda: machine.property("pingpongd", "StatusText").startswith("ready"), "word of its being ready")
    status = json.loads(machine.run(*pingpong_client("status", "--json"), check=True).stdout)
    assert status["state"] == "ready"


def test_it_has_no_more_than_it_needs(machine: Machine) -> None:
    install(machine, config())
    main = start(machine)
    lines = machine.run("cat", f"/proc/{main}/status", check=True).stdout.splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
    mounts = machine.run("cat", f"/proc/{main}/mountinfo", check=True).stdout.splitlines()
    modes = {line.split()[4]: line.split()[5].split(",")[0] for line in mounts}
    assert (modes["/"], modes["/var/lib/pingpongd"], modes["/run/pingpongd"]) == ("ro", "rw", "rw")
    environment = machine.run("cat", f"/proc/{main}/environ", check=True).stdout
    assert "HOME=/var/cache/pingpongd" in environment.split("\0")
    # Its workers inherit all that, but not the line to the service manager.
    [worker] = [event["pid"] for event in machine.events("worker_started") if event["worker"] == "a"]
    names = {item.partition("=")[0] for item in machine.run("cat", f"/proc/{worker}/environ").stdout.split("\0")}
    assert not names & {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
    assert "HOME" in names


def test_members_of_the_group_may_use_it_and_nobody_else(machine: Machine) -> None:
    install(machine, config())
    start(machine)
    alice = client_user(machine)
    machine.run("useradd", "--create-home", "mallory", check=True)

    result = json.loads(machine.run(*pingpong_client("submit", "--json", CHAIN), user=alice, check=True).stdout)
    assert result["state"] == "finished"
    assert [len(agent["output_ids"]) for agent in result["agents"]] == [20, 20, 20]

    refused = machine.run(*pingpong_client("submit", CHAIN), user="mallory")
    assert refused.returncode not in (0, 70)
    assert refused.stderr.count("\n") == 1  # a sentence, no traceback


def test_a_reload_is_taken_while_it_serves(machine: Machine) -> None:
    install(machine, config(drain_seconds=30))
    main = start(machine)
    machine.write(CONFIG, config(drain_seconds=7, slots=128))
    machine.run("systemctl", "reload", "pingpongd", check=True)
    machine.until(lambda: bool(machine.events("config_reloaded")), "the reload")
    [event] = machine.events("config_reloaded")
    assert (event["changed"], event["needs_restart"]) == (["drain_seconds"], ["slots"])
    machine.until(lambda: machine.property("pingpongd", "ActiveState") == "active", "the reload's end")
    assert int(machine.property("pingpongd", "MainPID")) == main


def test_a_stop_is_clean_and_keeps_what_was_accepted(machine: Machine) -> None:
    install(machine, config(step_ms=50, drain_seconds=0.5))
    start(machine)
    alice = client_user(machine)
    machine.write(CHAIN, chain(tokens=200))
    submitted = machine.run(*pingpong_client("submit", "--detach", CHAIN), user=alice, check=True).stdout.split()[-1]
    machine.run("systemctl", "stop", "pingpongd", check=True)

    assert machine.property("pingpongd", "ActiveState") == "inactive"
    assert "pingpongd.service: Deactivated successfully." in machine.journal("-u", "pingpongd", "-o", "cat")
    assert machine.events("daemon_stopped")
    assert not machine.processes("pingpongd")
    assert machine.run("pgrep", "-u", "pingpongd").stdout == ""
    assert machine.run("ls", "/run/pingpongd").returncode != 0
    assert machine.run("ls", "/dev/shm").stdout == ""

    machine.write(CONFIG, config(step_ms=1))
    start(machine)
    finished(machine, submitted, alice)


def test_a_killed_daemon_comes_back_and_its_chains_go_on(machine: Machine) -> None:
    install(machine, config(step_ms=20))
    main = start(machine)
    alice = client_user(machine)
    machine.write(CHAIN, chain(agents=4, tokens=60))
    submitted = machine.run(*pingpong_client("submit", "--detach", CHAIN), user=alice, check=True).stdout.split()[-1]
    machine.until(lambda: _running(machine, submitted, alice), "the chain's start")
    machine.run("kill", "-KILL", str(main), check=True)

    machine.until(lambda: machine.property("pingpongd", "NRestarts") == "1", "the restart")
    machine.until(lambda: machine.property("pingpongd", "ActiveState") == "active", "its being ready")
    assert int(machine.property("pingpongd", "MainPID")) != main
    result = finished(machine, submitted, alice)
    assert [len(agent["output_ids"]) for agent in result["agents"]] == [60] * 4


def test_what_can_never_work_is_not_tried_again(machine: Machine) -> None:
    install(machine, config())
    machine.write(CONFIG, config(slotz=3))
    assert machine.run("systemctl", "start", "pingpongd").returncode != 0
    shown = machine.properties("pingpongd", "ActiveState", "ExecMainStatus", "NRestarts")
    assert shown == {"ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}
    assert "slotz: there is no such key" in machine.journal("-u", "pingpongd", "-o", "cat")


def test_a_full_disk_may_heal(machine: Machine) -> None:
    install(machine, config())
    machine.write("/etc/systemd/system/pingpongd.service.d/test.conf", "[Service]\nRestartSec=3\n")
    machine.run("systemctl", "daemon-reload", check=True)
    state = "/var/lib/pingpongd"
    machine.run("mkdir", state, check=True)
    machine.run("mount", "-t", "tmpfs", "-o", "size=8k,mode=700", "disk", state, check=True)
    assert machine.run("systemctl", "start", "pingpongd").returncode != 0
    assert "status=74/IOERR" in machine.journal("-u", "pingpongd", "-o", "cat")
    machine.run("mount", "-o", "remount,size=64m", state, check=True)
    machine.until(lambda: machine.property("pingpongd", "ActiveState") == "active", "its being ready")


def test_a_daemon_that_stands_still_is_killed_and_started_anew(machine: Machine) -> None:
    install(machine, config())
    machine.write("/etc/systemd/system/pingpongd.service.d/dog.conf", "[Service]\nWatchdogSec=2\nTimeoutAbortSec=1\n")
    machine.run("systemctl", "daemon-reload", check=True)
    main = start(machine)
    machine.run("kill", "-STOP", str(main), check=True)
    machine.until(lambda: machine.property("pingpongd", "NRestarts") == "1", "the watchdog's bite")
    machine.until(lambda: machine.property("pingpongd", "ActiveState") == "active", "its being ready")
    assert int(machine.property("pingpongd", "MainPID")) != main
    # In all that it has: the daemon that is killed dumps the stacks of its threads.
    assert "Watchdog timeout" in machine.journal("-u", "pingpongd")

    # Alive, it is left alone: twice the watchdog's time.
    since = int(machine.property("pingpongd", "WatchdogTimestampMonotonic"))
    machine.until(
        lambda: int(machine.property("pingpongd", "WatchdogTimestampMonotonic")) > since + 4_000_000, "signs of life"
    )
    assert machine.property("pingpongd", "NRestarts") == "1"


def test_the_journal_knows_what_is_a_warning(machine: Machine) -> None:
    install(machine, config())
    start(machine)
    [worker] = [event["pid"] for event in machine.events("worker_started") if event["worker"] == "a"]
    machine.run("kill", "-KILL", str(worker), check=True)
    machine.until(lambda: len(machine.events("worker_ready")) == 3, "the worker's replacement")
    severe = machine.journal("-u", "pingpongd", "-p", "warning", "-o", "cat").splitlines()
    assert severe
    assert {json.loads(line)["level"] for line in severe} <= {"warning", "error"}
    assert len(machine.events("worker_started")) == 3  # what is stored is JSON alone, and info is below


def test_instances_stand_side_by_side(machine: Machine) -> None:
    install(machine, config())
    machine.write("/etc/pingpongd/two.toml", config())
    machine.run(*pingpongd("install-service", "--instance", "two"), check=True)
    start(machine)
    start(machine, "pingpongd@two")
    for instance in ("default", "two"):
        status = machine.run(*pingpong_client("status", "--json", "--instance", instance), check=True).stdout
        assert json.loads(status)["instance"] == instance
    machine.run("systemctl", "stop", "pingpongd@two", check=True)
    assert machine.property("pingpongd", "ActiveState") == "active"


def test_installing_again_changes_nothing_and_removing_keeps_what_is_yours(machine: Machine) -> None:
    first = machine.run(*pingpongd("install-service"), check=True).stdout
    assert f"write {CONFIG}" in first
    machine.write(CONFIG, config())
    unit = machine.run("cat", "/etc/systemd/system/pingpongd.service").stdout
    again = machine.run(*pingpongd("install-service"), check=True).stdout
    assert CONFIG not in again.partition("Next:")[0]
    assert machine.run("cat", CONFIG).stdout == config()
    unit_again = machine.run("cat", "/etc/systemd/system/pingpongd.service").stdout
    # The model of the first configuration had to be fetched, and the simulated engine has none.
    assert unit_again == unit.replace("\nIPAddressAllow=any", "\nIPAddressAllow=localhost")

    start(machine)
    kept = machine.run(*pingpongd("uninstall-service"), check=True).stdout.splitlines()[-1]
    assert CONFIG in kept
    assert "/var/lib/pingpongd" in kept
    assert machine.property("pingpongd", "LoadState") == "not-found"
    assert machine.run("pgrep", "-u", "pingpongd").stdout == ""
    assert machine.run("ls", "/var/lib/pingpongd/chains.db", CONFIG).returncode == 0
    assert machine.run(*pingpongd("uninstall-service")).returncode == 2

    machine.run(*pingpongd("install-service"), check=True)
    machine.run(*pingpongd("uninstall-service", "--purge"), check=True)
    for path in (
        "/var/lib/pingpongd",
        "/var/log/pingpongd",
        "/var/cache/pingpongd",
        CONFIG,
        "/etc/sysusers.d/pingpongd.conf",
    ):
        assert machine.run("ls", "-d", path).returncode != 0
    assert machine.run("getent", "passwd", "pingpongd").returncode != 0


def test_the_check_speaks_of_the_service(machine: Machine) -> None:
    install(machine, config())
    start(machine)
    done = machine.run(*pingpongd("check", "--json", "--config", CONFIG), check=True)
    found = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert found["running"]["text"].startswith("instance default runs, pid")
    assert found["runtime_dir"]["text"] == "/run/pingpongd, mode 0750"
    assert found["state_dir"]["text"] == "/var/lib/pingpongd, mode 0700"
    assert found["client_group"]["level"] == "warning"  # nobody is in it
    assert found["service"]["text"] == "pingpongd.service is active (running)"


def _running(machine: Machine, chain_id: str, user: str) -> bool:
    shown = machine.run(*pingpong_client("result", "--json", chain_id), user=user)
    return bool(shown.stdout) and json.loads(shown.stdout)["state"] == "running"


def finished(machine: Machine, chain_id: str, user: str) -> dict[str, list[dict[str, list[int]]]]:
    """Wait for a chain's end, and take its result."""
    found: dict[str, list[dict[str, list[int]]]] = {}

    def ended() -> bool:
        shown = machine.run(*pingpong_client("result", "--json", chain_id), user=user)
        if not shown.stdout:
            return False
        found.update(json.loads(shown.stdout))
        return found["state"] not in ("queued", "running")  # type: ignore[comparison-overlap]

    machine.until(ended, f"the end of {chain_id}")
    assert found["state"] == "finished"  # type: ignore[comparison-overlap]
    return found
