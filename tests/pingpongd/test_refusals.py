"""Refused frames: all counted, few logged."""

from __future__ import annotations

from structlog.testing import capture_logs

from pingpongd.refusals import LOG_SECONDS, Refusals


def test_all_are_counted_and_a_line_says_how_many_went_without_one() -> None:
    now = 100.0
    refusals = Refusals("control.sock", clock=lambda: now)
    with capture_logs() as logs:
        for number in range(1000):
            refusals.add(f"garbage {number}" + "x" * 10_000, peer="ann")
        now += LOG_SECONDS
        refusals.add("more")
    assert refusals.count == 1001
    assert [(line["event"], line["suppressed"]) for line in logs] == [("frame_refused", 0), ("frame_refused", 999)]
    assert len(logs[0]["why"]) == 500
    assert logs[0]["socket"] == "control.sock"
