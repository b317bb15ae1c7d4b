"""vLLM's scheduler with our patches, without an engine: sessions that want more memory than there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patched_vllm import make_copy

pytest.importorskip("vllm")

SCHEDULES = 24
_TESTS = Path(__file__).parents[1]


def _run(copy: Path | None) -> dict[str, Any]:
    paths = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, str(_TESTS / "paused_sessions.py"), str(SCHEDULES)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), *paths] if copy else paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def test_idle_sessions_give_way_and_lose_nothing(tmp_path: Path) -> None:
    patched = _run(make_copy(tmp_path / "site", ["idle-sessions-give-way"]))
    assert patched["abilities"] == ["append-without-sampling", "idle-sessions-give-way"]
    assert patched["fault"] == ""
    assert patched["taken"] > 0, "memory was never scarce"


def test_without_the_patch_they_lock_each_other_out() -> None:
    """Why we reserve memory for them on stock vLLM; where this fails the patch may be no longer needed."""
    stock = _run(None)
    assert stock["abilities"] == []
    assert "no end after" in stock["fault"]
