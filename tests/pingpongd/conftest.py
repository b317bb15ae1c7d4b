"""For tests of the supervisor's parts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chains_desk import Service


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pp-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def service() -> Iterator[Service]:
    """Chains on two groups, "a" and "b", that a test plays."""
    found = Service()
    yield found
    found.close()
