"""How the page's pictures look, and how they are written so that the same data gives the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 10.0
# Okabe and Ito's palette, which colour-blind people can tell apart.
BLUE, VERMILION, ORANGE, GREEN, SKY, PURPLE = "#0072B2", "#D55E00", "#E69F00", "#009E73", "#56B4E9", "#CC79A7"
GREY, INK = "#8C8C8C", "#333333"
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY, INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MODES = {
    "serial": GREY,
    "presend": ORANGE,
    "ping-pong": BLUE,
    "overlap": GREEN,
    "auto": PURPLE,
    "round-robin": GREY,
}
"""By placement; the same in all pictures."""
HATCHES = {"auto": "///"}
STOCK_HATCH = "..."
"""Over the colour of a placement under vLLM's own scheduler."""
_SALT = "pingpongd"


def new_figure(height_inches: float, width_inches: float = WIDTH_INCHES) -> Figure:
    """An empty figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    # White behind everything: readable on a dark page, too.
    return Figure(figsize=(width_inches, height_inches), layout="constrained", facecolor="white")


def dress(axes: Axes, title: str, x: str, y: str, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Title, names of the axes, a light grid, and no more lines than are needed."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a figure; an SVG's names and metadata depend on nothing but its content."""
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": _SALT}):
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=110)
