"""Which added tokens of a tokenizer may still come about at the end of a text. Pure."""

from __future__ import annotations

import re
from typing import Any


class NoRule(ValueError):
    """Nothing is known of where this tokenizer's texts can be cut; says why."""


class AddedTokens:
    """Those that are found in a text before anything else is done to it."""

    def __init__(self, definition: dict[str, Any], *, read_special: bool) -> None:
        entries = definition.get("added_tokens") or []
        live = [entry for entry in entries if (read_special or not entry["special"]) and entry["content"]]
        letters = {letter for entry in live for letter in entry["content"]}
        for entry in entries:
            if entry not in live and not letters.isdisjoint(entry["content"]):
                raise NoRule(f'the added token "{entry["content"]}" may hide others.')
        for entry in live:
            if entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"):
                raise NoRule(f'the added token "{entry["content"]}" hangs on what stands around it.')
            if entry.get("normalized") and definition.get("normalizer"):
                raise NoRule(f'the added token "{entry["content"]}" is looked for in normalized text.')
        contents = [entry["content"] for entry in live]
        self._contents = frozenset(contents)
        self._begun = frozenset(content[:end] for content in contents for end in range(1, len(content)))
        self._longest = max(map(len, contents), default=0)
        rounds = (
            [e["content"] for e in live if not e.get("normalized")],
            [e["content"] for e in live if e.get("normalized")],
        )
        self._rounds = [re.compile("|".join(map(re.escape, sorted(r, key=len, reverse=True)))) for r in rounds if r]
        """They are looked for in two rounds, the second in what the first left."""

    def last_end(self, text: str) -> tuple[int, int]:
        """Where the last token ends that is sure, 0 where there is none; and from where on there may be others."""
        sure = self._sure(text)
        last, other = 0, sure
        sections = [(0, len(text))]
        for expression in self._rounds:
            left: list[tuple[int, int]] = []
            for begin, end in sections:
                for match in expression.finditer(text, begin, end):
                    if match.end() <= sure:
                        last = max(last, match.end())
                    else:
                        other = min(other, match.start())
                    left.append((begin, match.start()))
                    begin = match.end()
                left.append((begin, end))
            sections = left
        return last, other

    def _sure(self, text: str) -> int:
        """The first position from which a token may begin that is not whole yet, or not its longest."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at:] in self._begun:
                return at
        return len(text)
