"""Columns of fixed places for a screen that is drawn again and again: nothing jumps when a number grows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from pingpong_client.table import clean, clip

WIDE = 100
"""Cells from which on a screen is a wide one."""
_GAP = 1


@dataclass(frozen=True)
class Column:
    """One column of a `fixed_table`; its title is the key of its cells."""

    title: str
    cells: int
    """Its width; of the one that stretches, the least."""
    right: bool = False
    stretch: bool = False
    """Takes what the others leave; one column of a table does."""
    from_width: int = 0
    """Screens that are narrower go without it."""
    wide: int = 0
    """Its width on wide screens; 0: the same."""


@dataclass
class Block:
    """Lines that stand together: a row and what belongs to it."""

    lines: list[Text] = field(default_factory=list)


def widths(columns: Sequence[Column], width: int) -> dict[str, int]:
    """The cells of each column that a screen of this width shows."""
    shown = [column for column in columns if width >= column.from_width]
    cells = {column.title: column.wide if column.wide and width >= WIDE else column.cells for column in shown}
    left = max(0, width - sum(cells.values()) - _GAP * (len(shown) - 1))
    return {column.title: cells[column.title] + (left if column.stretch else 0) for column in shown}


def heading(columns: Sequence[Column], width: int) -> Text:
    """The line of the titles."""
    line = row(columns, {column.title: column.title for column in columns}, width)
    line.stylize("bold")
    return line


def row(columns: Sequence[Column], cells: Mapping[str, str | Text], width: int) -> Text:
    """One line; a cell that is too long is cut, and one that is absent is blank."""
    line = Text(no_wrap=True, overflow="crop")
    room = widths(columns, width)
    for column in columns:
        if column.title not in room:
            continue
        if line.cell_len:
            line.append(" " * _GAP)
        line.append_text(_fitted(cells.get(column.title, ""), room[column.title], right=column.right))
    line.rstrip()
    line.truncate(width)
    return line


def one_line(text: str, width: int, style: str = "") -> Text:
    """A line of text from anywhere, cut to the screen."""
    return Text(clip(clean(text, lines=False), width), style=style, no_wrap=True, overflow="crop")


def wrapped(text: str, width: int, most: int, style: str = "", indent: str = "  ") -> list[Text]:
    """A sentence on so many lines at most, the last of them cut where it does not end there."""
    lines: list[str] = []
    rest = clean(text, lines=False)
    room = max(width - len(indent), 1)
    while rest and len(lines) < most - 1 and cell_len(rest) > room:
        head = clip(rest, room + 1).removesuffix("…")
        head = head[: head.rfind(" ")] if " " in head else head
        lines.append(head)
        rest = rest[len(head) :].lstrip()
    if rest:
        lines.append(clip(rest, room))
    return [Text(indent + line, style=style, no_wrap=True, overflow="crop") for line in lines]


def _fitted(cell: str | Text, cells: int, *, right: bool) -> Text:
    style = ""
    if isinstance(cell, Text):
        if cell.cell_len == cells:
            return cell
        style = str(cell.style)
        cell = cell.plain
    text = clip(clean(cell, lines=False), cells)
    padding = " " * (cells - cell_len(text))
    return Text(padding + text if right else text + padding, style=style)
