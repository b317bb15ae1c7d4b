"""The chain that the cells run, and the daemon's configuration in which each phase lasts long enough to be hit."""

from __future__ import annotations

import json

from faults.cell import How, Phase
from faults.service import WATCH
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.messages import SubmitOptions

AGENTS = ("first", "second", "third")
GROUPS = ("a", "b")
OPTIONS = SubmitOptions(mode="ping-pong")
OPTIONS_OF: dict[How, SubmitOptions] = {
    "": OPTIONS,
    "grid": SubmitOptions(mode="ping-pong", exactness="grid"),
    "overlap": SubmitOptions(mode="overlap"),
}
KEPT_KEY = "kept"
"""Of the chain that an earlier life of the daemon has accepted, in cells of loading."""

_SIMULATED = """
engine = "simulated"
calibrate = false
grid_tokens = 32
slots = {slots}
drain_seconds = 20
[simulated]
step_ms = 15
row_us = 2000
start_ms = {start_ms}
max_model_len = 4096
[[groups]]
name = "a"
devices = ["cpu:0"]
[[groups]]
name = "b"
devices = ["cpu:0"]
"""


def chain() -> Chain:
    """About four seconds of work.

    The first agent writes for 1.4 s, in which the second has appended its head; the second's tail takes 0.8 s to
    prefill, in which it is finalized and has no token; then it writes for a second.
    """
    head, tail = "Read this, and what follows, with care: " * 2, " Then think of all that you have read. " * 10
    agents = [
        {"name": "first", "prompt": head, "max_tokens": 80, "ignore_eos": True},
        {"name": "second", "prompt": head + "{{first}}" + tail, "max_tokens": 60, "ignore_eos": True},
        {"name": "third", "prompt": "{{second}} and {{first}}!", "max_tokens": 12, "ignore_eos": True},
    ]
    return parse_chain(json.dumps({"name": "fault", "agents": agents}).encode())


def config(phase: Phase) -> str:
    """The daemon's, for cells of that phase."""
    start_ms = 1500 if phase == "loading" else 0
    return _SIMULATED.format(slots=len(AGENTS) if phase == "waiting" else 16, start_ms=start_ms) + WATCH


def warm_up() -> Chain:
    """A moment of work: an engine that has never made a step is given more time for one than any stop here takes."""
    return parse_chain(
        json.dumps(
            {"name": "warm-up", "agents": [{"name": "only", "raw_prompt": "warm up " * 20, "max_tokens": 10}]}
        ).encode()
    )
