"""What an `extract` step takes out of a text: a part of its last JSON value, a match, or its last fenced block. Pure.

Regular expressions can take for ever, and long texts long: it runs in a process of its own, see `extract_process.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from markdown_it import MarkdownIt

from pingpong_bus.chain import Extract
from pingpong_bus.json_path import find, parse_path
from pingpongd.json_spans import last_span


class NotFound(LookupError):
    """There is nothing of the kind in the text; its text says what is missing, in a clause."""


def extract(spec: Extract, text: str) -> str:
    """What a step takes out of its input.

    Raises:
        NotFound: there is nothing of the kind; `Extract.otherwise` is the caller's to look at.
        ValueError: the path or the expression is none.
    """
    if spec.json is not None:
        return _from_json(spec.json, text)
    if spec.regex is not None:
        return _from_match(spec.regex, text)
    return _from_fence(spec.fenced or "", text)


def last_json(text: str) -> Any:
    """The last JSON value of a text: the text as a whole, else the last object or array in it that no other holds, else
    what the last fenced block is as a whole.

    Prose between values is passed over. A value that was cut off is none, but what is whole inside it is one.

    Raises:
        NotFound: there is none.
    """
    try:
        return _decode(text)
    except ValueError:
        pass
    if (span := last_span(text)) is not None:
        try:
            return _decode(text[slice(*span)])
        except ValueError as error:  # of a few thousand levels, or with a number of as many digits
            raise NotFound(f"its last JSON value cannot be read: {error}") from None
    for _, content in reversed(fenced_blocks(text)):
        try:
            return _decode(content)
        except ValueError:
            continue
    raise NotFound("there is no JSON value in it")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The fenced code blocks of a text by the rules of CommonMark, in lists and quotations too: the first word behind
    the opening fence, and the content without its last line break. One that nothing closes ends with the text."""
    blocks = [token for token in _MARKDOWN.parse(text) if token.type == "fence"]
    return [(next(iter(token.info.split()), ""), token.content.removesuffix("\n")) for token in blocks]


def _from_json(path: str, text: str) -> str:
    where = parse_path(path)
    found = find(where, last_json(text))
    if not found:
        raise NotFound(f"its last JSON value has no {path}")
    value = found[0] if where.is_one else found
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # 1e999, which JSON allows and no float holds
        raise NotFound(f"a number at {path} is too large") from None


def _from_match(regex: str, text: str) -> str:
    found = re.search(regex, text)
    if found is None:
        raise NotFound("the expression matches nothing in it")
    taken = found[1] if found.re.groups else found[0]
    if taken is None:
        raise NotFound("the expression matches, and its first group does not take part")
    return str(taken)


def _from_fence(language: str, text: str) -> str:
    wanted = language.casefold()
    for info, content in reversed(fenced_blocks(text)):
        if not wanted or info.casefold() == wanted:
            return content
    raise NotFound(f'there is no fenced block of "{language}" in it' if language else "there is no fenced block in it")


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _decode(text: str) -> Any:
    """The text as one JSON value; a ValueError where it is none."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # Python takes NaN and Infinity otherwise
_MARKDOWN = MarkdownIt("commonmark")
_MARKDOWN.core.ruler.enableOnly(["normalize", "block"])  # blocks alone: what stands in a line matters to none
