"""Our engine on a patched copy of vLLM, and the same on the installed one: it works on both, and uses what is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patched_vllm import make_copy
from pingpong_worker.model_store import EMBEDDED_MODEL, resolve_model
from pingpong_worker.vllm_abilities import installed_abilities

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

LIMIT_S = 240


def _run(folder: Path, copy: Path | None) -> dict[str, Any]:
    (folder / "t").mkdir()
    paths = [*([str(copy)] if copy else ()), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("patched_engine.py")), str(resolve_model(EMBEDDED_MODEL))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder / "t"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    answers = [line.removeprefix("answer ") for line in ended.stdout.splitlines() if line.startswith("answer ")]
    assert answers, ended.stderr[-3000:]
    return dict(json.loads(answers[-1]))


def test_a_patched_engine_feeds_seeded_agents_tells_progress_and_shares_its_memory(tmp_path: Path) -> None:
    found = _run(tmp_path, make_copy(tmp_path / "site"))
    assert {"append-without-sampling", "idle-sessions-give-way", "prefill-progress"} <= set(found["abilities"])
    # Two appends of 200 tokens, in steps of 128 at most: two steps each, and each append's own end.
    assert found["streaming"] == {"kind": "streaming-input", "equal": True, "computed": [200, 200], "heard": 6}
    prefix = found["prefix"]
    assert (prefix["kind"], prefix["equal"], prefix["heard"]) == ("prefix-cache", True, 6)
    assert prefix["computed"] == [200, 208], "from the last whole block on"
    assert found["crowded"] == {"kinds": ["streaming-input"] * 3, "equal": True}


@pytest.mark.skipif(bool(installed_abilities()), reason="the installed vLLM is patched")
def test_a_stock_engine_works_without(tmp_path: Path) -> None:
    found = _run(tmp_path, None)
    assert found["abilities"] == []
    assert found["streaming"] == {"kind": "prefix-cache", "equal": True, "computed": [200, 208], "heard": 2}
    assert found["crowded"]["kinds"] == ["prefix-cache"] * 3, "there is no memory that they could reserve"
    assert found["crowded"]["equal"]
