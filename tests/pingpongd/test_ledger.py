"""What open hops may come to hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.chain import parse_chain
from pingpong_bus.messages import EngineLimits, Literals, OutputOf, PreparedAgent
from pingpongd.ledger import GroupLedger, hop_tokens


def ledger(kv_tokens: int, *, block_size: int = 16, max_num_seqs: int = 4) -> GroupLedger:
    return GroupLedger(
        EngineLimits(
            engine="test",
            model="m",
            max_model_len=10_000,
            vocabulary_size=2,
            block_size=block_size,
            kv_tokens=kv_tokens,
            max_num_seqs=max_num_seqs,
        )
    )


def test_whole_blocks_are_taken() -> None:
    books = ledger(64)
    assert books.take("a", 17)
    assert dict(books.held) == {"a": 32}
    assert books.free_tokens == 32
    assert books.take("b", 32)
    assert not books.fits(1)


def test_the_rest_of_a_block_at_the_end_is_no_room() -> None:
    books = ledger(63)
    assert books.free_tokens == 48
    assert books.fits(48)
    assert not books.ever_fits(49)


def test_sequences_are_counted_too() -> None:
    books = ledger(10_000, max_num_seqs=2)
    assert books.take("a", 1)
    assert books.take("b", 1)
    assert books.free_seqs == 0
    assert not books.take("c", 1)
    books.give_back("a")
    assert books.take("c", 1)
    assert set(books.held) == {"b", "c"}


def test_what_does_not_fit_changes_nothing() -> None:
    books = ledger(64)
    assert not books.take("a", 65)
    assert books.free_tokens == 64
    assert not books.held
    books.give_back("a")
    assert books.free_tokens == 64


def test_a_hop_holds_once() -> None:
    books = ledger(64)
    books.take("a", 1)
    with pytest.raises(ValueError, match="a holds memory already"):
        books.take("a", 1)


@given(
    kv_tokens=st.integers(0, 500),
    block_size=st.integers(1, 40),
    seqs=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 200), st.booleans()), max_size=60),
)
def test_nothing_is_promised_twice(
    kv_tokens: int, block_size: int, seqs: int, steps: list[tuple[int, int, bool]]
) -> None:
    books = ledger(kv_tokens, block_size=block_size, max_num_seqs=seqs)
    empty = books.free_tokens
    held: dict[str, int] = {}
    for number, tokens, gives in steps:
        hop = str(number)
        if gives:
            books.give_back(hop)
            held.pop(hop, None)
        elif hop not in held:
            fits = books.fits(tokens)
            assert books.take(hop, tokens) is fits
            assert not fits or books.ever_fits(tokens)
            if fits:
                held[hop] = -(-tokens // block_size) * block_size
        assert dict(books.held) == held
        assert books.free_tokens == empty - sum(held.values()) >= 0
        assert books.free_seqs == seqs - len(held) >= 0
        assert sum(held.values()) <= kv_tokens
    for hop in list(held):
        books.give_back(hop)
    assert books.free_tokens == empty


def test_a_hop_counts_what_it_may_read_and_write() -> None:
    agents = [
        {"name": "a", "prompt": "x", "max_tokens": 100},
        {"name": "b", "prompt": "x", "max_tokens": 30},
        {"name": "c", "prompt": "{{a}} {{b}} {{a}}", "max_tokens": 7},
    ]
    chain = parse_chain(json.dumps({"name": "c", "agents": agents}).encode())
    plain = PreparedAgent(segments=[Literals(ids=[1] * 5)])
    reader = PreparedAgent(
        segments=[OutputOf(agent=0), Literals(ids=[1]), OutputOf(agent=1), Literals(ids=[1, 1]), OutputOf(agent=0)]
    )
    prepared = [plain, plain, reader]
    assert hop_tokens(chain, prepared, 0, {}) == 105
    assert hop_tokens(chain, prepared, 2, {}) == 240
    assert hop_tokens(chain, prepared, 2, {0: 10}) == 60
    assert hop_tokens(chain, prepared, 2, {0: 10, 1: 0}) == 30


def test_a_hop_is_counted_anew_once_its_length_is_known() -> None:
    books = ledger(64)
    assert books.take("a", 16)
    books.recount("a", 80)  # longer than it was counted, and it runs
    assert books.held_tokens == 80
    assert books.free_tokens == -16
    assert not books.fits(1)
    books.recount("a", 32)
    assert books.fits(32)
    books.recount("b", 16)
    assert dict(books.held) == {"a": 32}
    books.give_back("a")
    assert books.free_tokens == 64
