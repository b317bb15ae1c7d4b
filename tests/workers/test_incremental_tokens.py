"""Ids of a text while it comes are those of the whole text, with every tokenizer, wherever the text is cut."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingpong_worker import prompt_tokenizer, token_cuts
from pingpong_worker.incremental_tokens import IncrementalTokens, PieceByPiece
from pingpong_worker.prompt_tokenizer import PromptTokenizer, tokenizer_digest
from pingpong_worker.regex_reach import Reach
from pingpong_worker.regex_syntax import RegexRefused
from seam_texts import DECLARATION, ODD, bytelevel, changed, sentencepiece, split_by, tekken, texts, variants

Tokenizers = dict[str, PromptTokenizer]
FULLY = ("SmolLM2", "Mistral v1", "Tekken")
"""Read all texts; what is made of them, some."""


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    smol, mistral = bytelevel(), sentencepiece(tmp_path_factory.mktemp("mistral"))
    return {"SmolLM2": smol, "Mistral v1": mistral, "Tekken": tekken(), **variants(smol, mistral)}


@pytest.fixture(scope="module")
def tokenizers(definitions: dict[str, str]) -> Tokenizers:
    return {name: PromptTokenizer(definition) for name, definition in definitions.items()}


NAMES = [
    "SmolLM2",
    "Mistral v1",
    "Tekken",
    "nfc, split as Qwen does",
    "nfkc and small letters",
    "split in three steps, as DeepSeek does",
    "digits, and added runs of blanks",
    "unigram",
    "wordpiece, as BERT prepares it",
    "sentencepiece, split at blanks",
    "sentencepiece, as Llama 2 spells it",
]


def pieces_of(text: str, chosen: random.Random) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = chosen.choice([1, 1, 2, 3, 5, 9, 30, 200])
        pieces.append(text[at : at + size])
        at += size
    return pieces


def test_the_texts_are_many_and_of_many_kinds() -> None:
    assert len(texts()) > 2000
    letters = set("".join(texts()))
    for low, high in ((0x370, 0x400), (0x400, 0x500), (0x590, 0x600), (0x600, 0x700), (0x900, 0x980), (0xE00, 0xE80)):
        assert sum(low <= ord(letter) < high for letter in letters) > 30
    assert sum(0x4E00 <= ord(letter) < 0xA000 for letter in letters) > 300
    assert {"\u200d", "\u0301", "\r", "\t", "\u3000", "🇩"} <= letters


@pytest.mark.parametrize("control", [False, True], ids=["plain", "control"])
@pytest.mark.parametrize("name", NAMES)
def test_incremental_ids_are_those_of_the_whole_text(tokenizers: Tokenizers, name: str, control: bool) -> None:
    tokenizer, chosen = tokenizers[name], random.Random(name)
    early = total = 0
    for text in texts() if name in FULLY and not control else chosen.sample(texts(), 500):
        whole = tokenizer.control(text, first=False) if control else tokenizer.plain(text)
        growing = tokenizer.growing(control=control, first=False)
        ids: list[int] = []
        for piece in pieces_of(text, chosen):
            ids += growing.feed(piece)
            assert ids == whole[: len(ids)], f"{text!r} after {piece!r}"
        early, total = early + len(ids), total + len(whole)
        ids += growing.finish()
        assert ids == whole, repr(text)
    assert tokenizer.obstacle == ""
    assert early > total * 0.85, "most ids are certain before a text ends"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_holds_whatever_follows(tokenizers: Tokenizers, name: str) -> None:
    tokenizer, chosen = tokenizers[name], random.Random(name)
    for text in chosen.sample(texts(), 300):
        growing = tokenizer.growing(control=False, first=False)
        cut = chosen.randrange(len(text) + 1)
        ids = growing.feed(text[:cut])
        for more in ("", "s", " ", "\n", "\u0301", "9", "\u200d🚀", chosen.choice(ODD), chosen.choice(DECLARATION)):
            assert tokenizer.plain(text[:cut] + more)[: len(ids)] == ids, f"{text[:cut]!r} and then {more!r}"


FRAGMENTS = [
    *"aB1 '\n\t\r.▁_",
    "  ",
    "é",
    "e\u0301",
    "\u0301",
    "한",
    "\u1100",
    "\u1161",
    "日本",
    "🧑\u200d",
    "'ll",
    "<s>",
    "<|im_end|>",
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=30), st.sampled_from(NAMES), st.booleans())
def test_any_pieces_of_any_text(tokenizers: Tokenizers, pieces: list[str], name: str, control: bool) -> None:
    pieces = ["".join(c if not 0xD800 <= ord(c) < 0xE000 else "?" for c in piece) for piece in pieces]
    tokenizer, text = tokenizers[name], "".join(pieces)
    growing = tokenizer.growing(control=control, first=True)
    ids = [token for piece in pieces for token in growing.feed(piece)] + growing.finish()
    assert ids == (tokenizer.control(text, first=True) if control else tokenizer.plain(text))


@pytest.mark.parametrize("name", NAMES)
def test_ids_come_soon_after_their_text(tokenizers: Tokenizers, name: str) -> None:
    growing = tokenizers[name].growing(control=False, first=False)
    text = " ".join(DECLARATION[:3])
    ids: list[int] = []
    for at, letter in enumerate(text):
        ids += growing.feed(letter)
        behind = len(tokenizers[name].plain(text[: at + 1])) - len(ids)
        assert behind <= 14, f"{behind} ids behind at {text[: at + 1]!r}"


@pytest.mark.parametrize("name", ["SmolLM2", "Mistral v1"])
@pytest.mark.parametrize("unit", ["x", " ", "\n", "word ", "日", "9", "=-"])
def test_time_grows_with_the_text_and_no_faster(tokenizers: Tokenizers, name: str, unit: str) -> None:
    def looked(length: int) -> int:
        """Characters that were looked at, the measure that no other load on the machine changes."""
        rule, seen = tokenizers[name].growing(control=False, first=False)._rule, 0
        assert rule is not None

        class Counting:
            def cut(self, text: str) -> int:
                nonlocal seen
                seen += len(text)
                return rule.cut(text)

        growing = IncrementalTokens(Counting(), lambda text: [0] * len(text))  # type: ignore[arg-type]
        for at in range(0, length, 4):
            growing.feed((unit * length)[at : at + 4])
        return seen

    few, many = looked(2000), looked(8000)
    assert many <= 6 * few + 2000
    begun = time.monotonic()
    tokenizers[name].growing(control=False, first=False).feed(unit * 100_000)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "Strip"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, "more than single"),
        ({"pre_tokenizer": {"type": "UnicodeScripts"}}, "UnicodeScripts"),
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(?<=a)b"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "(?<",
        ),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a+$"}, "behavior": "Isolated", "invert": False}},
            "ends",
        ),
    ],
)
def test_a_tokenizer_without_a_rule_commits_nothing_early_and_says_why(
    definitions: dict[str, str], parts: dict[str, object], why: str
) -> None:
    tokenizer = PromptTokenizer(changed(definitions["SmolLM2"], **parts))
    assert why in tokenizer.obstacle
    for text in ODD:
        growing = tokenizer.growing(control=False, first=False)
        assert [token for letter in text for token in growing.feed(letter)] == []
        assert growing.finish() == tokenizer.plain(text)


def test_a_model_that_draws_has_no_rule(definitions: dict[str, str]) -> None:
    parsed = json.loads(definitions["SmolLM2"])
    parsed["model"]["dropout"] = 0.1
    assert "draws" in PromptTokenizer(json.dumps(parsed)).obstacle


def test_a_normalizer_that_does_not_fall_apart_is_noticed(
    definitions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = PromptTokenizer(changed(definitions["SmolLM2"], normalizer={"type": "NFC"}))
    monkeypatch.setattr(token_cuts, "_starts", lambda _: True)
    for text in ("e\u0301 a\u0300 " * 9, *ODD):
        growing = tokenizer.growing(control=False, first=False)
        ids = [token for letter in text for token in growing.feed(letter)] + growing.finish()
        assert (
            ids == tokenizer.plain(text) or tokenizer.growing(control=False, first=False).feed("more words here") == []
        )


def test_text_that_spells_a_control_token_among_words_is_kept_for_the_end() -> None:
    class Everywhere:
        def cut(self, text: str) -> int:
            return len(text) - 1 if len(text) > 1 else 0

    growing = IncrementalTokens(
        Everywhere(),  # type: ignore[arg-type]
        lambda text: list(map(ord, text)),
        suspect=lambda ids: ord("!") in ids,
        finish=lambda text: list(map(ord, text.upper())),
    )
    assert growing.feed("ab") == [ord("a")]
    assert growing.feed("!cd") == []
    assert growing.feed("ef") == []
    assert growing.finish() == list(map(ord, "B!CDEF"))


def test_characters_one_by_one() -> None:
    growing = PieceByPiece(lambda text: list(text.encode()))
    assert growing.feed("né") + growing.feed("") + growing.finish() == list("né".encode())


def test_a_digest_tells_tokenizers_apart_by_what_ids_mean(definitions: dict[str, str]) -> None:
    digests = {name: tokenizer_digest(definition) for name, definition in definitions.items()}
    assert len(set(digests.values())) == len(digests)
    again = changed(definitions["SmolLM2"], post_processor=None, padding=None, truncation=None)
    assert tokenizer_digest(again) == digests["SmolLM2"]


# ------------------------------------------------------------------------------------------------- regular expressions

PATTERNS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    r"(?i:'s|'t|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'ss|'k)|[ab]+?b|a{2,3}+|.",
    r"a(?=b)|ab(?!c)|b+c|[^\n]|\n",
    r"(?:ab|a)++c?|\w+\s|\W",
    r"a|ab|abc|abcd",
    r"[[a-z]&&[^aeiou]]+|[aeiou]|\s",
    r"\x{61}\u0062|\x63{1,2}|\t+| {2}",
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(PATTERNS),
    st.text(st.sampled_from("abcdkKsS'1 \n\tß.ſé"), max_size=14),
    st.text(st.sampled_from("abcdkKsS'1 \n\tß.ſé"), max_size=6),
)
def test_attempts_before_the_limit_come_out_the_same_whatever_follows(pattern: str, text: str, more: str) -> None:
    limit = Reach(pattern, token_cuts._member).limit(text, len(text))
    spans = split_by(pattern)
    borders = {border for span in spans(text) for border in span if border < limit}
    assert borders == {border for span in spans(text + more) for border in span if border < limit}


def test_words_are_sure_once_the_next_one_has_begun() -> None:
    reach = Reach(PATTERNS[0], token_cuts._member)
    assert reach.limit("", 0) == 0
    assert reach.limit("hello", 5) == 0
    assert reach.limit("hello wor", 9) == 5
    assert reach.limit("hello wor", 3) == 0
    assert reach.limit("a   ", 4) == 1
    assert Reach("ab", token_cuts._member, literal=True).limit("xab", 3) == 3
    assert Reach("a.", token_cuts._member, literal=True).limit("xa", 2) == 1


@pytest.mark.parametrize(
    "pattern",
    [
        "a*",
        "(?<!a)b",
        r"(a)\1",
        r"\bword",
        "^a",
        "a$",
        r"\Aa",
        r"\R",
        "(?m:a.)",
        "a{1,1000}",
        "(",
        "a)",
        "[",
        "+",
        "(?i:[a-z])",
        r"\pL",
        "{x",
        r"\x{zz}",
    ],
)
def test_expressions_that_look_elsewhere_or_are_none_are_refused(pattern: str) -> None:
    with pytest.raises(RegexRefused, match=re.compile(r"\w+")):
        Reach(pattern, token_cuts._member)


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizers: Tokenizers) -> None:
    tokenizer, text = tokenizers["SmolLM2"], "Some words, and 12 more.\n" * 10_000

    def longest_pause(work: Callable[[], object]) -> float:
        """The longest that this thread did not run while another one worked, as a part of the time that took."""
        worker = threading.Thread(target=work)
        worst, begun = 0.0, time.perf_counter()
        last = begun
        worker.start()  # which waits for the interpreter, too
        while worker.is_alive():
            time.sleep(0.0005)
            worst, last = max(worst, time.perf_counter() - last), time.perf_counter()
        return worst / (last - begun)

    grown = tokenizer.growing(control=False, first=False)
    for work in (
        lambda: tokenizer.plain(text),
        lambda: tokenizer.control(text, first=False),
        lambda: grown.feed(text[:200_000]),
    ):
        assert min(longest_pause(work) for _ in range(3)) < 0.5


def test_rules_are_made_when_a_tokenizer_is_loaded(
    definitions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = PromptTokenizer(definitions["SmolLM2"])
    monkeypatch.setattr(prompt_tokenizer, "CutRule", None)
    for control in (False, True):
        assert tokenizer.growing(control=control, first=False).feed("some words, and more of them")
