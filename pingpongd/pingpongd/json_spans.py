"""Where objects and arrays of JSON begin and end in a text, in time that grows with its length alone. Pure.

A decoder tried at every bracket in turn reads what is nested again and again. Here each bracket is read once: those
that were opened in one that fails fail with it, and one that ended is passed over.
"""

from __future__ import annotations

import re

_SPACE = r"[ \t\n\r]*+"
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
_NUMBER = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?"
_VALUE = rf"(?:{_STRING}|{_NUMBER}|true|false|null|([\[{{]))"
_ELEMENT = re.compile(_SPACE + _VALUE)
_MEMBER = re.compile(f"{_SPACE}{_STRING}{_SPACE}:{_SPACE}{_VALUE}")
_NEXT = re.compile(_SPACE + r"([,\]}])")
_BEGINS = re.compile(r"[\[{]")
_NONE = -1


def last_span(text: str) -> tuple[int, int] | None:
    """The beginning and the end of the last object or array in a text that no other holds; None where there is none."""
    ends: dict[int, int] = {}
    last, at = None, 0
    while begins := _BEGINS.search(text, at):
        start = begins.start()
        end = ends[start] if start in ends else _read(text, start, ends)
        if end == _NONE:
            at = start + 1
        else:
            last, at = (start, end), end
    return last


def _read(text: str, start: int, ends: dict[int, int]) -> int:
    """Where the object or array ends that begins there, or _NONE; `ends` learns it, and of all that it holds."""
    opened = [start]
    at, is_behind_comma, is_behind_value = start + 1, False, False
    while opened:
        is_object = text[opened[-1]] == "{"
        if not is_behind_value:
            value = (_MEMBER if is_object else _ELEMENT).match(text, at)
            if value is None and is_behind_comma:
                break
            if value is not None:
                at = value.end()
                if value[1] is not None:
                    known = ends.get(at - 1)
                    if known is None:
                        opened.append(at - 1)
                        is_behind_comma = False
                        continue
                    if known == _NONE:
                        break
                    at = known
                is_behind_value = True
        found = _NEXT.match(text, at)
        if found is None or (found[1] == "," and not is_behind_value):
            break
        at = found.end()
        if found[1] == ",":
            is_behind_comma, is_behind_value = True, False
        elif (found[1] == "}") == is_object:
            ends[opened.pop()] = at
            is_behind_value = True
        else:
            break
    ends.update(dict.fromkeys(opened, _NONE))
    return ends[start]
