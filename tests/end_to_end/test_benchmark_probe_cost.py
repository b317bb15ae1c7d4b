"""The benchmark of what probes cost, and the recorder of what NVML answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from nvml_player import H200, NvmlPlayer
from nvml_record import Recorder, text
from pingpongd.gpu_probe import GpuProbe
from pingpongd.nvml import NvmlRefused
from probe_cost import ProbeCost
from runs import read_lines

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "probe_cost.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_one_worker_is_watched_and_both_sides_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "cost.jsonl"
    done = run("--workers", "1", "--seconds", "2", "--processes", "2", "--threads", "5", "--out", out)
    assert done.returncode == 0, done.stderr
    (row,) = read_lines(out, ProbeCost)
    assert (row.workers, row.gpu, row.limited) == (1, "", True)
    assert row.looks >= 1
    assert row.probes > 0.0
    assert row.watchdog > 0.0
    assert "total, of one core" in done.stdout
    assert run("--report", out).stdout == done.stdout


def test_what_is_published_keeps_to_the_target_for_two_workers() -> None:
    rows = read_lines(BENCHMARKS / "results" / "probe-cost.jsonl", ProbeCost)
    assert {row.workers for row in rows if row.gpu} == {1, 2, 8}
    assert max(row.total for row in rows if row.workers <= 2) < 0.005


def test_a_recording_is_played_as_it_was_answered(tmp_path: Path) -> None:
    player = NvmlPlayer()
    player.show("two", 4)
    player.counters = {74: 10, 269: 0}
    player.changes["nvmlDeviceGetPowerUsage"] = NvmlRefused(3)
    recorder = Recorder(player)

    def look(nvml: Any) -> Any:
        probe = GpuProbe(nvml, same_pids=True, descends=lambda pid, family: False)
        probe.begin()
        return probe.look("a", [H200], [430])

    asked = look(recorder)
    path = tmp_path / "recording.json"
    path.write_text(text("x", [{"label": "only", "own": [430], "devices": [recorder.answers]}]))
    assert json.loads(path.read_text())["frames"][0]["devices"][0]["nvmlDeviceGetPowerUsage"] == {"error": 3}
    again = NvmlPlayer(str(path))
    assert look(again) == asked
    assert asked[0].foreign_pids == [455]
    assert asked[0].power_w is None
