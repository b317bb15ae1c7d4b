"""A row of small bars for a row of numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*#@"
_SCALE = 2.25
"""Of eight bars the fourth is then what took 0.84 to 1.12 times the usual: noise does not make it jump."""


def sparkline(values: Sequence[float], cells: int, *, usual: float = 0.0, ascii_only: bool = False) -> str:
    """The latest values, one a cell and the newest on the right; 0 is a blank.

    The scale begins at 0 and ends at a little over twice the usual or at the highest value, whichever is more: what is
    as usual stands at half the height, and a flat line is never blown up into a wild one.

    Args:
        values: the oldest first, none below 0.
        cells: how many there is room for.
        usual: 0: the highest value fills the height.
    """
    shown = list(values[-cells:]) if cells > 0 else []
    top = max([_SCALE * usual, *shown], default=0.0)
    bars = _ASCII if ascii_only else _BARS
    drawn = "".join(" " if value <= 0 else bars[min(len(bars) - 1, int(value / top * len(bars)))] for value in shown)
    return drawn.rjust(cells)


def meter(share: float, cells: int, *, ascii_only: bool = False) -> str:
    """A bar that is filled to a share, 0 to 1."""
    filled = round(min(max(share, 0.0), 1.0) * cells)
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    return full * filled + empty * (cells - filled)
