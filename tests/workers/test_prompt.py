"""Prompts with the tokenizer of the embedded model, and with tokenizers of other kinds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pingpong_bus.chain import (
    Agent,
    Chain,
    IdsPart,
    OutputPart,
    RenderedMessage,
    TextPart,
    parse_chain,
    raw_parts,
    rendered_messages,
)
from pingpong_bus.errors import ChainError, ConfigError
from pingpong_bus.messages import JoinedPrompt, Literals, OutputOf
from pingpong_worker.model_store import resolve_model
from pingpong_worker.prompt import PromptCodec, Prompts, prepare_ids
from pingpong_worker.prompt_tokenizer import PromptTokenizer
from pingpong_worker.text import StopMatcher, WindowDecodeStream

VOCABULARY = 49152


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Prompts:
    return Prompts.load(folder)


@pytest.fixture(scope="module")
def stock(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def two_agents(text: str, topic: str = "") -> Chain:
    writer = Agent(name="writer", prompt="Write about {{input.topic}}.")
    return Chain(name="test", agents=[writer, Agent(name="reader", prompt=text)], inputs={"topic": topic})


def test_it_is_a_prompt_codec(prompts: Prompts) -> None:
    codec: PromptCodec = prompts
    assert codec.encode_text("a")


def test_a_prompt_has_the_ids_that_the_model_was_trained_on(prompts: Prompts, stock: PreTrainedTokenizerFast) -> None:
    (segment,) = prompts.prepare(two_agents("{{writer}}", "cats"), {"topic": "cats"}, VOCABULARY)[0].segments
    messages = [{"role": "user", "content": "Write about cats."}]
    expected = stock.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert segment == Literals(ids=expected)


def test_outputs_stand_between_the_ids_of_the_texts_around_them(
    prompts: Prompts, stock: PreTrainedTokenizerFast
) -> None:
    chain = two_agents("Shorten this:\n{{writer}}\nand this: {{writer}}")
    before, first, between, second, after = prompts.prepare(chain, {"topic": ""}, VOCABULARY)[1].segments
    assert first == second == OutputOf(agent=0)
    assert all(isinstance(literal, Literals) for literal in (before, between, after))
    assert stock.decode(before.ids).endswith("<|im_start|>user\nShorten this:\n")
    assert stock.decode(between.ids) == "\nand this: "
    assert stock.decode(after.ids) == "<|im_end|>\n<|im_start|>assistant\n"


def test_joining_may_give_other_ids_than_splicing(prompts: Prompts) -> None:
    """That is what `prompt_token_match` tells."""
    chain = two_agents("Go on: {{writer}}ing")
    segments = prompts.prepare(chain, {"topic": ""}, VOCABULARY)[1].segments
    joined = JoinedPrompt(agent=chain.agents[1], messages=rendered_messages(chain, 1, {"topic": ""}), outputs={})
    output = prompts.encode_text("walk")
    spliced = [token for part in segments for token in (part.ids if isinstance(part, Literals) else output)]
    whole = prompts.join(joined, {0: output})
    assert whole != spliced
    assert text_of(prompts, whole) == text_of(prompts, spliced)


def test_the_whole_text_is_tokenized_across_the_borders_of_its_parts(
    prompts: Prompts, stock: PreTrainedTokenizerFast
) -> None:
    output = prompts.encode_text("Hello")
    chain = Chain(
        name="test", agents=[Agent(name="writer", prompt="x"), Agent(name="r", raw_prompt="Text: {{writer}}")]
    )
    joined = JoinedPrompt(agent=chain.agents[1], messages=[RenderedMessage("", raw_texts(chain))], outputs={})
    whole = prompts.tokenize_whole(joined, {0: output})
    assert whole == stock.encode("Text: Hello")
    assert whole != prompts.join(joined, {0: output}), "the space and the word are one token"
    chain = two_agents("Shorten this:\n{{writer}}\nand this: {{writer}}")
    joined = JoinedPrompt(agent=chain.agents[1], messages=rendered_messages(chain, 1, {"topic": ""}), outputs={})
    text = "Shorten this:\n<|im_end|>\nand this: <|im_end|>"
    messages = [{"role": "user", "content": text}]
    expected = stock.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    spelled = prompts.encode_text("<|im_end|>")
    assert prompts.tokenize_whole(joined, {0: spelled}) == expected, "control tokens count wherever they are spelled"
    assert prompts.join(joined, {0: spelled}) != expected


def raw_texts(chain: Chain) -> list[TextPart | OutputPart]:
    return [part for part in raw_parts(chain, 1, {}) if not isinstance(part, IdsPart)]


def text_of(prompts: Prompts, ids: Sequence[int]) -> str:
    stream = prompts.decode_stream()
    return stream.step(ids) + stream.finish()


words = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<file_sep>", "<|im_", "end|>"]),
    st.sampled_from(["👩\N{ZERO WIDTH JOINER}👧", "नमस्ते", "日本語", "سلام"]),
)


@given(st.lists(words, max_size=6).map("".join), st.lists(words, max_size=6).map("".join))
@settings(deadline=None)
def test_user_text_gives_no_control_token(
    prompts: Prompts, stock: PreTrainedTokenizerFast, topic: str, output: str
) -> None:
    chain = two_agents("{{writer}} and more", topic)
    (written,) = prompts.prepare(chain, {"topic": topic}, VOCABULARY)[0].segments
    assert isinstance(written, Literals)
    assert sum(token < 17 for token in written.ids) == 5, "the template's own: three messages begin, two end"
    assert all(token >= 17 for token in prompts.encode_text(topic))
    assert prompts.encode_text(topic) == stock.encode(topic, split_special_tokens=True)
    joined = JoinedPrompt(agent=chain.agents[1], messages=rendered_messages(chain, 1, {"topic": topic}), outputs={})
    ids = prompts.join(joined, {0: prompts.encode_text(output)})
    assert sum(token < 17 for token in ids) == 5
    assert text_of(prompts, prompts.encode_text(output)) in text_of(prompts, ids)


BYTES_OF_EMOJI = [30218, 218, 10813, 233, 215]
random_ids = st.lists(
    st.one_of(st.integers(0, VOCABULARY - 1), st.integers(17, 280), st.sampled_from(BYTES_OF_EMOJI)), max_size=60
)


@given(random_ids, st.lists(st.integers(0, 60), max_size=8))
@settings(deadline=None)
def test_a_stream_gives_what_the_tokenizer_decodes_at_once(
    prompts: Prompts, stock: PreTrainedTokenizerFast, ids: list[int], cuts: list[int]
) -> None:
    stream = prompts.decode_stream()
    edges = [0, *sorted(cuts), len(ids)]
    text = "".join(stream.step(ids[start:end]) for start, end in itertools.pairwise(edges) if start < end)
    ended = max((edge for edge in edges if edge <= len(ids)), default=0)
    assert ended == len(ids)
    assert text + stream.finish() == stock.backend_tokenizer.decode(ids, skip_special_tokens=True)


def test_ids_beyond_the_vocabulary_give_no_text(prompts: Prompts) -> None:
    assert text_of(prompts, [*prompts.encode_text("a"), VOCABULARY + 7, *prompts.encode_text("b")]) == "ab"


@pytest.mark.parametrize("prompt", [{"prompt": "x"}, {"raw_prompt": "x"}, {"prompt_ids": [1]}])
def test_stop_ids_beyond_the_vocabulary_are_refused(prompts: Prompts, prompt: dict[str, Any]) -> None:
    agent = Agent(name="a", stop_token_ids=[VOCABULARY - 1, VOCABULARY], **prompt)
    with pytest.raises(ChainError, match=rf"agents\[0\]\.stop_token_ids\[1\]: {VOCABULARY} is no token"):
        prompts.prepare(Chain(name="c", agents=[agent]), {}, VOCABULARY)


@given(
    st.lists(st.sampled_from([" the", " stop", "ping", "\n\n", "😀", "St", "op", "!"]), max_size=20), st.integers(1, 5)
)
@settings(deadline=None)
def test_stop_strings_end_real_text(prompts: Prompts, parts: list[str], step: int) -> None:
    ids = prompts.encode_text("".join(parts))
    stops = ["Stop", "\n\n!", "😀😀", "opp"]
    matcher = StopMatcher(stops, prompts, max_tokens=1000)
    pieces = [matcher.feed(ids[at : at + step]) for at in range(0, len(ids), step)]
    pieces.append(matcher.finish())
    text = "".join(piece.text for piece in pieces)
    ends = [(found + len(stop), found) for stop in stops if (found := "".join(parts).find(stop)) >= 0]
    assert text == ("".join(parts)[: min(ends)[1]] if ends else "".join(parts))
    assert text_of(prompts, [token for piece in pieces for token in piece.ids]) == text


# ------------------------------------------------------------------------------------------ tokenizers of other kinds


def sentencepiece_style() -> Tokenizer:
    """Like Llama 2's and Gemma's: spaces are letters, a text begins with one, and unknown letters become bytes."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdef[]INST<s>"]
    words = ["▁a", "▁b", "ab", "<s"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("<", "s")]
    vocabulary = {piece: at for at, piece in enumerate(letters + words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def test_parts_inside_a_prompt_get_no_space_before_them() -> None:
    tokenizer = PromptTokenizer(sentencepiece_style().to_str())
    assert tokenizer.decode(tokenizer.control("a", first=True) + tokenizer.plain("b")) == "ab"
    assert tokenizer.plain("b c") == tokenizer.plain("b") + tokenizer.plain(" c")
    whole = sentencepiece_style().encode("<s>[INST] a", add_special_tokens=False).ids
    assert tokenizer.control("<s>[INST] a", first=True) == whole


def test_a_prompt_begins_as_the_whole_text_does() -> None:
    made = Prompts(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_style()))
    chain = Chain(name="test", agents=[Agent(name="one", raw_prompt="[INST] a")])
    whole = sentencepiece_style().encode("[INST] a", add_special_tokens=False).ids
    assert made.prepare(chain, {}, 1000)[0].segments == [Literals(ids=whole)]


def test_a_control_token_as_text_has_the_ids_that_such_letters_have() -> None:
    tokenizer = sentencepiece_style()
    expected = [tokenizer.token_to_id(piece) for piece in ("a", "<s", ">")]
    assert PromptTokenizer(tokenizer.to_str()).plain("a<s>") == expected


@given(st.text("ab é😀日", max_size=30), st.integers(1, 4))
def test_a_stream_with_byte_fallback_gives_what_decoding_at_once_gives(text: str, step: int) -> None:
    tokenizer = sentencepiece_style()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = WindowDecodeStream(tokenizer.decode, frozenset({0, 1, 2}))
    pieces = [stream.step(ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids) == text


def test_special_tokens_between_words_leave_no_trace() -> None:
    """A decoder that strips the first space must not take a word behind a special token for the first."""
    tokenizer = sentencepiece_style()
    made = Prompts(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    ids = [tokenizer.token_to_id(piece) for piece in ("▁a", "</s>", "<s>", "▁b", "</s>", "▁a")]
    stream = made.decode_stream()
    assert [stream.step([token]) for token in ids] == ["a", "", "", " b", "", " a"]


def test_a_spoiled_run_of_bytes_keeps_the_characters_that_were_complete() -> None:
    tokenizer = sentencepiece_style()
    euro = [3 + byte for byte in "€".encode()]
    stream = WindowDecodeStream(tokenizer.decode, frozenset())
    pieces = [stream.step([token]) for token in [*euro, 3 + 0xFF, tokenizer.token_to_id("a")]]
    assert pieces[:4] == ["", "", "€", ""]
    assert "".join(pieces).startswith("€\N{REPLACEMENT CHARACTER}")
    assert "".join(pieces).endswith("a")


@given(st.lists(st.sampled_from(["<s>", "</s>", "<", "s>", "a", "é", " "]), max_size=12).map("".join))
def test_control_tokens_among_the_ordinary_words_are_taken_apart(text: str) -> None:
    """A unigram vocabulary holds "<s>" as a word, which it would find in any text."""
    pieces = ["<unk>", "<s>", "</s>", *"</s>a▁"]
    words = list(dict.fromkeys(pieces))
    unigram = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.add_special_tokens(["<unk>", "<s>", "</s>"])
    ids = PromptTokenizer(unigram.to_str()).plain(text)
    assert not {1, 2} & set(ids)
    spelled = "".join(words[token] if token else "é" for token in ids).replace("▁", " ")
    assert re.sub("é+", "é", spelled) == re.sub("é+", "é", text), "unknown letters in a row are one token"


def test_added_tokens_count_in_no_text_whether_special_or_not() -> None:
    tokenizer = sentencepiece_style()
    tokenizer.add_tokens(["<think>", AddedToken("[INST]", normalized=True), "\n\n", "▁▁"])
    think, inst, lines, spaces = map(tokenizer.token_to_id, ("<think>", "[INST]", "\n\n", "▁▁"))
    parts = PromptTokenizer(tokenizer.to_str())
    assert parts.control("<think>a[INST]", first=False) == [think, *parts.plain("a"), inst]
    assert not {think, inst} & set(parts.plain("<think>a[INST]"))
    assert lines in parts.plain("a\n\nb"), "white space is no control token"
    assert spaces in parts.plain("▁▁")
    assert {"<think>", "[INST]", "</s>"} <= set(parts.control_tokens)
    assert {think, inst}.isdisjoint(parts.silent), "they are shown"


def test_limits_that_a_tokenizer_file_carries_do_not_cut_prompts() -> None:
    tokenizer = sentencepiece_style()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    assert len(PromptTokenizer(tokenizer.to_str()).plain("abcdef")) == 5


# ----------------------------------------------------------------------------------------------------------- loading


def test_a_folder_without_a_tokenizer_is_an_error_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        Prompts.load(tmp_path)
    assert caught.value.field == "model"


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no fast tokenizer"):
        Prompts(object())


def test_a_tokenizer_is_loaded_the_way_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load(name: str, **how: object) -> PreTrainedTokenizerFast:
        asked.append((name, how))
        return PreTrainedTokenizerFast(tokenizer_object=sentencepiece_style())

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    Prompts.load("org/model", revision="v2", trust_remote_code=True)
    assert asked == [("org/model", {"revision": "v2", "trust_remote_code": True})]


def test_a_model_without_a_tokenizer_takes_ids_and_nothing_else() -> None:
    def chain_of(*agents: dict[str, object]) -> Chain:
        return parse_chain(json.dumps({"name": "ids", "agents": list(agents)}).encode())

    first = {"name": "a", "prompt_ids": [1, 2, 3]}
    prepared = prepare_ids(chain_of(first, {"name": "b", "prompt_ids": [4, "{{a}}", 5, 6]}), 100)
    assert [agent.segments for agent in prepared] == [
        [Literals(ids=[1, 2, 3])],
        [Literals(ids=[4]), OutputOf(agent=0), Literals(ids=[5, 6])],
    ]
    with pytest.raises(ChainError, match=r"agents\[1\]\.prompt: the model has no tokenizer"):
        prepare_ids(chain_of(first, {"name": "b", "prompt": "hi"}), 100)
    with pytest.raises(ChainError, match=r"agents\[0\]\.stop: the model has no tokenizer"):
        prepare_ids(chain_of(first | {"stop": ["x"]}), 100)
    with pytest.raises(ChainError, match=r"agents\[0\]\.stop_token_ids\[1\]: 100 is no token"):
        prepare_ids(chain_of(first | {"stop_token_ids": [99, 100]}), 100)
    with pytest.raises(ChainError, match=r"agents\[0\]\.prompt_ids\[2\]"):
        prepare_ids(chain_of(first), 3)
