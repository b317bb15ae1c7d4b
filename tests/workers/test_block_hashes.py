"""Remembered block hashes against vLLM's own, whatever prompts, salts and sessions come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pingpong_worker.vllm_block_hashes import BlockHashMemo, remember_block_hashes
from pingpong_worker.vllm_marks import KEY, SESSION

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # what torch and vLLM say at import is not ours to mend

BLOCK = 4

Submission = tuple[int, list[int], str | None, int]
"""Session, what the prompt grows by, salt, and how many of its earlier tokens are taken back first."""

submissions = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(0, 3), max_size=3 * BLOCK),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from([0, 0, 0, 1, BLOCK, 100]),
    ),
    max_size=12,
)


class CountingHasher:
    """vLLM's own, which counts the blocks that it hashes."""

    def __init__(self) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.blocks = 0

    def __call__(self, request: Any) -> list[Any]:
        hashes: list[Any] = self._hasher(request)
        self.blocks += len(hashes)
        return hashes


def make_request(ids: list[int], hasher: Any, *, session: str | None = None, salt: str | None = None) -> Any:
    """A request as the engine makes it, which hashes its prompt at once."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    marks = {KEY: {SESSION: session}} if session is not None else None
    return Request("r", list(ids), SamplingParams(extra_args=marks), None, cache_salt=salt, block_hasher=hasher)


@settings(max_examples=100, deadline=None)
@given(submissions, st.integers(0, 60))
def test_hashes_are_those_of_vllm(story: list[Submission], max_tokens: int) -> None:
    """Sessions grow, are taken over by other prompts of equal beginnings, change salts, and are forgotten."""
    plain = CountingHasher()
    memo = BlockHashMemo(CountingHasher(), max_tokens)
    prompts: dict[int, list[int]] = {}
    for session, more, salt, back in story:
        kept = prompts.get(session, [])
        prompts[session] = ids = kept[: max(0, len(kept) - back)] + more
        if not ids:
            continue
        expected = make_request(ids, plain, salt=salt)
        found = make_request(ids, memo, session=str(session), salt=salt)
        assert found.block_hashes == expected.block_hashes
        for request in (expected, found):  # as an answer grows
            for token in range(BLOCK):
                request.append_output_token_ids(token)
        assert found.block_hashes == expected.block_hashes


def test_a_growing_prompt_is_hashed_once() -> None:
    hasher = CountingHasher()
    memo = BlockHashMemo(hasher)
    ids = list(range(10 * BLOCK + 1))
    make_request(ids, memo, session="a", salt="s")
    make_request([*ids, *range(BLOCK)], memo, session="a", salt="s")
    assert hasher.blocks == 11
    make_request([*ids, *range(BLOCK)], memo, session="a", salt="other")
    make_request([*ids, *range(BLOCK)], memo, session="b", salt="s")
    make_request([*ids, *range(BLOCK)], memo)
    assert hasher.blocks == 11 + 3 * 11


def test_little_is_remembered_where_little_may_be() -> None:
    hasher = CountingHasher()
    memo = BlockHashMemo(hasher, max_tokens=2 * BLOCK)
    for session in ("a", "b", "a", "c", "c"):
        make_request([1] * 2 * BLOCK, memo, session=session)
    assert hasher.blocks == 4 * 2  # only the second "c" found something


def test_what_depends_on_more_than_tokens_is_left_to_vllm() -> None:
    blocks = [b"hash"]
    memo = BlockHashMemo(lambda request: blocks)
    for name in ("lora_request", "mm_features", "prompt_embeds"):
        request = make_request([1] * BLOCK, None, session="a")
        setattr(request, name, [object()])
        assert memo(request) is blocks
    assert memo(make_request([1] * BLOCK, None, session="a")) is not blocks


def test_the_engine_makes_its_hasher_through_the_memo(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.engine import core

    monkeypatch.setattr(core, "get_request_block_hasher", core.get_request_block_hasher)
    remember_block_hashes()
    assert isinstance(core.get_request_block_hasher(BLOCK, sha256), BlockHashMemo)
