"""Tokenizing parts of a prompt: control tokens where they belong, and nowhere else."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

from tokenizers import Tokenizer

from pingpong_worker.added_tokens import NoRule
from pingpong_worker.incremental_tokens import IncrementalTokens
from pingpong_worker.token_cuts import CutRule


class PromptTokenizer:
    """A tokenizer for texts that are parts of a larger one.

    Args:
        definition: a tokenizer.json.
    """

    def __init__(self, definition: str) -> None:
        inner = _without_prefix(json.loads(definition))
        plain = _all_special(json.loads(inner))
        self._definitions = {"inner": inner, "plain": plain}
        self._same_first = json.loads(inner) == json.loads(definition)
        self._first = _load(definition)
        self._inner = _load(inner)
        self._plain = _load(plain)
        self._plain.encode_special_tokens = True
        added = self._first.get_added_tokens_decoder()
        self.silent = frozenset(token for token, entry in added.items() if entry.special)
        """Ids of special tokens: they give no text."""
        # Not only the special ones: many models mark roles, tools and thoughts with added tokens that are shown.
        control = {token: entry.content for token, entry in added.items() if not _is_space(entry.content)}
        # What stands for characters that the vocabulary lacks is no control token, though it may be special.
        model = json.loads(definition)["model"]
        unknown = {model.get("unk_id"), self._first.token_to_id(model.get("unk_token") or "")}
        self._control_ids = frozenset(control) - unknown
        self.control_tokens = list(control.values())
        """The control tokens as text: all that were added to the vocabulary, but for runs of white space."""
        self.shown_tokens = [content for token, content in control.items() if token not in self.silent]
        """Those of them that are not special: they give text."""

    @property
    def obstacle(self) -> str:
        """Why no id of plain text is certain before its end, in a clause; empty where ids are. Slow the first time."""
        found = self._plain_rule
        return found if isinstance(found, str) else ""

    def growing(self, *, control: bool, first: bool) -> IncrementalTokens:
        """What `control` or `plain` gives, while the text comes. Slow the first time: rules are made.

        Args:
            control: as which of the two.
            first: as of `control`.
        """
        if not control:
            rule = self._plain_rule
            return IncrementalTokens(
                rule if isinstance(rule, CutRule) else None,
                lambda text: list(self._plain.encode(text, add_special_tokens=False).ids),
                suspect=lambda ids: not self._control_ids.isdisjoint(ids),
                finish=self.plain,
            )
        known = None if first and not self._same_first else self._control_rule
        return IncrementalTokens(known, lambda text: self.control(text, first=first))

    @functools.cached_property
    def _plain_rule(self) -> CutRule | str:
        try:
            return CutRule(self._plain, self._definitions["plain"], read_special=False)
        except NoRule as error:
            return str(error)

    @functools.cached_property
    def _control_rule(self) -> CutRule | None:
        try:
            return CutRule(self._inner, self._definitions["inner"], read_special=True)
        except NoRule:
            return None

    def decode(self, ids: list[int]) -> str:
        """Text of ids; ids beyond the vocabulary give none."""
        text: str = self._first.decode(ids, skip_special_tokens=True)
        return text

    def control(self, text: str, *, first: bool) -> list[int]:
        """Ids of text in which control tokens count; `first` where it begins the prompt. No BOS is added."""
        ids: list[int] = (self._first if first else self._inner).encode(text, add_special_tokens=False).ids
        return ids

    def plain(self, text: str) -> list[int]:
        """Ids of text in which no control token counts, whatever it says."""
        ids: list[int] = []
        waiting = [text]
        while waiting:
            piece = waiting.pop()
            encoded = self._plain.encode(piece, add_special_tokens=False)
            if self._control_ids.isdisjoint(encoded.ids):
                ids += encoded.ids
            elif len(piece) > 1:
                # Some vocabularies spell control tokens among their ordinary words. Take the word apart.
                at = next(at for at, token in enumerate(encoded.ids) if token in self._control_ids)
                cut = min(encoded.offsets[at][0] + 1, len(piece) - 1)
                waiting += [piece[cut:], piece[:cut]]
            else:
                ids += [token for token in encoded.ids if token not in self._control_ids]
        return ids


def tokenizer_digest(definition: str) -> str:
    """A digest of what ids mean: equal for tokenizers whose ids can stand for each other's.

    Args:
        definition: a tokenizer.json.
    """
    parsed = json.loads(definition)
    meaning = {key: parsed.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")}
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


def _load(definition: str) -> Any:
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _all_special(definition: dict[str, Any]) -> str:
    """The tokenizer with every control token marked as special, for only special ones can be left unread."""
    for entry in definition["added_tokens"]:
        entry["special"] = entry["special"] or not _is_space(entry["content"])
    return json.dumps(definition)


def _is_space(content: str) -> bool:
    """Whether an added token is nothing but white space, which some vocabularies write as a letter of their own."""
    return not content.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").strip()


def _without_prefix(definition: dict[str, Any]) -> str:
    """The tokenizer without the space that some put before a text: a part in the middle of a prompt has none."""
    definition["normalizer"] = _strip(definition.get("normalizer"))
    definition["pre_tokenizer"] = _strip(definition.get("pre_tokenizer"))
    return json.dumps(definition)


def _strip(step: dict[str, Any] | None) -> dict[str, Any] | None:
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        key = "normalizers" if "normalizers" in step else "pretokenizers"
        return {**step, key: [kept for kept in map(_strip, step[key]) if kept is not None]}
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "ByteLevel":
        return {**step, "add_prefix_space": False}
    return step
