"""Ids of a text while it comes: only such as no later text can change, and all of them at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # needs the tokenizers library, which bare installations and simulated engines do without
    from pingpong_worker.token_cuts import CutRule

Encode = Callable[[str], list[int]]
_LOOK_CHARS = 8192
"""Of a longer text so much is looked at at once: other threads stand still meanwhile."""


class GrowingIds(Protocol):
    """The ids of one text."""

    @property
    def waiting(self) -> int:
        """Characters that the next call takes up again."""
        ...

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
        self.waiting = 0
        """See `GrowingIds`."""
        self._texts: list[str] = []
        """What waits."""
        self._worth = 1
        """How many must wait for another look to be worth its time: a look takes as long as what waits is."""

    def feed(self, text: str) -> list[int]:
        """See `GrowingIds`."""
        ids: list[int] = []
        for begin in range(0, len(text), _LOOK_CHARS):
            ids += self._take(text[begin : begin + _LOOK_CHARS])
        return ids

    def finish(self) -> list[int]:
        """See `GrowingIds`."""
        rest = "".join(self._texts)
        self._texts, self.waiting = [], 0
        return self._finish(rest) if rest else []

    def _take(self, text: str) -> list[int]:
        self._texts.append(text)
        self.waiting += len(text)
        if self._rule is None or self.waiting < self._worth:
            return []
        known = "".join(self._texts)
        cut = self._rule.cut(known)
        ids = self._encode(known[:cut]) if cut else []
        if self._suspect(ids):
            self._rule, ids, cut = None, [], 0
        self._texts, self.waiting = [known[cut:]], len(known) - cut
        self._worth = self.waiting + self.waiting // 4 + 1
        return ids


class PieceByPiece:
    """For a tokenizer that gives a text's ids character by character.

    Args:
        encode: gives them.
    """

    waiting = 0
    """See `GrowingIds`."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    def feed(self, text: str) -> list[int]:
        """See `GrowingIds`."""
        return self._encode(text)

    def finish(self) -> list[int]:
        """See `GrowingIds`."""
        return []
