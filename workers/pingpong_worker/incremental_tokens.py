"""Ids of a text while it comes: only such as no later text can change, and all of them at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # needs the tokenizers library, which bare installations and simulated engines do without
    from pingpong_worker.token_cuts import CutRule

Encode = Callable[[str], list[int]]


class GrowingIds(Protocol):
    """The ids of one text."""

    def feed(self, text: str) -> list[int]:
        """Take the text's next characters; returns the next ids that are certain now."""
        ...

    def finish(self) -> list[int]:
        """The text has ended: the ids that are left."""
        ...


class IncrementalTokens:
    """Tokenizes a text cut by cut, so that all its ids together are those of the whole text at once.

    Takes time in proportion to the text, and for stretches that cannot be cut a fraction more.

    Args:
        rule: where it can be cut; None: nowhere, and all its ids come at its end.
        encode: gives the ids of a stretch.
        suspect: whether ids of a stretch mean that the text around it might be taken apart elsewhere (see
            `PromptTokenizer.plain`): from there on, all comes at the end.
        finish: gives the ids of what is left at the end; None: `encode`.
    """

    def __init__(
        self,
        rule: CutRule | None,
        encode: Encode,
        *,
        suspect: Callable[[list[int]], bool] = lambda _: False,
        finish: Encode | None = None,
    ) -> None:
        self._rule = rule
        self._encode = encode
        self._finish = finish or encode
        self._suspect = suspect
        self._waiting: list[str] = []
        self._length = 0
        """Characters that wait."""
        self._worth = 1
        """How many must wait for another look to be worth its time: a look takes as long as what waits is."""

    def feed(self, text: str) -> list[int]:
        """See `GrowingIds`."""
        self._waiting.append(text)
        self._length += len(text)
        if self._rule is None or self._length < self._worth:
            return []
        waiting = "".join(self._waiting)
        cut = self._rule.cut(waiting)
        ids = self._encode(waiting[:cut]) if cut else []
        if self._suspect(ids):
            self._rule, ids, cut = None, [], 0
        self._waiting, self._length = [waiting[cut:]], len(waiting) - cut
        self._worth = self._length + self._length // 4 + 1
        return ids

    def finish(self) -> list[int]:
        """See `GrowingIds`."""
        rest = "".join(self._waiting)
        self._waiting, self._length = [], 0
        return self._finish(rest) if rest else []


class PieceByPiece:
    """For a tokenizer that gives a text's ids character by character.

    Args:
        encode: gives them.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    def feed(self, text: str) -> list[int]:
        """See `GrowingIds`."""
        return self._encode(text)

    def finish(self) -> list[int]:
        """See `GrowingIds`."""
        return []
