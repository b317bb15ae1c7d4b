"""Names in /dev/shm: a worker's processes name what they make, and nothing else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pingpong_worker.shared_memory_names import (
    FOLDER,
    PREFIX_VARIABLE,
    instance_prefix,
    segments,
    unlink_segments,
    worker_prefix,
)

SCRIPT = """
import json, sys
from multiprocessing import get_context, shared_memory
from pingpong_worker.shared_memory_names import use_own_names
{change}
used = [use_own_names(), use_own_names()]
segment = shared_memory.SharedMemory(create=True, size=64)
lock = get_context("spawn").Lock()
print(json.dumps([used, segment.name, lock._semlock.name]))
segment.close()
segment.unlink()
"""


def names(environment: dict[str, str], change: str = "") -> tuple[list[bool], str, str]:
    """Whether names of ours were used, and those of a segment and a semaphore of a process."""
    command = [sys.executable, "-c", SCRIPT.format(change=change)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    used, segment, semaphore = json.loads(done.stdout)
    return used, segment, semaphore


@pytest.fixture
def prefix(tmp_path: Path) -> Iterator[str]:
    prefix = instance_prefix(tmp_path)
    yield prefix
    unlink_segments(prefix)


def test_segments_and_semaphores_carry_the_prefix(prefix: str) -> None:
    worker = worker_prefix(prefix)
    used, segment, semaphore = names({PREFIX_VARIABLE: worker})
    assert used == [True, True]
    assert segment.startswith(f"{worker}-")
    assert len(segment) == len(worker) + 1 + 16
    assert semaphore.startswith(f"/{worker}-")


def test_a_process_without_a_prefix_keeps_pythons_names() -> None:
    used, segment, semaphore = names({PREFIX_VARIABLE: ""})
    assert used == [False, False]
    assert segment.startswith("psm_")
    assert semaphore.startswith("/mp-")


@pytest.mark.parametrize(
    "change",
    [
        "del shared_memory._SHM_SAFE_NAME_LENGTH; shared_memory._make_filename = lambda: '/psm_fixed'",
        "shared_memory._make_filename = lambda: '/psm_fixed'",
    ],
    ids=["other constants", "another function"],
)
def test_a_python_that_makes_names_in_another_way_keeps_them(prefix: str, change: str) -> None:
    used, segment, _ = names({PREFIX_VARIABLE: prefix}, change)
    assert used == [False, False]
    assert segment == "psm_fixed"


def test_only_what_has_the_prefix_is_removed(prefix: str) -> None:
    ours = [f"{prefix}-a1", f"sem.{prefix}-b2"]
    others = [f"{prefix}0-a1", f"x{prefix}-a1", f"sem.x{prefix}-a1", prefix]
    for name in (*ours, *others):
        (FOLDER / name).touch()
    try:
        assert sorted(segments(prefix)) == sorted(ours)
        assert sorted(unlink_segments(prefix)) == sorted(ours)
        assert unlink_segments(prefix) == []
        assert all((FOLDER / name).exists() for name in others)
    finally:
        for name in others:
            (FOLDER / name).unlink()


def test_two_starts_of_a_worker_have_different_prefixes(prefix: str) -> None:
    assert worker_prefix(prefix) != worker_prefix(prefix)
