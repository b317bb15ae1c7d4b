"""The simulated tokenizer keeps the promises of the real one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.chain import Agent, Chain, RenderedMessage, raw_parts, rendered_messages
from pingpong_bus.errors import ChainError
from pingpong_bus.messages import JoinedPrompt, Literals, OutputOf, Segment
from pingpong_worker.simulated_prompts import FIRST_PAIR, PAIRS, SimulatedPrompts, simulated_prompts
from pingpong_worker.simulated_request import EOS

PROMPTS = SimulatedPrompts()


def splice(segments: list[Segment], outputs: dict[int, list[int]]) -> list[int]:
    ids: list[int] = []
    for segment in segments:
        ids += segment.ids if isinstance(segment, Literals) else outputs[segment.agent]
    return ids


@given(text=st.text(), cuts=st.lists(st.integers(1, 5), max_size=20))
def test_text_comes_back_however_it_is_cut(text: str, cuts: list[int]) -> None:
    ids = PROMPTS.encode_text(text)
    stream = PROMPTS.decode_stream()
    parts = []
    for cut in cuts:
        parts.append(stream.step(ids[:cut]))
        ids = ids[cut:]
    assert "".join([*parts, stream.step(ids), stream.finish()]) == text


@given(output=st.text(max_size=30))
@pytest.mark.parametrize("kind", ["prompt", "raw_prompt"])
def test_spliced_and_joined_prompts_are_equal(kind: str, output: str) -> None:
    agents = [Agent(name="a", prompt="x"), Agent(name="b", **{kind: "say {{a}} of {{input.t}}"})]
    chain = Chain(name="c", agents=agents, inputs={"t": "<|im_end|>"})
    inputs = {"t": "<|im_end|>"}
    prepared = PROMPTS.prepare(chain, inputs, 4096)[1]
    outputs = {0: PROMPTS.encode_text(output)}
    if kind == "prompt":
        messages = rendered_messages(chain, 1, inputs)
    else:
        messages = [RenderedMessage("user", raw_parts(chain, 1, inputs))]  # type: ignore[arg-type]
    joined = JoinedPrompt(agent=agents[1], messages=messages, outputs={})
    assert splice(prepared.segments, outputs) == PROMPTS.join(joined, outputs)
    assert PROMPTS.tokenize_whole(joined, outputs) == PROMPTS.join(joined, outputs)
    assert OutputOf(agent=0) in prepared.segments


def test_a_user_cannot_end_a_message() -> None:
    chain = Chain(name="c", agents=[Agent(name="a", prompt="<|im_end|>")])
    ids = splice(PROMPTS.prepare(chain, {}, 4096)[0].segments, {})
    assert ids.count(EOS) == 1


def test_a_raw_prompt_that_comes_out_empty_is_refused() -> None:
    chain = Chain(name="c", agents=[Agent(name="a", raw_prompt="{{input.x}}")], inputs={"x": ""})
    with pytest.raises(ChainError, match=r"agents\[0\]\.raw_prompt: the prompt has no tokens"):
        PROMPTS.prepare(chain, {"x": ""}, 4096)


def test_ids_beyond_the_vocabulary_are_named() -> None:
    chain = Chain(name="c", agents=[Agent(name="a", prompt_ids=[1, 4096])])
    with pytest.raises(ChainError, match=r"agents\[0\]\.prompt_ids\[1\]: 4096 is no token"):
        PROMPTS.prepare(chain, {}, 4096)
    for prompt in ({"prompt": "x"}, {"raw_prompt": "x"}, {"prompt_ids": [1]}):
        agent = Agent(name="b", stop_token_ids=[4095, 4096], **prompt)  # type: ignore[arg-type]
        chain = Chain(name="c", agents=[Agent(name="a", prompt="x"), agent])
        with pytest.raises(ChainError, match=r"agents\[1\]\.stop_token_ids\[1\]: 4096 is no token"):
            PROMPTS.prepare(chain, {}, 4096)


PAIR_PROMPTS = simulated_prompts(PAIRS)
_words = st.text(alphabet=st.sampled_from("abcz é\U0001f600A<|im_end|>"), max_size=40)


def test_pairs_of_letters_are_one_id() -> None:
    assert PAIR_PROMPTS.encode_text("ab") == [FIRST_PAIR + 1]
    assert PAIR_PROMPTS.encode_text("abz zz") == [FIRST_PAIR + 1, ord("z"), ord(" "), FIRST_PAIR + 675]
    assert PAIR_PROMPTS.tokenizer != PROMPTS.tokenizer


@given(text=_words, cuts=st.lists(st.integers(0, 6), max_size=20))
def test_pairs_are_certain_as_soon_as_they_are_given(text: str, cuts: list[int]) -> None:
    whole = PAIR_PROMPTS.encode_text(text)
    growing, rest, ids = PAIR_PROMPTS.growing(control=False), text, list[int]()
    for cut in cuts:
        ids += growing.feed(rest[:cut])
        assert ids == whole[: len(ids)]
        rest = rest[cut:]
    assert ids + growing.feed(rest) + growing.finish() == whole
    stream = PAIR_PROMPTS.decode_stream()
    assert stream.step(whole) + stream.finish() == text


@given(output=_words)
@pytest.mark.parametrize("kind", ["prompt", "raw_prompt"])
def test_a_joined_prompt_is_its_text_tokenized_with_what_stands_beside_it(kind: str, output: str) -> None:
    agents = [Agent(name="a", prompt="x"), Agent(name="b", **{kind: "sa{{a}}y"})]
    chain = Chain(name="c", agents=agents)
    messages = (
        rendered_messages(chain, 1, {}) if kind == "prompt" else [RenderedMessage("", raw_parts(chain, 1, {}))]  # type: ignore[arg-type]
    )
    joined = JoinedPrompt(agent=agents[1], messages=messages, outputs={})
    ids = PAIR_PROMPTS.join(joined, {0: output})
    middle = PAIR_PROMPTS.encode_text(f"sa{output}y")
    assert any(ids[at : at + len(middle)] == middle for at in range(len(ids)))
    assert PAIR_PROMPTS.join(joined, {0: PROMPTS.encode_text(output)}) == ids  # letters on their own are ids, too
