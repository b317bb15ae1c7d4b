"""Texts of many scripts and kinds, from what is on every machine that runs the tests; and tokenizers to read them."""

# ruff: noqa: RUF001  letters of many scripts are the point
from __future__ import annotations

import functools
import json
import random
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

LENGTHS = (12, 60, 240, 900)
"""Characters of texts that are cut out of files."""

DECLARATION = [
    "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt.",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
    "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.",
    "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. İnsanlık ailesi; ışık, DİYARBAKIR'ın.",
    "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. وقد وهبوا عقلا وضميرا؛ ١٢٣ و٤٥.",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. שָׁלוֹם עֲלֵיכֶם",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। १२३",
    "அனைத்து மனிதர்களும் சுதந்திரமாகவே பிறக்கின்றனர்; மதிப்பிலும் உரிமைகளிலும் சமமானவர்கள்.",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。ガギグ",
    "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 한글",
    "ადამიანები იბადებიან თავისუფალნი და თანასწორნი თავისი ღირსებითა და უფლებებით.",
    "Բոլոր մարդիկ ծնվում են ազատ ու հավասար՝ իրենց արժանապատվությամբ և իրավունքներով։",
]
"""Of the Universal Declaration of Human Rights, article 1."""

ODD = [
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, 🇩🇪🇫🇷🇯🇵, 👍🏽👍🏿, 🧑🏻‍🚀!!! 1️⃣2️⃣ #️⃣",
    "e\u0301a\u0300\u0301o\u0302\u0323 Z\u0351\u036b\u0343a\u0321l\u0489g\u0337o\u0322 \u1e9b\u0323",
    "\u1112\u1161\u11ab\u1100\u1173\u11af \ud55c\u11ab \u1100\u1161",
    "12345678901234567890 3.14159 1,000,000.00 0xdeadbeef 1e-10 ½ ² Ⅷ ٣٤٥ १२३ ４５６",
    "    \t\t  \n\n\n   \r\n\r\n \u00a0\u2003\u3000 \u200b x   \n y\t\n\t\n",
    "I'll they've we'd DON'T it'S 'tis rock'n'roll ''''ll 'ſ'm ’s",
    "def f(x):\n    if x:\n\n\n        return [y\tfor y in x]\n\n\nclass A:\n    pass\n\n\n\n",
    "a\r\nb\r\n\r\n  c\r d\n\r",
    "<|im_start|>user\n<|im_end|><s></s>[INST] <unk> <0x0A> <pad> </s",
    "▁▁a ▁ b▁c  ▁▁",
    "https://example.org/a/b?c=d&e=%20f#g user@host.tld C:\\path\\file {{x}} $x^{2}_{i}$ ```py\nx\n```",
    "ﬁﬂ ſt ǅ ß ẞ İ ı Å Å ﷺ ㎏ ①",
    "",
    " ",
    "\n",
    "\U0001f468\u200d",
    "\ufeffbom \ufffd \x00 \x1b[0m \x7f",
]


@functools.cache
def texts() -> list[str]:
    """Some thousand texts, the same in every run on the same machine."""
    chosen = random.Random(7)
    found = [*DECLARATION, *ODD, *_of_unicode(chosen)]
    files = list(_files())
    for path in files:
        try:
            whole = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        for length in LENGTHS:
            at = chosen.randrange(max(1, len(whole) - length))
            if whole[at : at + length]:
                found.append(whole[at : at + length])
    found += [
        "".join(chosen.choice(ODD + DECLARATION)[: chosen.randrange(1, 40)] for _ in range(6)) for _ in range(300)
    ]
    return found


def _files() -> Iterator[Path]:
    """Code, prose, tables and translations, of at most half a megabyte each."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = Path(sysconfig.get_paths()["purelib"])
    roots = [
        (library, "*.py", 160),
        (library / "test" / "cjkencodings", "*utf8.txt", 40),
        (packages / "vllm", "**/*.py", 160),
        (packages / "rich", "_emoji*.py", 5),
        (packages / "idna", "*.py", 10),
        (packages / "sympy", "printing/**/*.py", 40),
        (packages, "*.dist-info/METADATA", 120),
        (packages, "*.dist-info/licenses/*", 60),
        (Path("/usr/share/common-licenses"), "*", 20),
        (Path("/usr/share/i18n/locales"), "*_*", 200),
        (Path("/usr/share/gnupg"), "help.*.txt", 40),
        (Path("/usr/share/X11/locale"), "*UTF-8/Compose", 10),
        (Path("/usr/share/zoneinfo"), "*.tab", 10),
    ]
    for root, pattern, most in roots:
        if root.is_dir():
            paths = sorted(path for path in root.glob(pattern) if path.is_file() and path.stat().st_size < 500_000)
            yield from random.Random(str(pattern)).sample(paths, min(most, len(paths)))


def _of_unicode(chosen: random.Random) -> Iterator[str]:
    """Made-up words of each block of 128 characters that has letters: with marks, digits and signs of theirs."""
    for begin in range(0x80, min(0x20000, sys.maxunicode), 0x80):
        letters = [chr(code) for code in range(begin, begin + 0x80) if unicodedata.category(chr(code))[0] in "LMNPSZ"]
        if len(letters) < 8 or 0xD800 <= begin < 0xE000:
            continue
        if 0x3400 < begin < 0xD700 and begin % 0x1000:  # of thousands of signs that are all alike, some
            continue
        words = ("".join(chosen.choices(letters, k=chosen.randrange(1, 9))) for _ in range(12))
        yield "".join(word + chosen.choice(["", " ", "\n", ", ", "-", "  "]) for word in words)


# ----------------------------------------------------------------------------------------------------------- tokenizers

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
_TEKKEN_RANKS = 30_000
"""The first of 130,000: to find the merges of all takes half a minute."""


def bytelevel() -> str:
    """SmolLM2's tokenizer.json: byte-level, split as GPT-2 does."""
    from transformers import AutoTokenizer

    from pingpong_worker.model_store import EMBEDDED_MODEL, resolve_model

    definition: str = AutoTokenizer.from_pretrained(resolve_model(EMBEDDED_MODEL)).backend_tokenizer.to_str()
    return definition


def sentencepiece(folder: Path) -> str:
    """Mistral's first: SentencePiece, which merges a whole text, with bytes for what it does not know."""
    from transformers import LlamaTokenizerFast

    (folder / "tokenizer.model").write_bytes((_mistral() / "tokenizer.model.v1").read_bytes())
    definition: str = LlamaTokenizerFast.from_pretrained(folder).backend_tokenizer.to_str()
    return definition


def tekken() -> str:
    """Mistral's later one, cut: ranks of byte strings as tiktoken keeps them, split by case."""
    import base64

    from transformers.convert_slow_tokenizer import bytes_to_unicode

    kept = json.loads((_mistral() / "tekken_240911.json").read_text())
    ranks = {base64.b64decode(entry["token_bytes"]): at for at, entry in enumerate(kept["vocab"][:_TEKKEN_RANKS])}
    letters = bytes_to_unicode()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(rank, a, b, left, right) for a, b, left, right in sorted(pairs)]
    merges.sort(key=lambda merge: merge[:3])
    model = models.BPE(
        vocab={spelled(token): rank for token, rank in ranks.items()},
        merges=[(spelled(left), spelled(right)) for *_, left, right in merges],
        ignore_merges=True,
    )
    return changed(
        Tokenizer(model).to_str(), pre_tokenizer=_by(kept["config"]["pattern"]), added_tokens=[_added("<s>", 131_000)]
    )


def variants(smol: str, mistral: str) -> dict[str, str]:
    """What other families do, over the vocabularies of two real ones."""
    vocabulary = json.loads(mistral)["model"]["vocab"]
    words = {word for piece in vocabulary for word in (piece.strip("▁"), "##" + piece.strip("▁")) if word.strip("#")}
    wordpiece = models.WordPiece(
        {word: at for at, word in enumerate(["[UNK]", *sorted(words)])}, unk_token="[UNK]", max_input_chars_per_word=100
    )
    bert = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}
    unigram = models.Unigram([(piece, -float(at)) for piece, at in sorted(vocabulary.items(), key=lambda v: v[1])], 0)
    spaces = ["  ", "    ", "\n\n", "\n\n\n", "\t\t", "   "]
    added = [_added(text, 60_000 + at, normalized=at % 2 == 1) for at, text in enumerate(spaces)]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    gemma = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    legacy = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaced]}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "nfc, split as Qwen does": changed(smol, normalizer={"type": "NFC"}, pre_tokenizer=_by(_QWEN)),
        "nfkc and small letters": changed(
            smol, normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
        ),
        "split in three steps, as DeepSeek does": changed(smol, pre_tokenizer=_by(*_DEEPSEEK)),
        "digits, and added runs of blanks": changed(
            smol,
            pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, json.loads(smol)["pre_tokenizer"]]},
            added_tokens=[*json.loads(smol)["added_tokens"], *added],
        ),
        "unigram": changed(Tokenizer(unigram).to_str(), pre_tokenizer=metaspace),
        "wordpiece, as BERT prepares it": changed(
            Tokenizer(wordpiece).to_str(),
            normalizer={**bert, "strip_accents": None},
            pre_tokenizer={"type": "BertPreTokenizer"},
        ),
        "sentencepiece, split at blanks": changed(mistral, normalizer=replaced, pre_tokenizer=gemma),
        "sentencepiece, as Llama 2 spells it": changed(mistral, normalizer=legacy, pre_tokenizer=None),
    }


def changed(definition: str, **parts: Any) -> str:
    """A tokenizer.json with other parts."""
    return json.dumps({**json.loads(definition), **parts})


def without_tokens(definition: str) -> Callable[[str], bool]:
    """Whether a text spells no added token."""
    contents = [entry["content"] for entry in json.loads(definition)["added_tokens"]]
    return lambda text: not any(content in text for content in contents)


def _by(*patterns: str) -> dict[str, Any]:
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    end = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, end]}


def _added(content: str, token: int, *, normalized: bool = False) -> dict[str, Any]:
    return {
        "id": token,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": bool(content.strip()),
    }


def _mistral() -> Path:
    """Tokenizers that come with vLLM."""
    import mistral_common

    return Path(mistral_common.__file__).parent / "data"


def split_by(pattern: str) -> Callable[[str], list[tuple[int, int]]]:
    """Where the engine of `tokenizers` finds a regular expression."""
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return lambda text: [span for _, span in split.pre_tokenize_str(text)]
