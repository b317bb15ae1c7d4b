"""A part of JSONPath (RFC 9535): which values of a JSON document a path names. Pure.

::

    $                the whole value
    .title           a member of an object; a name of letters, digits and _ that begins with no digit
    ['my-title']     a member by any name, in single or double quotes, with JSON's escapes
    [0]  [-1]        an element of an array, from its beginning or its end
    [*]  .*          all elements of an array, or all members of an object

A path without [*] names one value or none. There are no filters, slices, lists of selectors or `..`.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple


class Path(NamedTuple):
    """A parsed path."""

    steps: tuple[str | int | None, ...]
    """A member's name, an element's index, or None for all of them."""

    @property
    def is_one(self) -> bool:
        """Whether it names one value at most."""
        return None not in self.steps


_NAME = re.compile(r"\.(?:(\*)|([^\W\d]\w*))")
_BRACKET = re.compile(
    r"""\[\s*(?:(\*)|(0|-?[1-9][0-9]{0,14})|'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")\s*\]""", re.DOTALL
)
_IN_SINGLE = re.compile(r"""\\(.)|\"""", re.DOTALL)


def parse_path(text: str) -> Path:
    """Read a path.

    Raises:
        ValueError: it is none of these; its text says where.
    """
    if not text.startswith("$"):
        raise ValueError('it does not begin with "$"')
    steps: list[str | int | None] = []
    at = 1
    while at < len(text):
        if found := _NAME.match(text, at):
            steps.append(None if found[1] else found[2])
        elif found := _BRACKET.match(text, at):
            steps.append(_bracket(found, at))
        else:
            raise ValueError(f"\"{text[at : at + 12]}\" at character {at} is not .name, [0], ['name'], [*] or .*")
        at = found.end()
    return Path(tuple(steps))


def find(path: Path, value: Any) -> list[Any]:
    """The values that a path names in a decoded document, in the document's order; empty where there are none."""
    found = [value]
    for step in path.steps:
        found = [one for each in found for one in _children(step, each)]
    return found


def _children(step: str | int | None, value: Any) -> list[Any]:
    match step, value:
        case None, list():
            return list(value)
        case None, dict():
            return list(value.values())
        case str(), dict() if step in value:
            return [value[step]]
        case int(), list() if -len(value) <= step < len(value):
            return [value[step]]
    return []


def _bracket(found: re.Match[str], at: int) -> str | int | None:
    star, number, single, double = found.groups()
    if star is not None:
        return None
    if number is not None:
        return int(number)
    quoted = double if double is not None else _IN_SINGLE.sub(_as_in_double, single)
    try:
        name = json.loads(f'"{quoted}"', strict=False)
    except ValueError:
        raise ValueError(f"the name at character {at} has an escape that JSON does not know") from None
    assert isinstance(name, str)  # noqa: S101 - it is in quotes
    return name


def _as_in_double(found: re.Match[str]) -> str:
    """An escape or a quote within single quotes, as JSON writes it within double ones."""
    if found[1] == "'":
        return "'"
    return found[0] if found[1] is not None else '\\"'
