"""What placement comes to. Pure."""

from __future__ import annotations

import msgspec

from pingpong_bus.messages import Placement, Prediction


class Plan(msgspec.Struct, frozen=True):
    """Where each agent runs, and why."""

    placement: Placement
    groups: tuple[str, ...]
    """Per agent, the group's name."""
    why: str
    predictions: tuple[Prediction, ...] = ()
    """What was to choose from, the least first; of a chain that is told its placement, that alone. Empty where no
    engine was measured, or the chain is too large."""
    predicted: Prediction | None = None
    """Of the plan itself; None where its groups were not measured, or the chain is too large."""
