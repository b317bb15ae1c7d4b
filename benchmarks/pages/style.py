"""How the page's pictures look: as all pictures of the project do, and what stands for each placement."""

from __future__ import annotations

from pingpong_client.plotting import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    dress,
    new_figure,
    save,
)

__all__ = [
    "BLUE",
    "CYCLE",
    "GREEN",
    "GREY",
    "HATCHES",
    "INK",
    "MARKERS",
    "MODES",
    "ORANGE",
    "PURPLE",
    "SKY",
    "STOCK_HATCH",
    "VERMILION",
    "dress",
    "new_figure",
    "save",
]

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
