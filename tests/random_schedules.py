"""Random schedules for the decode-first scheduler: real vLLM schedulers, a runner that checks, and no model.

A schedule is a seed. It gives an engine's sizes (seats, token budget, KV blocks, graphs; planning ahead or not) and a
crowd: plain requests, sessions that append and then decode, with a grid or without, and streaming-input sessions.
They arrive, stop, and are aborted at random; where memory is scarce requests are pre-empted. Time is a model's.

`run_schedule` raises `Violation` for what must never be:

- a token other than the reference's; a block that holds something else; a prompt that is not cut on its grid;
- a request, or a KV block, that is left when all is over;
- no step for long, though requests wait;
- an append that is computed while another prompt waits, unless it has starved, or memory or seats are what that waits
  for; more append tokens beside decodes than were granted;
- a request that is pre-empted, or a decode that misses a step, because of an append;
- an append that gets nothing for longer than the scheduler says, where memory and seats are plenty.
"""

from __future__ import annotations

import random

from kv_checking_runner import WrongContent
from schedule_crowd import make_crowd, run_to_end
from schedule_engine import setup_of
from schedule_world import Violation, World

MOST_STEPS = 6000


def run_schedule(seed: int) -> World:
    """Run one schedule to its end.

    Raises:
        Violation: see the module's text; or what vLLM raised, as its cause.
    """
    rng = random.Random(seed)
    world = World(setup_of(seed), rng)
    crowd = make_crowd(world)
    try:
        run_to_end(world, crowd, MOST_STEPS)
    except (Violation, WrongContent) as error:
        raise Violation(f"seed {seed}, step {world.steps}, {world.setup}: {error}") from error
    except (AssertionError, KeyError, IndexError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise Violation(f"seed {seed}, step {world.steps}, {world.setup}: {type(error).__name__} {error}") from error
    return world


__all__ = ["Violation", "World", "run_schedule", "setup_of"]
