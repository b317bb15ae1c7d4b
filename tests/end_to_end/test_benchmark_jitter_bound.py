"""The benchmark of what acting on slow groups is worth."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec

from jitter_bound import STEADY, WOBBLY, Bursts, daemon_toml
from jitter_bound_report import BoundRow, render
from pingpongd.config import parse_config

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "jitter_bound.py"
ROW = BoundRow(
    way="series",
    burst_s=10.0,
    every_s=20.0,
    factor=2.0,
    seed=0,
    at_once=1,
    agents=5,
    prefix=4096,
    output=256,
    e2e_ms=[1000.0, 1100.0, 1200.0],
    placements=["serial"] * 3,
    moved=[0, 0, 0],
    on_wobbly=[0, 5, 0],
    episodes=1,
    rerouted=0,
)


def test_one_group_of_two_has_bursts() -> None:
    config = parse_config(tomllib.loads(daemon_toml(Bursts(3.0, 10.0, 2.0, 7, 20.0), acts=False)))
    steady, wobbly = config.groups
    assert (steady.name, wobbly.name, steady.simulated) == (STEADY, WOBBLY, None)
    assert wobbly.simulated is not None
    assert (
        msgspec.structs.replace(
            wobbly.simulated, burst_factor=1.0, burst_s=0.0, burst_every_s=60.0, burst_seed=0, burst_after_s=0.0
        )
        == config.simulated
    )
    assert (config.jitter.enabled, config.jitter.route, config.jitter.move) == (True, False, False)


def test_ways_are_compared_with_series_under_the_same_load() -> None:
    auto = msgspec.structs.replace(ROW, way="auto", e2e_ms=[990.0, 1089.0, 1188.0], moved=[0, 2, 0])
    other = msgspec.structs.replace(ROW, at_once=4, e2e_ms=[5000.0] * 3)
    first, second, third = render([ROW, auto, other]).splitlines()[2:]
    assert first.startswith("| 10 / 20 | 1 | series | 3 | 1,100 |  |  | 1,200 | 1 | 0 | 0 |")
    assert second.startswith("| 10 / 20 | 1 | auto | 3 | 1,089 | -1.0% | ")
    assert second.endswith(" | 1,188 | 1 | 2 | 0 |")
    assert third.startswith("| 10 / 20 | 4 | series | 3 | 5,000 |")


def test_a_short_run_is_kept_and_reported(tmp_path: Path) -> None:
    out = tmp_path / "bound.jsonl"
    arguments = ["--bursts", "1/1", "--seconds", "1", "--prefix", "256", "--output", "16", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--ways", "series;auto"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [msgspec.json.decode(line, type=BoundRow) for line in out.read_text().splitlines()]
    assert [row.way for row in rows] == ["series", "auto"]
    assert all(row.e2e_ms and min(row.e2e_ms) > 0 for row in rows)
    again = subprocess.run(
        [sys.executable, str(SCRIPT), "--report", str(out)], capture_output=True, text=True, timeout=60
    )
    assert again.stdout == done.stdout
