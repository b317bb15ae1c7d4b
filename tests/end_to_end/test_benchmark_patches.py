"""The script that measures what patches buy: its trials, its report, and what is left of a killed process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import patch_trials
import patches
from made_up_vllm import VERSION, install, write_patches
from patched_vllm import make_copy


def test_every_trial_is_there_and_runs_on_both_kinds_of_devices() -> None:
    assert set(patches.EACH) == set(patch_trials.TRIALS) - {"stay"}
    assert all(set(each) == {"cpu", "gpu"} for each in patches.EACH.values())


def test_a_report_has_a_line_for_each_side() -> None:
    rows = [
        {"patches": "append", "side": side, "version": "0.32.0", "device": "cpu", "found": found}
        for side, found in (
            ("stock", {"abilities": [], "sizes": {"32": {"sampled_ms": 2.5}}}),
            ("patched", {"abilities": ["x"], "equal": True}),
        )
    ]
    lines = patches.report(rows).splitlines()
    assert lines[2:] == [
        "| append | 0.32.0 stock, cpu | sizes (32 (sampled_ms 2.5)) |",
        "| append | 0.32.0 patched, cpu | equal true |",
    ]


def test_what_a_killed_process_leaves_is_found_and_ended() -> None:
    leaves = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", leaves],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    try:
        while len(patches.members(process.pid)) < 2:
            assert process.poll() is None
        assert sum(map(patches.memory_of, patches.members(process.pid))) > 1 << 20
    finally:
        patches.end(process)
        process.stdin.close()
    assert patches.members(process.pid) == []


def test_a_copy_is_made_of_links_but_for_what_is_patched(tmp_path: Path) -> None:
    site = tmp_path / "site"
    package = install(site)
    folder = write_patches(tmp_path / "patches")
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}

    copy = make_copy(tmp_path / "copy", ["second"], package=package, version=VERSION, patches=folder)

    assert (copy / "vllm/core/scheduler.py").read_text() == "zero = 0\none = 1\ntwo = 2.0\nthree = 3\n", "with its need"
    assert (copy / "vllm/core/added.py").read_text() == "added = True\n"
    assert (copy / "vllm/alone.py").is_symlink()
    assert not (copy / "vllm/core").is_symlink()
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
