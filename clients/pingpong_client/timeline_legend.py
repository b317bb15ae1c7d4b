"""The colours and marks of a timeline's picture, and the legend that says what they are."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from pingpong_client import plotting
from pingpong_client.timeline_account import PathKind

EDGE: Final = "#444444"
_LABELS: Final = {
    "prefill": "prefill: the chain waits for it",
    "append": "append: prefill that is read ahead",
    "decode": "decode",
    "step": "step between agents",
    "wait": "open, waits for tokens",
    "wasted": "done again or void; losses and moves",
}
PATH: Final[dict[PathKind, str]] = {
    "queue": plotting.GREY,
    "wait": plotting.WORK["wait"],
    "prefill": plotting.WORK["prefill"],
    "decode": plotting.WORK["decode"],
    "step": plotting.WORK["step"],
    "recovery": plotting.WORK["wasted"],
}
PATH_LABELS: Final[dict[PathKind, str]] = {
    "queue": "in the queue",
    "wait": "waits to start",
}
MARKS: Final = {
    "lost": ("X", "lost with its worker"),
    "moved": (">", "moved elsewhere"),
    "failed": ("P", "failed"),
    "aborted": ("s", "aborted"),
}
"""At a hop's end: the marker, and what it says."""


def handles(seen: Set[str]) -> list[object]:
    """The entries for what was drawn: kinds of spans, ends of hops, "tokens", and "path queue" and the like."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found: list[object] = []
    for kind, label in _LABELS.items():
        if kind == "wait" and kind in seen:
            found.append(Line2D([], [], color=plotting.GREY, linewidth=2, label=label))
        elif kind in seen:
            found.append(Patch(facecolor=plotting.WORK[kind], edgecolor=EDGE, linewidth=0.5, label=label))
    for path_kind, label in PATH_LABELS.items():
        if f"path {path_kind}" in seen:
            found.append(Patch(facecolor=PATH[path_kind], edgecolor=EDGE, linewidth=0.5, label=label))
    for state, (marker, label) in MARKS.items():
        if state in seen:
            found.append(Line2D([], [], color=plotting.INK, marker=marker, linestyle="none", label=label))
    if "tokens" in seen:
        found.append(Line2D([], [], color=plotting.INK, marker="v", markersize=4, linewidth=0.8, label="tokens read"))
    return found
