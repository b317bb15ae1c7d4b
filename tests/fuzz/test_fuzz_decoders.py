"""A short run of `benchmarks/fuzz_decoders.py`."""

from __future__ import annotations

import pytest

from fuzz_decoders import TARGETS, Target, check, fuzz
from pingpong_bus.errors import MessageError


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_decoder_answers_with_a_value_or_with_its_one_error(target: Target) -> None:
    counts = fuzz(target, 200, seed=1)
    assert counts[True] > 0
    assert counts[False] > 0


def test_another_error_would_be_found() -> None:
    def decode(data: bytes) -> bytes:
        if len(data) > 10:  # one input in ten: what is drawn depends on the constants of every module that is imported
            raise KeyError("a fault")
        return data

    faulty = Target("faulty", decode, MessageError, [b"\xa1x"], lambda value: value, lambda tree: b"")
    with pytest.raises(KeyError):
        fuzz(faulty, 500, seed=1)


def test_what_does_not_come_back_would_be_found() -> None:
    lossy = Target("lossy", lambda data: data[:-1], MessageError, [b"\xa1x"], lambda value: value, lambda tree: b"")
    with pytest.raises(AssertionError, match="does not come back"):
        check(lossy, b"abc")
