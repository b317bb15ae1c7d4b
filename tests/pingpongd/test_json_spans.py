"""The last JSON value of a text is the one that a decoder finds which is tried at every bracket, and soon found."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpongd.json_spans import last_span

_TOKENS = st.sampled_from(
    [*'[]{}",:\\ \n\x01é1', "01", "-1.5e3", "true", "nul", "NaN", '\\"', "\\u00e9", '"a"', '"a":', "[1]", '{"b": [2]}']
)


def _tried_everywhere(text: str) -> tuple[int, int] | None:
    def refuse(word: str) -> None:
        raise ValueError(word)

    decoder = json.JSONDecoder(parse_constant=refuse)
    last, at = None, 0
    while at < len(text):
        if text[at] in "[{":
            try:
                _, end = decoder.raw_decode(text, at)
            except ValueError:
                pass
            else:
                last, at = (at, end), end
                continue
        at += 1
    return last


@given(st.lists(_TOKENS, max_size=30).map("".join))
def test_it_is_what_a_decoder_finds(text: str) -> None:
    assert last_span(text) == _tried_everywhere(text)


@pytest.mark.parametrize(
    "text",
    ["[" * 500_000, '{"a":' * 200_000, "[" * 900 + "1," * 500_000, '["' * 250_000, '{"a":"{\\"a\\":' * 70_000],
    ids=["arrays", "objects", "open around much", "strings", "quoted"],
)
def test_a_long_text_takes_no_longer_than_its_length(text: str) -> None:
    began = time.process_time()
    assert last_span(text) is None
    assert time.process_time() - began < 4  # a tenth of it, usually; a decoder tried at every bracket takes 20 s
