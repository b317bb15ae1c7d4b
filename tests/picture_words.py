"""The words of a picture, and whether they stand apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text


def crowded(figure: Figure) -> list[str]:
    """What words of a figure overlap each other or leave it; empty where none do."""
    figure.draw_without_rendering()
    whole = figure.get_window_extent()
    shown = [(one.get_text(), one.get_window_extent()) for one in _words(figure)]
    if not shown:
        return ["there are no words at all"]
    found = [
        f"{text!r} leaves the picture"
        for text, box in shown
        if box.x0 < whole.x0 - 1 or box.x1 > whole.x1 + 1 or box.y0 < whole.y0 - 1 or box.y1 > whole.y1 + 1
    ]
    for at, (text, box) in enumerate(shown):
        found += [f"{text!r} over {other!r}" for other, beside in shown[at + 1 :] if box.padded(-1).overlaps(beside)]
    return found


def _words(figure: Figure) -> list[Text]:
    found: list[Text] = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += axes.texts
        if not axes.axison:
            continue
        found += [axes.title, axes._left_title, axes._right_title]  # type: ignore[attr-defined]
        for axis in (axes.xaxis, axes.yaxis):
            found += [axis.label, axis.get_offset_text()]
            # Of all ticks that there are, those that are drawn.
            found += [tick.label1 for tick in axis._update_ticks() if tick.label1.get_visible()]  # type: ignore[attr-defined]
    return [text for text in found if text.get_visible() and text.get_text().strip()]
