"""The unit files by themselves, and as they are rendered: what systemd's own tools say of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pingpongd.install_service import unit_folder
from pingpongd.install_service_unit import MARK, Service, quote, render_unit

MOST_EXPOSED = 3.0
SYSTEM = Service(instance="default", command=["/bin/true"], start_seconds=1800, drain_seconds=30)
VARIANTS = {
    "plain": SYSTEM,
    "instance": replace(SYSTEM, instance="two"),
    "all": replace(
        SYSTEM, client_group="staff", reads_homes=True, fetches=True, writable=["/srv/chains", "/srv/with space"]
    ),
    "user": replace(SYSTEM, user=True),
    "user instance": replace(SYSTEM, user=True, instance="two"),
    "unconfined user": replace(SYSTEM, user=True, confined=False),
}
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def shipped(service: Service) -> str:
    return (unit_folder() / ("user/pingpongd.service" if service.user else "pingpongd.service")).read_text()


def settings(text: str) -> list[str]:
    """A unit's lines but for comments and empty ones."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def analyze(*arguments: str, runtime: Path) -> str:
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(runtime)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def texts() -> dict[str, tuple[str, bool]]:
    """Every unit by a name for its file: its text, and whether it is a user's."""
    found = {
        "pingpongd.service": ((unit_folder() / "pingpongd.service").read_text(), False),
        "pingpongd@.service": ((unit_folder() / "pingpongd@.service").read_text(), False),
        "user/pingpongd.service": ((unit_folder() / "user/pingpongd.service").read_text(), True),
    }
    for name, service in VARIANTS.items():
        found[f"{name}/{service.unit}"] = (render_unit(shipped(service), service), service.user)
    return found


@needs_systemd
@pytest.mark.parametrize("name", list(texts()))
def test_units_are_clean(tmp_path: Path, name: str) -> None:
    text, user = texts()[name]
    unit = tmp_path / Path(name).name
    unit.write_text(text)
    assert analyze("verify", *(("--user",) if user else ()), str(unit), runtime=tmp_path) == ""


@needs_systemd
@pytest.mark.parametrize("name", [name for name in texts() if not name.startswith("unconfined")])
def test_units_are_confined(tmp_path: Path, name: str) -> None:
    unit = tmp_path / Path(name).name
    unit.write_text(texts()[name][0])
    report = analyze("security", "--offline=true", str(unit), runtime=tmp_path)
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", report)
    assert exposure is not None
    assert float(exposure[1]) <= MOST_EXPOSED


@needs_systemd
def test_every_exception_is_explained(tmp_path: Path) -> None:
    told = (unit_folder() / "README.md").read_text().replace("\\|", "|")
    report = analyze("security", "--offline=true", str(unit_folder() / "pingpongd.service"), runtime=tmp_path)
    exceptions = [line.split()[1] for line in report.splitlines() if line.startswith("✗")]
    assert exceptions
    missing = [name for name in exceptions if f"`{name.rstrip('…')}" not in told]
    assert not missing


def test_the_template_is_the_unit_with_folders_of_its_own() -> None:
    plain = settings((unit_folder() / "pingpongd.service").read_text())
    template = settings((unit_folder() / "pingpongd@.service").read_text())
    assert [line for line in plain if line not in template] == [
        "Description=pingpongd, read-ahead for chains of LLM agents",
        "ExecStart=/usr/bin/env pingpongd --config /etc/pingpongd/config.toml",
        "RuntimeDirectory=pingpongd",
        "StateDirectory=pingpongd",
        "LogsDirectory=pingpongd",
    ]
    assert [line for line in template if line not in plain] == [
        "Description=pingpongd (%i), read-ahead for chains of LLM agents",
        "ExecStart=/usr/bin/env pingpongd --instance %i --config /etc/pingpongd/%i.toml",
        "RuntimeDirectory=pingpongd-%i",
        "StateDirectory=pingpongd-%i",
        "LogsDirectory=pingpongd-%i",
    ]
    assert len(plain) == len(template)


@pytest.mark.parametrize(
    ("service", "lines"),
    [
        (
            replace(SYSTEM, command=["/opt/my venv/bin/pingpongd", "--config", "/etc/$100%.toml"]),
            ['ExecStart="/opt/my venv/bin/pingpongd" --config /etc/$$100%%.toml'],
        ),
        (replace(SYSTEM, start_seconds=60, drain_seconds=600.0), ["TimeoutStartSec=360", "TimeoutStopSec=660"]),
        (
            replace(SYSTEM, instance="two"),
            ["RuntimeDirectory=pingpongd-two", "StateDirectory=pingpongd-two", "CacheDirectory=pingpongd"],
        ),
        (SYSTEM, ["ProtectHome=yes", "IPAddressAllow=localhost", "SupplementaryGroups=pingpong"]),
        (
            replace(SYSTEM, reads_homes=True, fetches=True, client_group="staff"),
            ["ProtectHome=read-only", "IPAddressAllow=any", "SupplementaryGroups=staff"],
        ),
        (replace(SYSTEM, talks_beyond=True), ["IPAddressAllow=any", "ProtectHome=yes"]),
        (replace(SYSTEM, writable=["/srv/a b"]), ['ReadWritePaths="-/srv/a b"', "ProtectSystem=strict"]),
        (replace(SYSTEM, user=True), ["PrivateUsers=yes", "RuntimeDirectory=pingpongd"]),
        (replace(SYSTEM, user=True, instance="two"), ["RuntimeDirectory=pingpongd-two"]),
    ],
)
def test_rendering_fills_in(service: Service, lines: list[str]) -> None:
    text = render_unit(shipped(service), service)
    assert text.startswith(MARK)
    assert [line for line in lines if line not in settings(text)] == []


def test_without_namespaces_nothing_that_needs_them_is_left() -> None:
    text = render_unit(shipped(VARIANTS["user"]), VARIANTS["unconfined user"])
    for key in ("PrivateUsers", "ProtectSystem", "ProtectHome", "CapabilityBoundingSet", "PrivateTmp"):
        assert key not in "\n".join(settings(text))
    assert "NoNewPrivileges=yes" in settings(text)
    assert "WantedBy=default.target" in settings(text)


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("a b", '"a b"'),
        ("50%", "50%%"),
        ('"', '"\\""'),
        ("\\", '"\\\\"'),
    ],
)
def test_words_are_quoted_as_systemd_reads_them(word: str, quoted: str) -> None:
    assert quote(word) == quoted
