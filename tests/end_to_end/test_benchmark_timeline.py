"""The benchmark's timeline: the runs that it picks, and that a picture comes out."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from pingpong_bus.errors import DataError
from timeline import draw, typical
from timeline_samples import in_series, read_ahead

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu-bfloat16-cold.jsonl"


def test_the_run_nearest_to_the_median_is_picked(tmp_path: Path) -> None:
    (first, *_) = RESULTS.read_bytes().splitlines()
    lines = []
    for e2e_ms in (1000.0, 1500.0, 9000.0):
        run = msgspec.json.decode(first)
        run |= {"mode": "serial", "warmup": False, "e2e_ms": e2e_ms}
        run["result"]["e2e_ms"] = e2e_ms
        lines.append(msgspec.json.encode(run))
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert typical(path, "serial").e2e_ms == 1500
    with pytest.raises(DataError, match="has no overlap run"):
        typical(path, "overlap")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_draw_writes_a_picture_and_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "images" / "timeline.svg"
    draw(in_series(), read_ahead(), path)
    text = path.read_text()
    assert "In series: 0.9 s" in text
    assert "Read ahead (ping-pong): 0.7 s, 14.1 % less" in text
