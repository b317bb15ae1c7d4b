"""Tables and numbers as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTHING = "\N{EN DASH}"
"""In a table where there is no figure."""


def opened(title: str, *paragraphs: str, level: int = 3) -> list[str]:
    """A heading and what stands under it."""
    return [f"{'#' * level} {title}", "", *(line for paragraph in paragraphs for line in (paragraph, ""))]


def table(header: Sequence[str], lines: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """A table, and an empty line after it.

    Args:
        left: columns that hold words; the others hold numbers and are set to the right.
    """
    rules = [" --- " if at < left else " --: " for at in range(len(header))]
    body = [f"| {' | '.join(line)} |" for line in lines]
    return [f"| {' | '.join(header)} |", f"|{'|'.join(rules)}|", *body, ""]


def number(value: float | None, digits: int = 0) -> str:
    """With thousands set apart, and a real minus sign."""
    return NOTHING if value is None else _signed(f"{value:,.{digits}f}")


def percent(value: float | None, digits: int = 1) -> str:
    """A number of percents."""
    return NOTHING if value is None else f"{_signed(f'{value:,.{digits}f}')} %"


def ratio(value: float | None) -> str:
    """With three digits behind the point."""
    return number(value, 3)


def counted(exact: int, of: int) -> str:
    """So many of so many."""
    return f"{exact} of {of}"


def series(name: str) -> str:
    """A mode or placement as the page calls it: what results call "serial" is "series"."""
    return name.replace("serial", "series")


def _signed(text: str) -> str:
    """No negative zero, and a minus sign as wide as a plus sign."""
    zero = not text.strip("-0.,")
    return text.lstrip("-") if zero else text.replace("-", "\N{MINUS SIGN}")
