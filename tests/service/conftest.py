"""A booted machine for each test that asks for one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service_machine import Machine, why_not

REASON = why_not()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A systemd of the test's own, in which this checkout can be run by anybody."""
    if REASON is not None:
        pytest.skip(f"a systemd of its own {REASON}")
    with Machine(tmp_path / "machine") as booted:
        for folder in Path(sys.executable).resolve().parents:  # an interpreter in a closed home
            booted.run("chmod", "o+x", str(folder), check=True)
        yield booted
