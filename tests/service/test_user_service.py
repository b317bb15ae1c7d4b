"""The same service under a user's own systemd, without root."""

from __future__ import annotations

import json

import pytest

from service_machine import Machine, pingpong_client, pingpongd

CONFIG = "/home/alice/.config/pingpongd/config.toml"
SIMULATED = 'engine = "simulated"\ncalibrate = false\n[[groups]]\nname = "a"\ndevices = ["cpu:0"]\n'


@pytest.fixture
def alice(machine: Machine) -> Machine:
    """The machine, with a manager for the user alice; there is no login service to start it."""
    machine.write(
        "/etc/systemd/system/user@.service.d/test.conf", "[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i\n"
    )
    # Made by the first system service that has a mount namespace: on a machine in use there is one.
    machine.run("mkdir", "-p", "/run/systemd/unit-root", check=True)
    machine.run("systemctl", "daemon-reload", check=True)
    machine.run("useradd", "--create-home", "alice", check=True)
    uid = machine.run("id", "-u", "alice", check=True).stdout.strip()
    machine.run("systemctl", "start", f"user@{uid}", check=True)
    return machine


def systemctl(machine: Machine, *words: str) -> str:
    return machine.run("systemctl", "--user", *words, user="alice", check=True).stdout.strip()


def test_a_user_has_a_service_of_their_own(alice: Machine) -> None:
    alice.run("mkdir", "-p", "/home/alice/.config/pingpongd", user="alice", check=True)
    alice.write(CONFIG, SIMULATED)
    alice.run(*pingpongd("install-service", "--user"), user="alice", check=True)
    systemctl(alice, "start", "pingpongd")
    status = json.loads(alice.run(*pingpong_client("status", "--json"), user="alice", check=True).stdout)
    assert status["state"] == "ready"

    # Confined: what it did not need to write it cannot.
    main = systemctl(alice, "show", "pingpongd", "--property=MainPID", "--value")
    mounts = alice.run("cat", f"/proc/{main}/mountinfo", check=True).stdout.splitlines()
    modes = {line.split()[4]: line.split()[5].split(",")[0] for line in mounts}
    assert (modes["/"], modes["/home"], modes["/home/alice/.local/state"]) == ("ro", "ro", "rw")

    systemctl(alice, "stop", "pingpongd")
    assert systemctl(alice, "show", "pingpongd", "--property=Result", "--value") == "success"
    assert alice.run("pgrep", "-u", "alice", "-f", "pingpong").stdout == ""
    alice.run(*pingpongd("uninstall-service", "--user"), user="alice", check=True)
    assert alice.run("ls", "/home/alice/.local/state/pingpongd/chains.db", CONFIG).returncode == 0


def test_the_systems_service_is_not_theirs(alice: Machine) -> None:
    done = alice.run(*pingpongd("install-service"), user="alice")
    assert done.returncode == 2
    assert done.stderr == (
        "pingpongd: the system's service is changed by root. Use sudo, or --user for one of your own.\n"
    )


def test_without_a_manager_it_says_so(machine: Machine) -> None:
    machine.run("useradd", "--create-home", "bob", check=True)
    done = machine.run(*pingpongd("install-service", "--user"), user="bob")
    assert done.returncode == 2
    assert "your own systemd cannot be reached" in done.stderr
    done = machine.run(*pingpongd("install-service", "--user", "--dry-run"), user="bob")
    assert done.returncode == 0
    assert "Note: here it would be refused: your own systemd cannot be reached" in done.stdout
