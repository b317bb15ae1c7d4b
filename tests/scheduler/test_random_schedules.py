"""The decode-first scheduler on the installed vLLM's, without an engine: random schedules, and what one step holds.

`random_schedules.py` says what is checked in every step; `benchmarks/scheduler_simulation.py` runs as many schedules as
one likes, on any vLLM that can be imported.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # what torch and vLLM say is not ours to mend

SCHEDULES = 200


def _schedule_anyway(scheduler: Any) -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler.schedule(scheduler)


@pytest.fixture(scope="module")
def schedules() -> Any:
    import random_schedules  # imports vLLM, which warns

    return random_schedules


def test_no_schedule_goes_wrong(schedules: Any) -> None:
    worlds = _run_all(schedules)
    setups = [world.setup for world in worlds]
    assert sum(setup.asynchronous for setup in setups) == SCHEDULES / 2
    assert sum(setup.streaming for setup in setups) > SCHEDULES / 5
    assert sum(world.preempted for world in worlds) > SCHEDULES / 10
    assert sum(world.kept > 0 for world in worlds) > SCHEDULES / 10
    assert sum(world.runner.accepted for world in worlds) > 10 * SCHEDULES
    assert sum(world.runner.guessed - world.runner.accepted for world in worlds) > SCHEDULES
    assert sum(world.waited > 0 for world in worlds) > SCHEDULES / 10


@pytest.mark.parametrize(
    ("part", "replacement", "words"),
    [
        ("hold_cache_to_grid", lambda manager: None, "no cell of|not computed in a cell"),
        ("cell_tokens", lambda start, end, grid: end - start, "are no cell of"),
        ("is_append", lambda request: False, "are computed while|were granted"),
        ("DecodeFirstSteps._may_be_admitted", lambda *arguments: True, "has room|nothing was computed"),
        ("DecodeFirstSteps._empty_step", _schedule_anyway, "are known|waits|is to be computed"),
        ("DecodeFirstSteps._choose_favoured", lambda *arguments: None, "got nothing|got anything|nothing was computed"),
    ],
)
def test_what_is_broken_is_found(
    schedules: Any, monkeypatch: pytest.MonkeyPatch, part: str, replacement: Any, words: str
) -> None:
    monkeypatch.setattr(f"pingpong_worker.vllm_scheduler.{part}", replacement)
    with pytest.raises(schedules.Violation, match=words):
        _run_all(schedules)


def _run_all(schedules: Any) -> list[Any]:
    return [schedules.run_schedule(seed) for seed in range(SCHEDULES)]
