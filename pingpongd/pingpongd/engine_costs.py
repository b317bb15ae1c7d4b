"""The costs of all groups' engines, kept from one prediction to the next. Pure."""

from __future__ import annotations

from pingpong_bus.messages import EngineFigures
from pingpongd.engine_cost import EngineCost, slowed
from pingpongd.shapes import GroupView

_SLOWDOWN_STEP = 0.05
"""Slowdowns are told apart so far: they change every second, and costs need not be made anew each time."""


class EngineCosts:
    """The costs of engines, made once of the figures that they have."""

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}
        self._slowed: dict[str, _Made] = {}

    def of(self, view: GroupView) -> EngineCost:
        """The costs of a group's engine, which has figures: as it was measured, or slowed where the group is."""
        slowdown = round(max(1.0, view.slowdown) / _SLOWDOWN_STEP) * _SLOWDOWN_STEP if view.degraded else 1.0
        kept = self._made if slowdown == 1.0 else self._slowed
        made = kept.get(view.name)
        if made is None or made.figures is not view.figures or made.slowdown != slowdown:
            made = kept[view.name] = _Made(view, slowdown)
        return made.cost


class _Made:
    """An engine's costs, and what they were made of."""

    def __init__(self, view: GroupView, slowdown: float) -> None:
        assert view.figures is not None  # noqa: S101 - groups without figures are never predicted for
        self.figures, self.slowdown = view.figures, slowdown
        figures = view.figures if slowdown == 1.0 else slowed(view.figures, slowdown)
        self.cost = EngineCost(figures, paced=view.paced)


def usable(figures: EngineFigures | None) -> bool:
    """Whether there is enough in figures to predict from."""
    return figures is not None and bool(figures.prefill) and bool(figures.decode)
