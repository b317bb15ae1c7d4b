"""The check that every test session ends with: what a living process holds in shared memory is no leftover."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from daemon_process import orphaned_segments


def semaphores() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").glob("sem.*")}


def test_a_semaphore_or_a_segment_that_is_in_use_is_no_leftover() -> None:
    before = semaphores()
    lock = multiprocessing.get_context("spawn").Lock()  # as an engine's: its name stays for as long as it is used
    segment = SharedMemory(create=True, size=64)
    try:
        assert semaphores() - before
        assert not orphaned_segments() & {segment.name, *(semaphores() - before)}
    finally:
        segment.close()
        segment.unlink()
    del lock


def test_a_segment_that_nobody_maps_is_one() -> None:
    left = Path(f"/dev/shm/pingpong-test-{os.getpid()}")
    left.write_bytes(b"x")
    try:
        assert left.name in orphaned_segments()
    finally:
        left.unlink()
