"""Streaming-input sessions that want more memory than there is, on the scheduler of whichever vLLM can be imported.

    python tests/paused_sessions.py SCHEDULES

Runs them until one goes wrong, and prints one line of JSON: its fault, or none, and sessions whose blocks were taken.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from kv_checking_runner import WrongContent
from schedule_crowd import Actor, Plain, Stream, run_to_end
from schedule_engine import ABILITIES, BLOCK, LONGEST, Setup
from schedule_world import Violation, World

MOST_STEPS = 4000


def setup_of(seed: int) -> Setup:
    """Seats for all, and memory for little more than the longest of them."""
    return Setup(
        asynchronous=seed % 2 == 1,
        seats=16,
        budget=random.Random(seed).choice((64, 256)),
        blocks=LONGEST // BLOCK + 2,
        graphs=(),
        streaming=True,
    )


def run(seed: int) -> int:
    """Run one schedule; gives how many sessions had their blocks taken.

    Raises:
        Violation: something went wrong.
    """
    rng = random.Random(seed)
    world = World(setup_of(seed), rng)
    taken = _count(world.scheduler)
    crowd: list[Actor] = [(Plain if index == 0 else Stream)(world, f"{index}") for index in range(7)]
    for one in crowd:
        one.aborts = None
    try:
        run_to_end(world, crowd, MOST_STEPS)
    except (AssertionError, WrongContent, LookupError, ValueError, RuntimeError, TypeError) as error:
        raise Violation(f"seed {seed}, step {world.steps}: {type(error).__name__} {error}") from error
    return taken[0]


def _count(scheduler: Any) -> list[int]:
    taken = [0]
    take = getattr(scheduler, "_reclaim_idle_session", None)
    if take is not None:

        def counted(*args: Any, **kwargs: Any) -> bool:
            found = bool(take(*args, **kwargs))
            taken[0] += found
            return found

        scheduler._reclaim_idle_session = counted
    return taken


def main() -> int:
    """Run the schedules."""
    fault = ""
    taken = 0
    for seed in range(int(sys.argv[1])):
        try:
            taken += run(seed)
        except Violation as error:
            fault = str(error)
            break
    sys.stdout.write(json.dumps({"abilities": sorted(ABILITIES), "fault": fault, "taken": taken}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
