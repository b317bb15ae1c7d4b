"""Where prompts are joined as text, what of, and how long they are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import ChainError
from pingpong_bus.messages import Literals, OutputOf, OutputSource, PreparedAgent, TokenizerSource
from pingpongd.admission import prompt_bounds
from pingpongd.intake import reads_of
from pingpongd.ledger import hop_tokens
from pingpongd.seams import most_ids, output_sources, text_prompts, why_text

WRITER = {"name": "w", "prompt": "x", "max_tokens": 100}
READER = {"name": "r", "prompt": "{{w}}"}
STEP = {"name": "s", "input": "{{w}}", "extract": {"json": "$"}}


def chain(*agents: dict[str, Any], **inputs: str) -> Chain:
    return parse_chain(json.dumps({"name": "c", "agents": list(agents), "inputs": inputs}).encode())


def text_of(*agents: dict[str, Any], tokenizers: list[str | None]) -> list[int]:
    found = chain(*agents)
    return text_prompts(found, reads_of(found), tokenizers)


@pytest.mark.parametrize(
    ("agents", "tokenizers", "expected"),
    [
        ([WRITER, READER], ["t", "t"], []),
        ([WRITER, READER], ["t", "u"], [1]),
        ([WRITER, READER | {"join": "text"}], ["t", "t"], [1]),
        ([WRITER | {"join": "text"}, READER], ["t", "t"], []),  # it reads nobody
        ([WRITER | {"strip": "think"}, READER], ["t", "t"], [1]),
        ([WRITER, STEP, READER | {"prompt": "{{s}}"}], ["t", None, "t"], [2]),
        ([WRITER, STEP, READER], ["t", None, "t"], []),  # a step that it does not read
        ([WRITER, READER, READER | {"name": "q", "prompt": "{{r}}"}], ["t", "u", "u"], [1]),
        ([WRITER, READER | {"prompt_ids": [1, "{{w}}"], "prompt": None}], [None, None], []),  # ids need no tokenizer
    ],
)
def test_which_prompts_are_text(
    agents: list[dict[str, Any]], tokenizers: list[str | None], expected: list[int]
) -> None:
    cleaned = [{key: value for key, value in agent.items() if value is not None} for agent in agents]
    assert text_of(*cleaned, tokenizers=tokenizers) == expected


@pytest.mark.parametrize(
    ("agents", "tokenizers", "says"),
    [
        (
            [WRITER, {"name": "r", "prompt_ids": [1, "{{w}}"]}],
            ["t", "u"],
            r"agents\[1\]\.prompt_ids.*another tokenizer",
        ),
        ([WRITER | {"strip": "think"}, {"name": "r", "prompt_ids": ["{{w}}"]}], ["t", "t"], r"prompt_ids.*stripped"),
        ([WRITER, READER], ["t", None], r"agents\[1\]\.model: its model has no tokenizer"),
        ([WRITER, READER], [None, "t"], r'agents\[1\]: the model of "w" has no tokenizer'),
    ],
)
def test_what_cannot_read_text_is_refused(
    agents: list[dict[str, Any]], tokenizers: list[str | None], says: str
) -> None:
    with pytest.raises(ChainError, match=says) as caught:
        text_of(*agents, tokenizers=tokenizers)
    assert caught.value.hint


def test_where_texts_come_from() -> None:
    agents = [
        WRITER | {"strip": "think"},
        WRITER | {"name": "v"},
        STEP,
        {"name": "u", "prompt": "y"},
        READER | {"prompt": "{{w}}{{v}}{{s}}{{u}}"},
    ]
    found = chain(*agents)
    prepared = [PreparedAgent(segments=[], thinking=at == 0) for at in range(5)]
    sources = output_sources(
        found,
        4,
        reads_of(found)[4],
        ["t", "o", None, "t", "t"],
        lambda at: TokenizerSource(model=f"of {at}"),
        prepared,
    )
    assert sources == {
        0: OutputSource(strip="think", inside=True),
        1: OutputSource(tokenizer=TokenizerSource(model="of 1")),
        2: OutputSource(characters=True),
    }


def test_text_of_another_tokenizer_counts_more_and_of_a_step_by_its_characters() -> None:
    found = chain(
        WRITER,
        STEP,
        {"name": "call", "input": "{{input.x}}", "call": "web", "max_chars": 1000},
        {"name": "short", "input": "{{w}}", "extract": {"regex": "a"}, "max_chars": 20},
        READER | {"prompt": "{{w}}{{s}}{{call}}{{short}}", "max_tokens": 7},
        x="y" * 400,
    )
    reads = reads_of(found)
    *same, _ = most_ids(found, reads, ["t", None, None, None, "t"], "t", {"x": "y" * 400})
    # The step's input is 5 characters beside what it reads: "{{w}}" itself, which counts as its own text.
    assert same == [100, 103, 500, 10]
    *other, _ = most_ids(found, reads, ["t", None, None, None, "u"], "u", {"x": "y" * 400})
    assert other == [150, 153, 500, 10]
    prompt = PreparedAgent(
        segments=[Literals(ids=[1, 2]), *(OutputOf(agent=at) for at in range(4))],
        text=True,
        counts=dict(enumerate(other)),
    )
    assert prompt_bounds(found, prompt) == (2, 813)
    prepared = [PreparedAgent(segments=[])] * 4 + [prompt]
    assert hop_tokens(found, prepared, 4, {}) == 2 + 813 + 7
    # What is over counts with what it has become: 10 of 100 ids, and 8,192 characters are what the step may write.
    assert hop_tokens(found, prepared, 4, {0: 10, 1: 819}) == 2 + 15 + 16 + 500 + 10 + 7


def test_steps_that_read_two_steps_each_are_counted_once_each() -> None:
    steps = [
        {"name": f"s{at}", "input": f"{{{{s{at - 1}}}}}{{{{s{at - 2}}}}}", "extract": {"regex": "a"}, "max_chars": 900}
        for at in range(2, 60)
    ]
    found = chain(WRITER | {"name": "s0"}, WRITER | {"name": "s1"}, *steps, READER | {"prompt": "{{s59}}"})
    # Counted anew for whoever reads them, the first ones would be 10 to the power of 12 times.
    most = most_ids(found, reads_of(found), ["t", "t", *[None] * 58, "t"], "t", {})
    assert (most[2], most[59]) == (206, 450)


def test_what_a_user_is_told() -> None:
    found = chain(WRITER, READER | {"join": "text"})
    assert why_text(found, 1, [0], ["t", "t"]) == 'it asks for "join": "text"'
    assert why_text(found, 1, [0], ["t", "u"]) == '"w" is written by a model of another tokenizer'
    assert why_text(found, 0, [], ["t", "u"]) == ""


def test_a_step_cannot_read_what_is_no_text() -> None:
    agents = [{"name": "a", "prompt_ids": [1]}, {"name": "s", "input": "{{a}}", "extract": {"fenced": ""}}]
    chain = parse_chain(json.dumps({"name": "c", "agents": agents}).encode())
    with pytest.raises(ChainError, match='the model of "a" has no tokenizer.*a step takes text') as caught:
        text_prompts(chain, [[], [0]], [None, None])
    assert caught.value.field == "agents[1]"
    assert text_prompts(chain, [[], [0]], ["t", None]) == []
