"""Plain tables that fit a width, for terminals and pipes alike; and text made safe to show."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

_GAP = 2
_NARROWEST = 4


def format_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), width: int | None = None
) -> list[str]:
    """Lines of a table without borders.

    Args:
        right: indices of the columns that are aligned to the right.
        width: cells that a line may take; the widest text columns give way. None: as wide as it needs.
    """
    table = [list(headers), *([clean(cell, lines=False) for cell in row] for row in rows)]
    widths = [max(cell_len(row[at]) for row in table) for at in range(len(headers))]
    if width is not None:
        _shrink(widths, width - _GAP * (len(widths) - 1), [at for at in range(len(widths)) if at not in right])
    return [_line(row, widths, right) for row in table]


def clip(text: str, cells: int) -> str:
    """Text cut at its end to so many cells, with an ellipsis where something was cut."""
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, cells - 1).rstrip() + "…"


def clip_middle(text: str, cells: int) -> str:
    """Text cut in its middle to so many characters of one cell each, with an ellipsis where something was cut."""
    if len(text) <= cells:
        return text
    tail = (cells - 1) // 2
    return f"{text[: cells - 1 - tail]}…{text[len(text) - tail :]}"


def clip_left(text: str, cells: int) -> str:
    """The last words of a text, in so many cells at most, with an ellipsis where something was cut."""
    if cells < 1:
        return ""
    tail = text[-cells:]
    if len(tail) == len(text) and cell_len(text) <= cells:
        return text
    while tail and cell_len(tail) > cells - 1:
        tail = tail[1:]
    return "…" + tail


def clean(text: str, *, lines: bool = True) -> str:
    """Text without control characters: what a model wrote must not move the cursor or colour a terminal.

    Args:
        lines: keep line breaks and tabs; otherwise all white space becomes single spaces.
    """
    if not lines:
        text = " ".join(text.split())
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


def number(value: int | None) -> str:
    """1,234, or a dash."""
    return "-" if value is None else f"{value:,}"


def milliseconds(value: float | None) -> str:
    """1,234, with a decimal under 100, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """12 s, 3 min 05 s, 2 h 07 min, or 3 d 04 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def _shrink(widths: list[int], room: int, text_columns: list[int]) -> None:
    while sum(widths) > room and text_columns:
        widest = max(text_columns, key=lambda at: widths[at])
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    cells = []
    for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
        text = clip(cell, width)
        space = " " * (width - cell_len(text))
        cells.append(space + text if at in right else text + space)
    return (" " * _GAP).join(cells).rstrip()
