"""Refused frames are all counted."""

from __future__ import annotations

from structlog.testing import capture_logs

from pingpongd.refusals import Refusals


def test_all_are_counted_and_say_where() -> None:
    refusals = Refusals("control.sock")
    with capture_logs() as logs:
        for number in range(3):
            refusals.add(f"garbage {number}", peer="ann")
    assert refusals.count == 3
    assert logs[0] == {
        "event": "frame_refused",
        "log_level": "warning",
        "socket": "control.sock",
        "why": "garbage 0",
        "peer": "ann",
    }
