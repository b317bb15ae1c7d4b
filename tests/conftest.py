"""For all tests: properties are judged by values, not by time, and the session leaves nothing in shared memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from daemon_process import orphaned_segments

os.environ["HF_HUB_OFFLINE"] = "1"  # here, before anything imports the hub's library: it reads this once

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts us in the background has us ignore Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("pingpong", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pingpong")


@pytest.fixture(scope="session", autouse=True)
def no_segment_left() -> Iterator[None]:
    """Fails if a segment is left that no process holds any more."""
    before = orphaned_segments()
    yield
    deadline = time.monotonic() + 30
    while (left := orphaned_segments() - before) and time.monotonic() < deadline:
        time.sleep(0.1)  # a resource tracker clears away what a killed engine left
    assert not left
