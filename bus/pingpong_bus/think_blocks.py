"""Leaves `<think>...</think>` blocks out of an output, while it streams in. Pure.

Nothing of a block is passed on before it is known to be none:

======================================= ==============================================================================
the output                              what is passed on
======================================= ==============================================================================
holds whole blocks                      all that is outside them
ends inside a block                     what stands before that block: thoughts that were cut off are thoughts
begins inside a block, since the        what follows the first `</think>`; nothing where there is none
prompt's end has opened it
holds a `</think>` that closes nothing  everything but that tag; where it is not known whether the output began inside
                                        a block, what follows the tag
======================================= ==============================================================================

Blocks do not nest: the first `</think>` closes. White space in front of all text, and between a block there and the
text, is left out where there is such a block, so that what is passed on begins with its first word.

Where it is not known whether an output began inside a block (`inside` is None), it is held back up to its first tag,
and to its end where it has none.
"""

from __future__ import annotations

import re

__all__ = ["ThinkFilter", "opens_block", "without_blocks"]

OPEN, CLOSE = "<think>", "</think>"
_TAG = re.compile(f"{OPEN}|{CLOSE}")


class ThinkFilter:
    """The filter of one output.

    Args:
        inside: whether the output begins inside a block; None: that is not known.
    """

    def __init__(self, *, inside: bool | None = None) -> None:
        self._inside = inside
        self._text: list[str] = []
        """Held back because it is not known what it belongs to."""
        self._rest = ""
        """The end of what came, which may be the beginning of a tag."""
        self._passed = False
        """Whether anything but white space was passed on."""
        self._blocks = False
        """Whether there was a block."""
        self._finished = False

    def feed(self, text: str) -> str:
        """Take the output's next characters; returns what is known now to be no part of a block."""
        if self._finished:
            raise ValueError("the output has ended")
        text = self._rest + text
        passed: list[str] = []
        at = 0
        while at < len(text):
            tag, found = _next_tag(text, at)
            end = found if tag else len(text) - _begun(text, at)
            self._take(text[at:end], passed)
            if not tag:
                at = end
                break
            self._meet(tag, passed)
            at = found + len(tag)
        self._rest = text[at:]
        return "".join(passed)

    def finish(self) -> str:
        """The output has ended: what was held back and belongs to no block."""
        passed: list[str] = []
        self._take(self._rest, passed)
        self._rest, self._finished = "", True
        if not self._inside:
            held, self._text = "".join(self._text), []
            passed.append(held if not self._blocks or self._passed else held.lstrip())
        return "".join(passed)

    def _take(self, text: str, passed: list[str]) -> None:
        """Text without a tag."""
        if not text or self._inside:
            return
        self._text.append(text)
        if self._inside is None:
            return
        if self._passed:
            self._pass(passed)
        elif not text.isspace():
            # White space at the beginning has waited for what comes first, a block or a word.
            held = "".join(self._text)
            self._text = [held.lstrip() if self._blocks else held]
            self._pass(passed)

    def _meet(self, tag: str, passed: list[str]) -> None:
        if tag == OPEN:
            if self._inside is None:  # so it began outside
                self._inside = False
                held, self._text = "".join(self._text), []
                self._take(held, passed)
            self._inside = True
            self._blocks = True
        elif self._inside is not False:
            if self._inside is None:  # what came was the block
                self._text.clear()
            self._inside = False
            self._blocks = True

    def _pass(self, passed: list[str]) -> None:
        passed.append("".join(self._text))
        self._text.clear()
        self._passed = True


def without_blocks(text: str, *, inside: bool | None = None) -> str:
    """A whole output without its blocks; `inside` as for `ThinkFilter`."""
    blocks = ThinkFilter(inside=inside)
    return blocks.feed(text) + blocks.finish()


def opens_block(prompt: str) -> bool:
    """Whether a prompt's end has opened a block, so that the answer begins inside it."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE)


def _next_tag(text: str, start: int) -> tuple[str, int]:
    """The first whole tag from `start` on, and where it begins; ("", -1) where there is none."""
    found = _TAG.search(text, start)
    return (found.group(), found.start()) if found else ("", -1)


def _begun(text: str, start: int) -> int:
    """How many of the last characters may be the beginning of a tag."""
    for length in range(min(len(CLOSE) - 1, len(text) - start), 0, -1):
        end = text[-length:]
        if OPEN.startswith(end) or CLOSE.startswith(end):
            return length
    return 0
