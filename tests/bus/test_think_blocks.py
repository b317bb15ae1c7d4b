"""Blocks of thoughts are left out of an output however it is cut into pieces, and nothing of one slips through."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.think_blocks import ThinkFilter, opens_block, without_blocks

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "th", "<thi", "nk>", "</", ">", "a", " b", "\n", "<think", "é", "  "])
)


@pytest.mark.parametrize(
    ("text", "inside", "left"),
    [
        ("plain text", None, "plain text"),
        ("plain text", False, "plain text"),
        ("<think>why</think>\n\nThe answer.", None, "The answer."),
        ("\n<think>why</think>\n\nThe answer.\n", False, "The answer.\n"),
        ("  plain", False, "  plain"),
        ("a <think>x</think> b <think>y</think>c", False, "a  b c"),
        ("why</think>The answer.", None, "The answer."),
        ("why</think>\nThe answer.", True, "The answer."),
        ("why, and no end", True, ""),
        ("<think>why, and no end", None, ""),
        ("before <think>why, and no end", None, "before "),
        ("odd</think>tag", False, "oddtag"),
        ("<think>a</think>b</think>c", None, "bc"),
        ("<think>a<think>b</think>c</think>d", None, "cd"),
        ("1 <thin 2 </think", None, "1 <thin 2 </think"),
        ("<think></think>", None, ""),
        ("<think>\n\n</think>\n\n", None, ""),
        ("", None, ""),
        (" \n", None, " \n"),
        (" \n", False, " \n"),
    ],
)
def test_what_is_left_of_an_output(text: str, inside: bool | None, left: str) -> None:
    assert without_blocks(text, inside=inside) == left


def test_text_outside_is_passed_on_at_once_and_a_begun_tag_is_not() -> None:
    blocks = ThinkFilter(inside=False)
    assert blocks.feed("Hello, <") == "Hello, "
    assert blocks.feed("b> <thi") == "<b> "
    assert blocks.feed("nk>secret") == ""
    assert blocks.feed("</think>more") == "more"
    assert blocks.finish() == ""


def test_what_may_turn_out_to_be_a_block_is_held_back() -> None:
    blocks = ThinkFilter()
    assert blocks.feed("let me see") == ""
    assert blocks.feed("</think>42") == "42"
    assert blocks.feed(" it is") == " it is"


def test_feeding_after_the_end_is_an_error() -> None:
    blocks = ThinkFilter()
    blocks.finish()
    with pytest.raises(ValueError, match="ended"):
        blocks.feed("x")


@given(PIECES, st.sampled_from([None, True, False]))
def test_the_pieces_that_an_output_comes_in_do_not_matter(pieces: list[str], inside: bool | None) -> None:
    blocks = ThinkFilter(inside=inside)
    passed = [blocks.feed(piece) for piece in pieces]
    whole = "".join(passed) + blocks.finish()
    assert whole == without_blocks("".join(pieces), inside=inside)


@given(PIECES, st.lists(st.sampled_from(["secret", "<", "</th", "<think", "\n"])))
def test_nothing_of_a_block_is_ever_passed_on(before: list[str], block: list[str]) -> None:
    blocks = ThinkFilter(inside=False)
    blocks.feed("".join(before))
    thoughts = "".join(piece for piece in block if piece != "</th")
    assert "secret" not in blocks.feed("<think>") + blocks.feed(thoughts) + blocks.finish()


@given(PIECES)
def test_knowing_that_an_output_began_outside_changes_nothing_where_its_tags_are_balanced(pieces: list[str]) -> None:
    text = "".join(pieces)
    if text.find("</think>") < 0 or 0 <= text.find("<think>") < text.find("</think>"):
        assert without_blocks(text, inside=False) == without_blocks(text, inside=None)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("assistant\n<think>\n\n</think>\n\n", False),
        ("assistant\n", False),
        ("a </think> b <think>", True),
    ],
)
def test_prompts_that_open_a_block(prompt: str, opens: bool) -> None:
    assert opens_block(prompt) is opens


@pytest.mark.parametrize("tag", ["<think>", "</think>"])
def test_an_output_of_nothing_but_tags_takes_time_in_proportion_to_it(tag: str) -> None:
    begun = time.process_time()
    assert len(without_blocks(f"{tag}a" * 120_000, inside=False)) <= 120_000
    assert time.process_time() - begun < 5, "where each tag is looked for to the text's end it takes far more"
