"""Tokenizing parts of a prompt: control tokens where they belong, and nowhere else."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
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
        given = json.loads(definition)
        inner = _without_prefix(given)
        plain = _all_special(inner)
        self._same_first = inner == given
        self._first = _load(definition)
        self._inner = _load(json.dumps(inner))
        self._plain = _load(json.dumps(plain))
        self._plain.encode_special_tokens = True
        added = self._first.get_added_tokens_decoder()
        self.silent = frozenset(token for token, entry in added.items() if entry.special)
        """Ids of special tokens: they give no text."""
        # Not only the special ones: many models mark roles, tools and thoughts with added tokens that are shown.
        control = {token: entry.content for token, entry in added.items() if not _is_space(entry.content)}
        # What stands for characters that the vocabulary lacks is no control token, though it may be special.
        model = given["model"]
        unknown = {model.get("unk_id"), self._first.token_to_id(model.get("unk_token") or "")}
        self._control_ids = frozenset(control) - unknown
        self.control_tokens = list(control.values())
        """The control tokens as text: all that were added to the vocabulary, but for runs of white space."""
        self.shown_tokens = [content for token, content in control.items() if token not in self.silent]
        """Those of them that are not special: they give text."""
        self.obstacle = ""
        """Why no id of plain text is certain before its end, in a clause; empty where ids are."""
        # Made here, for to make them takes long: an event loop that asked for them first would stand still.
        self._plain_rule: CutRule | None = None
        self._control_rule: CutRule | None = None
        try:
            self._plain_rule = CutRule(self._plain, plain, read_special=False)
        except NoRule as error:
            self.obstacle = str(error)
        with suppress(NoRule):
            self._control_rule = CutRule(self._inner, inner, read_special=True)

    def growing(self, *, control: bool, first: bool) -> IncrementalTokens:
        """What `control` or `plain` gives, while the text comes.

        Args:
            control: as which of the two.
            first: as of `control`.
        """
        if not control:
            return IncrementalTokens(
                self._plain_rule,
                lambda text: _ids(self._plain, text),
                suspect=lambda ids: not self._control_ids.isdisjoint(ids),
                finish=self.plain,
            )
        known = None if first and not self._same_first else self._control_rule
        return IncrementalTokens(known, lambda text: self.control(text, first=first))

    def decode(self, ids: list[int]) -> str:
        """Text of ids; ids beyond the vocabulary give none."""
        text: str = self._first.decode(ids, skip_special_tokens=True)
        return text

    def control(self, text: str, *, first: bool) -> list[int]:
        """Ids of text in which control tokens count; `first` where it begins the prompt. No BOS is added."""
        return _ids(self._first if first else self._inner, text)

    def plain(self, text: str) -> list[int]:
        """Ids of text in which no control token counts, whatever it says."""
        ids: list[int] = []
        waiting = [text]
        while waiting:
            piece = waiting.pop()
            found = _ids(self._plain, piece)
            if self._control_ids.isdisjoint(found):
                ids += found
            elif len(piece) > 1:
                # Some vocabularies spell control tokens among their ordinary words. Take the word apart.
                at = next(at for at, token in enumerate(found) if token in self._control_ids)
                offsets = self._plain.encode_batch([piece], add_special_tokens=False)[0].offsets
                cut = min(offsets[at][0] + 1, len(piece) - 1)
                waiting += [piece[cut:], piece[:cut]]
            else:
                ids += [token for token in found if token not in self._control_ids]
        return ids


def tokenizer_digest(definition: str) -> str:
    """A digest of what ids mean: equal for tokenizers whose ids can stand for each other's.

    Args:
        definition: a tokenizer.json.
    """
    parsed = json.loads(definition)
    meaning = {key: parsed.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")}
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


def _ids(tokenizer: Any, text: str) -> list[int]:
    """As `encode` gives them, which keeps the interpreter's lock all the while: no other thread would run, and a
    megabyte of text takes half a second. The batch lets go of it."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _load(definition: str) -> Any:
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _all_special(definition: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer with every control token marked as special, for only special ones can be left unread."""
    entries = definition["added_tokens"]
    marked = [{**entry, "special": entry["special"] or not _is_space(entry["content"])} for entry in entries]
    return {**definition, "added_tokens": marked}


def _is_space(content: str) -> bool:
    """Whether an added token is nothing but white space, which some vocabularies write as a letter of their own."""
    return not content.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").strip()


def _without_prefix(definition: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without the space that some put before a text: a part in the middle of a prompt has none."""
    steps = {key: _strip(definition.get(key)) for key in ("normalizer", "pre_tokenizer")}
    return {**definition, **steps}


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
