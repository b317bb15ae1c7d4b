"""Where a text can be cut so that its beginning's tokens are what they are, whatever follows.

A *cut* is a position for which ``ids(text + more) == ids(text[:cut]) + ids(text[cut:] + more)`` for every `more`. It
follows from what a tokenizer does one after the other, each of which has to fall apart there:

=================== ===================================================================================================
added tokens        are found from left to right, the longest first: a cut follows the last that is sure, or lies
                    before whatever may still become one
normalizer          Unicode's forms only join a character to what stands before it: a cut comes before one that does
                    not join. Others change characters one by one
pre-tokenizer       regular expressions are tried from left to right: a cut is a border between two pieces that stands
                    before every attempt that what follows could change (`regex_reach.py`). Of several steps each looks
                    no farther than the one before it is sure
model               takes pieces one by one. Where nothing cuts texts into pieces (SentencePiece), merging is local: no
                    merge spans two characters that stand side by side in no token
=================== ===================================================================================================

A tokenizer that does something else has no rule, and says why.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

from pingpong_worker.added_tokens import AddedTokens, NoRule
from pingpong_worker.regex_reach import Reach
from pingpong_worker.regex_syntax import RegexRefused

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the pre-tokenizer ByteLevel splits by."""
_WORDS = r"\w+|[^\w\s]+"
"""The same of Whitespace."""
_ONE_BY_ONE = frozenset({"Digits", "Punctuation", "CharDelimiterSplit", "WhitespaceSplit", "BertPreTokenizer"})
"""Pre-tokenizers whose borders hang on the two characters beside them."""
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "BertNormalizer"})
_CHARACTERS = frozenset({"Lowercase", "Nmt", "ByteLevel", "StripAccents"})
"""Normalizers that change each character by itself."""
_MOST_CHUNKS = 100_000
_MOST_TRIES = 8
"""Cuts that are looked at from the end on, before more text is waited for."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class CutRule:
    """Of one tokenizer.

    Args:
        tokenizer: itself. What it puts before a text must have been taken out.
        definition: its tokenizer.json, parsed.
        read_special: whether special tokens count in its texts.

    Raises:
        NoRule: there is none.
    """

    def __init__(self, tokenizer: Tokenizer, definition: dict[str, Any], *, read_special: bool) -> None:
        self._normalizer, self._pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        self._joins = _check_normalizer(definition.get("normalizer"))
        if self._joins:
            _joined()  # takes long, so not when the first text comes
        self._added = AddedTokens(definition, read_special=read_special)
        stages = list(_flat(definition.get("pre_tokenizer"), "pretokenizers"))
        self._reaches = _reaches(stages)
        self.local = not self._reaches and all(map(_cuts_anywhere, stages))
        """Whether cuts hang on nothing but the characters around them, and not on where a text begins."""
        model = definition["model"]
        if model.get("dropout"):
            raise NoRule("its model draws which merges to leave out.")
        self._spans = _Spans(model, stages) if self.local and _is_plain_bpe(model) else None
        self._chunks: dict[str, int] = {}
        self._broken = False

    def cut(self, text: str) -> int:
        """The last cut that is known of; 0 where there is none. Takes time in proportion to the text."""
        if self._broken:
            return 0
        begin, sure = self._added.last_end(text)
        return begin + self._cut(text[begin:], sure - begin)

    def _cut(self, text: str, sure: int) -> int:
        """The same of text in which no added token is, with an end from `sure` on that may become one."""
        normal: str = text if self._normalizer is None else self._normalizer.normalize_str(text)
        end = self._normal_end(text, sure, len(normal))
        for reach in self._reaches:
            end = reach.limit(normal, end)
        if end < 1:
            return 0
        borders = self._borders(normal)
        position, offset, tries = len(text), len(normal), 0
        while position > 0 and tries < _MOST_TRIES:
            begin = self._chunk(text, position)
            offset -= self._length(text[begin:position])
            position = begin
            if 0 < position < sure and 0 < offset < end and self._is_border(normal, offset, borders):
                if not self._adds_up(text[:position], normal[:offset]):
                    return 0
                # Cut off, the beginning ends there, and what looks ahead ("two blanks before a word") finds no more.
                if self._borders(normal[:offset]) - {offset} == {border for border in borders if border < offset}:
                    return position
                tries += 1
        return 0

    def _normal_end(self, text: str, sure: int, length: int) -> int:
        """How much of the normalized text, of this length, is the same whatever follows the first `sure` characters."""
        position = len(text)
        while position > 0 and (position > sure or (position == len(text) and self._joins)):
            begin = self._chunk(text, position)
            length -= self._length(text[begin:position])
            position = begin
        return length

    def _chunk(self, text: str, end: int) -> int:
        """Where the last stretch before `end` begins that is normalized by itself."""
        begin = end - 1
        if self._joins:
            while begin > 0 and not _starts(text[begin]):
                begin -= 1
        return begin

    def _length(self, chunk: str) -> int:
        if self._normalizer is None:
            return len(chunk)
        length = self._chunks.get(chunk)
        if length is None:
            if len(self._chunks) >= _MOST_CHUNKS:
                self._chunks.clear()
            length = self._chunks[chunk] = len(self._normalizer.normalize_str(chunk))
        return length

    def _borders(self, normal: str) -> frozenset[int]:
        if self._pre_tokenizer is None:
            return frozenset()
        pieces = self._pre_tokenizer.pre_tokenize_str(normal)
        return frozenset(border for _, (begin, end) in pieces for border in (begin, end))

    def _is_border(self, normal: str, offset: int, borders: frozenset[int]) -> bool:
        return offset in borders or (self._spans is not None and self._spans.apart(normal[offset - 1], normal[offset]))

    def _adds_up(self, text: str, normal: str) -> bool:
        """Whether normalizing did fall apart where it should; else there is no rule after all."""
        if self._normalizer is not None and self._normalizer.normalize_str(text) != normal:
            self._broken = True
        return not self._broken


class _Spans:
    """Which characters stand side by side in some token of a byte-pair model that merges whole texts."""

    def __init__(self, model: dict[str, Any], stages: list[dict[str, Any]]) -> None:
        vocabulary = model["vocab"]
        self._space = next((s.get("replacement", "\u2581") for s in stages if s["type"] == "Metaspace"), " ")
        self._pairs = {pair for token in vocabulary if not _BYTE.fullmatch(token) for pair in pairwise(token)}
        bytes_there = sum(1 for token in vocabulary if _BYTE.fullmatch(token)) == 256
        merges = model.get("merges") or []
        if any(
            _BYTE.fullmatch(part)
            for merge in merges
            for part in (merge.split(" ") if isinstance(merge, str) else merge)
        ):
            raise NoRule("its model merges bytes of characters that it does not know.")
        spelled = model.get("byte_fallback") and bytes_there
        self._fuses = not spelled and (bool(model.get("fuse_unk")) or model.get("unk_token") is None)
        """Whether a character that is not known is one with its neighbours, or is left out from between them."""
        self._known = frozenset(token for token in vocabulary if len(token) == 1)

    def apart(self, left: str, right: str) -> bool:
        """Whether no token spans these two characters, in this order."""
        left, right = (self._space if letter == " " else letter for letter in (left, right))
        if (left, right) in self._pairs:
            return False
        return not (self._fuses and (left not in self._known or right not in self._known))


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    return (
        model.get("type") == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
    )


def _flat(step: dict[str, Any] | None, key: str) -> Iterable[dict[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step[key]:
            yield from _flat(part, key)
    else:
        yield step


def _check_normalizer(step: dict[str, Any] | None) -> bool:
    """Whether a normalizer joins characters.

    Raises:
        NoRule: it does more than that.
    """
    joins = False
    for part in _flat(step, "normalizers"):
        kind = part["type"]
        if kind in _FORMS:
            joins = True
        elif kind == "Replace":
            if len(part["pattern"].get("String", "")) != 1 or (part["content"] and not _starts(part["content"][0])):
                raise NoRule("its normalizer replaces more than single characters.")
        elif kind not in _CHARACTERS:
            raise NoRule(f"its normalizer has a step of the kind {kind}.")
    return joins


def _reaches(stages: list[dict[str, Any]]) -> list[Reach]:
    """How far the pre-tokenizer's regular expressions look, step by step."""
    reaches: list[Reach] = []
    changed = ""
    for stage in stages:
        kind = stage["type"]
        if changed and kind not in _ONE_BY_ONE:
            raise NoRule(f"its pre-tokenizer does something behind {changed}.")
        if kind == "Split":
            pattern = stage["pattern"]
            reaches += [_reach(pattern["Regex"])] if "Regex" in pattern else _literal_reach(pattern["String"])
        elif kind == "ByteLevel":
            if stage.get("add_prefix_space"):
                raise NoRule("its pre-tokenizer puts a space before a text.")
            if stage.get("use_regex", True):
                reaches.append(_reach(_GPT2))
            changed = kind
        elif kind == "Whitespace":
            reaches.append(_reach(_WORDS))
        elif kind == "Metaspace":
            if stage.get("prepend_scheme", "always") != "never":
                raise NoRule("its pre-tokenizer puts a space before a text.")
            changed = kind
        elif kind not in _ONE_BY_ONE:
            raise NoRule(f"its pre-tokenizer has a step of the kind {kind}.")
    return reaches


def _reach(pattern: str) -> Reach:
    try:
        return Reach(pattern, _member)
    except RegexRefused as error:
        raise NoRule(f"its pre-tokenizer's regular expression is not understood: {error}") from None


def _literal_reach(text: str) -> list[Reach]:
    if not text:
        raise NoRule("its pre-tokenizer splits by nothing.")
    return [] if len(text) == 1 else [Reach(text, _member, literal=True)]


def _cuts_anywhere(stage: dict[str, Any]) -> bool:
    """Whether a text that begins inside one of its pieces is split as it would be there."""
    if stage["type"] == "Split":
        return len(stage["pattern"].get("String", "")) == 1 and stage["behavior"] != "Contiguous"
    return bool(stage["type"] == "Metaspace")


@functools.cache
def _class(source: str) -> Any:
    return pre_tokenizers.Split(Regex(source), "removed")


def _member(source: str, letter: str) -> bool:
    """Whether a character is one of a class, as the engine of `tokenizers` knows it."""
    return not _class(source).pre_tokenize_str(letter)


@functools.cache
def _joined() -> frozenset[str]:
    """Characters that Unicode's canonical composition can join to the one before them."""
    found = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}  # parts of Hangul syllables
    for code in range(0x110000):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            found.add(chr(int(parts[1], 16)))
    return frozenset(found)


@functools.lru_cache(maxsize=65536)
def _starts(letter: str) -> bool:
    """Whether no normalization form joins a character, or what it is made of, to what stands before it.

    Characters that this Python's Unicode does not have yet may do so: the tokenizer's may be newer.
    """
    if letter < "\u0300":
        return True
    if unicodedata.category(letter) == "Cn":
        return False
    first = unicodedata.normalize("NFKD", letter)[0]
    return all(not unicodedata.combining(c) and c not in _joined() for c in (letter, first))
