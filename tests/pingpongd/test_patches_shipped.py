"""The patches that we ship: they fit the vLLM that is installed, compile, and are taken back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from made_up_vllm import tree
from pingpong_bus.errors import ConfigError
from pingpongd.__main__ import main
from pingpongd.patch_folder import load_series, shipped, versions
from pingpongd.patch_series import Series
from pingpongd.patch_work import KEPT, kept_state
from pingpongd.vllm_installation import find_vllm

_ROOT = Path(__file__).parents[2]


def _installed() -> tuple[Series, Path]:
    """The patches to the installed vLLM, and where it is."""
    installation = find_vllm(None)
    return load_series(shipped(), installation.version), installation.site


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files of the installed vLLM that patches touch, as released."""
    series, site = _installed()
    kept = kept_state(find_vllm(None))
    for path in [*series.paths, "vllm/__init__.py", "vllm/_version.py"]:
        patched = kept is not None and path in kept.files
        source = site / KEPT / path if patched else site / path
        if source.exists():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, tmp_path / path)
    return tmp_path


def _patch(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pingpongd", "patch", *words])
    return main()


def test_every_version_has_a_whole_series() -> None:
    assert versions(shipped()) == ["0.24.0", "0.32.0"]
    for version in versions(shipped()):
        for patch in load_series(shipped(), version).patches:
            assert patch.why, f"{patch.name} does not say why"
            assert all(path.startswith("vllm/") for path in patch.paths)


def test_the_wheel_takes_every_version_along() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    taken = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]

    assert taken == {f"patches/{version}": f"pingpongd/pingpongd/patches/{version}" for version in versions(shipped())}


def test_the_manifest_is_of_the_installed_vllm() -> None:
    version = find_vllm(None).version
    program = [sys.executable, str(_ROOT / "patches/make_manifest.py"), version, "--check"]

    ended = subprocess.run(program, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, f"{ended.stderr}run patches/make_manifest.py {version}"


def test_all_are_applied_compile_and_are_taken_back(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(copy)
    series, _ = _installed()

    assert _patch(monkeypatch, "apply", "--vllm", str(copy), "--json") == 0

    report = json.loads(capsys.readouterr().out)
    assert [patch["state"] for patch in report["patches"]] == ["applied"] * len(series.patches)
    assert set(report["changed"]) == set(series.paths)
    for path in series.paths:
        compile((copy / path).read_bytes(), path, "exec")

    assert _patch(monkeypatch, "revert", "--vllm", str(copy)) == 0
    assert tree(copy) == before


def test_each_is_applied_alone_with_what_it_needs(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(copy)
    series, _ = _installed()
    for patch in series.patches:
        assert _patch(monkeypatch, "apply", patch.name, "--vllm", str(copy)) == 0
        for path in patch.paths:
            compile((copy / path).read_bytes(), path, "exec")
        capsys.readouterr()
        assert _patch(monkeypatch, "status", "--vllm", str(copy), "--json") == 0
        report = json.loads(capsys.readouterr().out)
        applied = {each["name"] for each in report["patches"] if each["state"] == "applied"}
        assert applied == {patch.name} | series.needed_by(patch)

        assert _patch(monkeypatch, "revert", "--vllm", str(copy)) == 0
        assert tree(copy) == before


def test_patches_to_another_version_are_not_taken() -> None:
    with pytest.raises(ConfigError, match=r"no patches to vLLM 0\.31\.0"):
        load_series(shipped(), "0.31.0")
