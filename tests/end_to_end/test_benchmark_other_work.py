"""What others use of the machine is told from what is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from other_work import OtherWork

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
"""Uses 0.3 s of a core, says so and waits."""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_work_of_ones_own_children_is_not_that_of_others(busy: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    others = OtherWork([])
    assert busy.stdout is not None
    busy.stdout.readline()
    used = sum(psutil.Process(busy.pid).cpu_times()[:2])
    with_child = others.cores() * (time.monotonic() - began)
    busy.kill()
    busy.wait()
    # Whoever has ended is not found any more, and what it used is taken for that of others.
    without_child = others.cores() * (time.monotonic() - began)
    assert used >= 0.25
    assert without_child - with_child >= used - 0.1


def test_a_number_of_no_process_is_left_out() -> None:
    assert OtherWork([2**22 + os.getpid()]).cores() >= 0.0


def test_ones_own_work_is_counted() -> None:
    others = OtherWork([])
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    assert others.own_s() >= 0.25
