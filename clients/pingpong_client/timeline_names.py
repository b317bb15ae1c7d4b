"""Names in the bars of a picture: where they fit, and cut where they fit nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pingpong_client.table import clip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS: Final = 9
_SMALL_POINTS: Final = 7
_MARGIN_PIXELS: Final = 4


class NamedBar(msgspec.Struct, frozen=True):
    """A bar that gets a name."""

    name: str
    y: float
    start: float
    end: float
    height: float
    fill: str
    """Its colour: where arrows cross the bar they pass beneath the name."""
    free_until: float
    """To where nothing else stands behind it."""
    mark_points: float = 0.0
    """Half the width of a mark at its end."""


def name_bar(axes: Axes, bar: NamedBar) -> None:
    """Write a name into its bar, else behind it, else small, along it or upright; the axes must have their scale."""
    scale = axes.transData
    unit = scale.transform((1, 0))[0] - scale.transform((0, 0))[0]  # of the axis of time, in pixels
    mark = bar.mark_points * axes.figure.dpi / 72 / unit
    end = max(bar.start, bar.end - mark)
    middle = (bar.start + end) / 2
    text = axes.text(middle, bar.y, bar.name, ha="center", va="center", fontsize=_POINTS, zorder=7, parse_math=False)
    margin = _MARGIN_PIXELS / unit
    width = text.get_window_extent().width / unit + 2 * margin
    if width <= end - bar.start:
        text.set_bbox({"facecolor": bar.fill, "edgecolor": "none", "pad": 1.5})
        return
    behind = bar.end + mark
    if behind + width <= min(bar.free_until, axes.get_xlim()[1]):
        text.set(x=behind + margin, ha="left")
        return
    text.set(fontsize=_SMALL_POINTS)
    pixels = text.get_window_extent()
    across = (end - bar.start) * unit
    along = abs(scale.transform((0, bar.height))[1] - scale.transform((0, 0))[1])
    if pixels.width <= across or across < pixels.height:
        text.set_visible(pixels.width <= across)
        return
    upright = along > across
    fits = (along if upright else across) / pixels.width
    shown = bar.name if fits >= 1 else clip(bar.name, max(2, int(fits * len(bar.name)) - 1))
    text.set(rotation=90 if upright else 0, text=shown)
