"""Which trace a submission belongs to."""

from __future__ import annotations

import argparse

import pytest

from pingpong_client.commands.arguments import trace_context, traceparent

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BAD = [
    "",
    "nonsense",
    GOOD[:-1],
    GOOD.upper(),
    GOOD + "\n",
    "ff" + GOOD[2:],
    "00-" + "0" * 32 + GOOD[35:],
    GOOD[:36] + "0" * 16 + "-01",
]


def test_a_context_is_taken_as_it_is() -> None:
    assert traceparent(GOOD) == GOOD
    assert trace_context({"TRACEPARENT": GOOD}) == GOOD
    assert trace_context({}) is None


@pytest.mark.parametrize("text", BAD)
def test_what_is_none_is_an_error_as_an_option_and_nothing_in_the_environment(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        traceparent(text)
    assert trace_context({"TRACEPARENT": text}) is None
