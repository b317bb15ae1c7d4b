"""How a chain's reader sees the phases that hops go through; the agents are those of `scene.chain`."""

from __future__ import annotations

from faults.cell import Phase

BEGINS: dict[Phase, tuple[str, str]] = {
    "waiting": ("writing", "first"),  # of the chain that has the logs
    "appending": ("reading", "second"),
    "finalizing": ("finalized", "second"),
    "decoding": ("tokens", "second"),
    "draining": ("writing", "first"),
}
"""The event, and its agent, from which on the phase lasts."""

ENDS: dict[Phase, tuple[str, str]] = {
    "waiting": ("agent_finished", "second"),
    "appending": ("agent_finished", "first"),
    "finalizing": ("writing", "second"),
    "decoding": ("agent_finished", "second"),
    "draining": ("agent_finished", "third"),
}
"""The event with which it is over: a signal that comes later has missed it."""

STRUCK: dict[Phase, str] = {
    "waiting": "first",
    "appending": "second",
    "finalizing": "second",
    "decoding": "second",
    "draining": "first",
}
"""The agent whose worker and engine are hit."""
