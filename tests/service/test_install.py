"""What installing consists of, without a systemd: plans, first configurations, refusals; and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pingpong_bus.errors import ConfigError
from pingpongd import install_service
from pingpongd.config import load_config, parse_config
from pingpongd.install_service_config import first_config
from pingpongd.install_service_plan import (
    MakeFolder,
    Remove,
    Run,
    WriteFile,
    plan_install,
    plan_uninstall,
    system_places,
    user_places,
)

HOME = Path("/home/alice")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_systems_service_is_installed_in_order() -> None:
    places = system_places("default")
    steps = plan_install(places, "UNIT", config="CONFIG", accounts="ACCOUNTS")
    assert steps == [
        WriteFile(Path("/etc/sysusers.d/pingpongd.conf"), "ACCOUNTS"),
        Run(["systemd-sysusers", "/etc/sysusers.d/pingpongd.conf"]),
        WriteFile(Path("/etc/pingpongd/config.toml"), "CONFIG", 0o640, "pingpongd"),
        WriteFile(Path("/etc/systemd/system/pingpongd.service"), "UNIT"),
        Run(("systemctl", "daemon-reload")),
    ]
    assert plan_install(places, "UNIT", config=None, accounts="ACCOUNTS") == [*steps[:2], *steps[3:]]


def test_a_users_service_needs_no_account() -> None:
    places = user_places("two", HOME, {})
    assert plan_install(places, "UNIT", config="CONFIG", accounts="ACCOUNTS") == [
        WriteFile(HOME / ".config/pingpongd/two.toml", "CONFIG", 0o600),
        MakeFolder(HOME / ".local/state/pingpongd-two"),
        MakeFolder(HOME / ".cache/pingpongd"),
        WriteFile(HOME / ".config/systemd/user/pingpongd@two.service", "UNIT"),
        Run(("systemctl", "--user", "daemon-reload")),
    ]


def test_places_follow_the_environment() -> None:
    places = user_places("default", HOME, {"XDG_CONFIG_HOME": "/c", "XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/x"})
    assert (places.config, places.unit) == (
        Path("/c/pingpongd/config.toml"),
        Path("/c/systemd/user/pingpongd.service"),
    )
    assert places.folders == {"state": Path("/s/pingpongd"), "cache": Path("/x/pingpongd")}


def removed(*, instance: str = "default", purge: bool, last: bool) -> list[str]:
    steps = plan_uninstall(system_places(instance), purge=purge, last=last)
    return [str(step.path) for step in steps if isinstance(step, Remove)]


def test_removing_takes_no_more_than_it_is_told() -> None:
    assert removed(purge=False, last=True) == ["/etc/systemd/system/pingpongd.service"]
    assert removed(instance="two", purge=True, last=False) == [
        "/etc/systemd/system/pingpongd@two.service",
        "/etc/pingpongd/two.toml",
        "/var/lib/pingpongd-two",
        "/var/log/pingpongd-two",
    ]
    everything = removed(purge=True, last=True)
    assert {"/var/cache/pingpongd", "/etc/sysusers.d/pingpongd.conf"} <= set(everything)
    first = plan_uninstall(system_places("default"), purge=True, last=True)[0]
    assert first == Run(("systemctl", "disable", "--now", "pingpongd.service"))  # before anything is taken from it


@pytest.mark.parametrize(
    ("gpus", "cores", "user", "devices"),
    [
        (0, [0, 1, 2, 3], False, ["cpu:0", "cpu:1"]),
        (0, [5], True, ["cpu:5"]),
        (2, [0, 1], False, ["cuda:0", "cuda:1"]),
    ],
)
def test_the_first_configuration_is_valid(gpus: int, cores: list[int], user: bool, devices: list[str]) -> None:
    text = first_config(path="/c.toml", unit="pingpongd.service", user=user, gpus=gpus, cores=cores)
    config = parse_config(tomllib.loads(text))
    assert [group.devices for group in config.groups] == [[device] for device in devices]
    assert config.client_group == (None if user else "pingpong")
    assert config.engine == "vllm"
    assert ("systemctl --user restart pingpongd`" in text) == user


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_examples_are_valid(file: Path) -> None:
    assert load_config(file).groups


def test_steps_are_carried_out(tmp_path: Path) -> None:
    file, folder = tmp_path / "a" / "file", tmp_path / "folder"
    install_service._carry_out(
        [WriteFile(file, "old"), WriteFile(file, "new", 0o640), MakeFolder(folder), MakeFolder(folder)], dry_run=False
    )
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)
    assert list(file.parent.iterdir()) == [file]
    assert folder.stat().st_mode & 0o777 == 0o700
    install_service._carry_out([Remove(file), Remove(file), Remove(folder)], dry_run=False)
    assert not file.exists()
    assert not folder.exists()

    install_service._carry_out([Run(["false"], may_fail=True)], dry_run=False)
    with pytest.raises(ConfigError, match="could not run sh -c echo no >&2; exit 3: no."):
        install_service._carry_out([Run(["sh", "-c", "echo no >&2; exit 3"])], dry_run=False)
    with pytest.raises(ConfigError, match="could not run /nonexistent/program: No such file"):
        install_service._carry_out([Run(["/nonexistent/program"])], dry_run=False)


def test_a_dry_run_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_service._carry_out([WriteFile(tmp_path / "file", "text"), Run(["false"])], dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == f"would write {tmp_path}/file\nwould run false\n"


def test_a_unit_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    unit = tmp_path / "pingpongd.service"
    install_service._require_ours(unit)
    unit.write_text("[Unit]\n")
    with pytest.raises(ConfigError, match="was not written by this command"):
        install_service._require_ours(unit)


def test_an_environment_in_a_temporary_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="temporary folder"):
        install_service._require_reachable(["/tmp/clone/.venv/bin/python"])


def test_an_environment_in_a_closed_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_service, "_TEMPORARY", ())  # which is where tests have their folders
    closed = tmp_path / "closed"
    (closed / "bin").mkdir(parents=True)
    closed.chmod(0o700)
    with pytest.raises(ConfigError, match="closed to others"):
        install_service._require_reachable([str(closed / "bin" / "python")])


def run_command(configs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pingpongd", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CONFIG_HOME": str(configs)},
    )


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs here")
@pytest.mark.parametrize("command", ["install-service", "uninstall-service"])
def test_without_systemd_it_says_what_to_do_instead(command: str, tmp_path: Path) -> None:
    done = run_command(tmp_path, command, "--user")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        "pingpongd: systemd does not run on this machine. Run `pingpongd --config FILE` under"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs here")
@pytest.mark.parametrize("user", [("--user",), ()])
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("install-service",), ("would write", "pingpongd.service would be:", "ExecStart=")),
        (("uninstall-service",), ("would remove",)),
        (("uninstall-service", "--purge"), ("would remove", "config.toml")),
    ],
)
def test_without_systemd_a_dry_run_shows_everything(
    command: tuple[str, ...], user: tuple[str, ...], shown: tuple[str, ...], tmp_path: Path
) -> None:
    done = run_command(tmp_path, *command, *user, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (*shown, "Note: here it would be refused: systemd does not run on this machine."):
        assert text in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_tells_the_exit_codes() -> None:
    done = subprocess.run([sys.executable, "-m", "pingpongd", "--help"], capture_output=True, text=True, check=True)
    codes = [line.split()[0] for line in done.stdout.partition("exit codes:")[2].splitlines() if line.strip()]
    assert codes == ["0", "2", "70", "74", "78"]


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--nonsense"], 2), (["check", "--nonsense"], 2), (["--config", "/nonexistent"], 78)]
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-m", "pingpongd", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
