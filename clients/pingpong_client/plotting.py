"""How pictures look, and how they are written: the same data gives the same bytes.

matplotlib is imported when one is drawn. A client machine has it only with the extra `plots`; without it what draws
raises a UsageError that names it.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Literal

from pingpong_bus.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES: Final = 10.0
# Okabe and Ito's palette, which colour-blind people can tell apart.
BLUE, VERMILION, ORANGE, GREEN, SKY, PURPLE = "#0072B2", "#D55E00", "#E69F00", "#009E73", "#56B4E9", "#CC79A7"
YELLOW = "#F0E442"
GREY, INK, LIGHT = "#8C8C8C", "#333333", "#dddddd"
CYCLE: Final = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY, INK)
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
WORK: Final = {
    "prefill": BLUE,
    "append": ORANGE,
    "decode": "#B7E3D3",
    "step": PURPLE,
    "wait": LIGHT,
    "wasted": VERMILION,
}
"""By what is done for a chain; apart in grey, too, but for the last."""
DPI: Final = 110
_SALT = "pingpongd"
_FONT = "DejaVu Sans"
"""The one that comes with matplotlib: text is as wide everywhere as where it was laid out."""


def require() -> None:
    """Import matplotlib.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UsageError(
            f"pictures take matplotlib, which cannot be imported ({error}).",
            hint="Install it with `pip install 'pingpongd[plots]'`, or ask for text or JSON.",
        ) from None
    mpl.rcParams["font.family"] = _FONT


def new_figure(height_inches: float, width_inches: float = WIDTH_INCHES) -> Figure:
    """An empty figure, white behind everything: readable on a dark page, too.

    Raises:
        UsageError: matplotlib is not installed.
    """
    require()
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches), layout="constrained", facecolor="white")


def dress(
    axes: Axes, title: str, x: str, y: str, *, grid: Literal["both", "x", "y"] = "both", pad: float | None = None
) -> None:
    """Title, names of the axes, a light grid, and no more lines than are needed.

    Args:
        pad: points beneath the title; None: as few as are needed.
    """
    # No mathematics: what chains and groups are called may have dollars.
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=pad, parse_math=False)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(axis=grid, color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path, *, dpi: int = DPI) -> None:
    """Write a figure in the form of the path's suffix, such as ".png" or ".svg"; folders are made.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        _write(figure, file, path.suffix.lstrip(".").lower(), dpi)


def png(figure: Figure, *, dpi: int = DPI) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    _write(figure, buffer, "png", dpi)
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """A figure as an SVG file."""
    buffer = io.BytesIO()
    _write(figure, buffer, "svg", DPI)
    return buffer.getvalue()


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """A figure as an `svg` element to stand in an HTML page: it needs no other file and fits the page's width.

    Args:
        name: of letters and digits; begins all ids inside, so that several pictures may stand in one page.
        label: what it shows, for those who cannot see it.
    """
    text = svg(figure).decode()
    text = text[text.index("<svg") :]  # without the XML declaration and the doctype, which HTML has not
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    safe = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (?:width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{safe}" style="width: 100%; height: auto">{rest}'


def _write(figure: Figure, file: IO[bytes], form: str, dpi: int) -> None:
    """An SVG's ids and metadata depend on nothing but its content."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": _SALT}):
        metadata = {"Date": None, "Creator": None} if form == "svg" else None
        figure.savefig(file, format=form, metadata=metadata, dpi=dpi)
