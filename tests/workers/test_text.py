"""Decoding as it comes, and stop strings, against decoding and searching the whole answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_worker.text import Committed, DecodeStream, StopMatcher, WindowDecodeStream

PIECES = [
    b"",  # a special token
    *(bytes([byte]) for byte in "a😀é\N{REPLACEMENT CHARACTER} \n".encode()),
    *(
        piece.encode()
        for piece in ("b", "ab", "aab", "stop", "ST", "OP", " stop", "<", "</", "</s>", "…", "日本", "\n\n")
    ),
    "x😀".encode()[:3],
    "😀y".encode()[2:],
    b"\xff",
]
ids_of_answers = st.lists(st.integers(0, len(PIECES) - 1), max_size=40)


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in ids).decode("utf-8", "replace")


class BytesCodec:
    """A byte-level tokenizer whose ids from 1000 on are single bytes."""

    def decode_stream(self) -> DecodeStream:
        return WindowDecodeStream(self.decode, frozenset({0}))

    def encode_text(self, text: str) -> list[int]:
        return [1000 + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(bytes([t - 1000]) if t >= 1000 else PIECES[t] for t in ids).decode("utf-8", "replace")


CODEC = BytesCodec()


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(at, len(ids)) for at in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


cuts = st.lists(st.integers(0, 40), max_size=10)


@given(ids_of_answers, cuts)
def test_a_stream_gives_what_decoding_at_once_gives(ids: list[int], at: list[int]) -> None:
    stream = CODEC.decode_stream()
    pieces = [stream.step(part) for part in cut(ids, at)]
    assert "".join(pieces) + stream.finish() == decode(ids)


@given(ids_of_answers)
def test_a_stream_holds_back_nothing_but_an_unfinished_end(ids: list[int]) -> None:
    stream = CODEC.decode_stream()
    given_so_far = ""
    for count, token in enumerate(ids, start=1):
        given_so_far += stream.step([token])
        whole = decode(ids[:count])
        assert whole.startswith(given_so_far)
        assert set(whole[len(given_so_far) :]) <= {"\N{REPLACEMENT CHARACTER}"}
        assert stream.pending == whole.endswith("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("spoiled", [1000, *range(120, 136)])
def test_a_stream_of_replacement_characters_keeps_no_more_than_a_window(spoiled: int) -> None:
    longest = 0

    def watched(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    stream = WindowDecodeStream(watched, frozenset())
    smile = [PIECES.index(bytes([byte])) for byte in "😀".encode()]
    ids = [PIECES.index(b"\xff")] * spoiled + smile + [PIECES.index(b"b")]
    assert "".join(stream.step([token]) for token in ids) + stream.finish() == decode(ids)
    assert longest < 200


def strip_first_space(ids: Sequence[int]) -> str:
    """The decoder of a tokenizer that puts a space before each word, and takes the first away."""
    words = {1: " one", 2: " two", 3: " ", 4: "s"}
    return "".join(words[token] for token in ids).removeprefix(" ")


@given(st.lists(st.integers(1, 4), max_size=30), cuts)
def test_a_stream_minds_decoders_that_look_at_the_first_token(ids: list[int], at: list[int]) -> None:
    stream = WindowDecodeStream(strip_first_space, frozenset())
    assert "".join(stream.step(part) for part in cut(ids, at)) + stream.finish() == strip_first_space(ids)


def run(matcher: StopMatcher, parts: list[list[int]]) -> tuple[Committed, list[Committed]]:
    """Feed all parts; returns the sum of what was committed, and each piece."""
    pieces = [matcher.feed(part) for part in parts]
    if not pieces or not pieces[-1].stopped:
        pieces.append(matcher.finish())
    return Committed(
        [token for piece in pieces for token in piece.ids], "".join(piece.text for piece in pieces), pieces[-1].stopped
    ), pieces


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first, and of those the longest."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


def whole_prefix(ids: list[int], limit: int) -> list[int]:
    """The most ids that end with a whole character at `limit` or before."""
    counts = [count for count in range(len(ids) + 1) if is_whole(decode(ids[:count]), limit)]
    return ids[: max(counts)]


def is_whole(text: str, limit: int) -> bool:
    return len(text) <= limit and not text.endswith("\N{REPLACEMENT CHARACTER}")


stop_strings = st.lists(
    st.one_of(
        st.sampled_from(
            ["stop", "STOP", "</s>", "\n\n", "😀", "a", "aab", "aabaaab", " stop", "\N{REPLACEMENT CHARACTER}", "日"]
        ),
        st.text("ab<s 😀\n", min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=4,
)


@given(ids_of_answers, cuts, stop_strings)
def test_a_matcher_finds_what_a_search_of_the_whole_text_finds(ids: list[int], at: list[int], stops: list[str]) -> None:
    whole, _ = run(StopMatcher(stops, CODEC, max_tokens=10_000), cut(ids, at))
    text = decode(ids)
    stop_at = first_stop(text, stops)
    if stop_at is None:
        assert whole == Committed(ids, text, False)
        return
    kept = whole_prefix(ids, stop_at)
    left = text[len(decode(kept)) : stop_at]
    assert whole == Committed(kept + CODEC.encode_text(left), text[:stop_at], True)
    assert CODEC.decode(whole.ids) == whole.text


@given(ids_of_answers, stop_strings)
def test_a_matcher_withholds_no_more_than_could_become_a_stop_string(ids: list[int], stops: list[str]) -> None:
    matcher = StopMatcher(stops, CODEC)
    committed: list[int] = []
    for count, token in enumerate(ids, start=1):
        piece = matcher.feed([token])
        committed += piece.ids
        if piece.stopped:
            return
        text = decode(ids[:count]).rstrip("\N{REPLACEMENT CHARACTER}")
        ends = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
        assert committed == whole_prefix(ids[:count], len(text) - max(ends, default=0))


@given(ids_of_answers, cuts, stop_strings)
def test_a_matcher_commits_no_more_ids_than_it_was_fed(ids: list[int], at: list[int], stops: list[str]) -> None:
    whole, _ = run(StopMatcher(stops, CODEC), cut(ids, at))
    assert len(whole.ids) <= len(ids)
    assert decode(ids).startswith(whole.text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert CODEC.decode(whole.ids) == whole.text


@given(ids_of_answers, cuts, stop_strings, st.integers(0, 5))
def test_a_matcher_goes_on_behind_whatever_was_committed(
    ids: list[int], at: list[int], stops: list[str], more: int
) -> None:
    def matcher() -> StopMatcher:
        return StopMatcher(stops, CODEC, max_tokens=len(ids) + more)

    whole, pieces = run(matcher(), cut(ids, at))
    committed: list[int] = []
    for piece in pieces[:-1]:
        if piece.stopped:
            break
        committed += piece.ids
        successor = matcher()
        text = successor.resume(committed)
        rest, _ = run(successor, [ids[len(committed) :]])
        assert Committed(committed + rest.ids, text + rest.text, rest.stopped) == whole


def token(text: str) -> int:
    return PIECES.index(text.encode())


def test_a_stop_string_inside_a_token_leaves_the_text_before_it() -> None:
    matcher = StopMatcher(["op"], CODEC, max_tokens=8)
    assert matcher.feed([token("b"), token(" stop"), token("b")]) == Committed(
        [token("b"), *CODEC.encode_text(" st")], "b st", True
    )
    assert matcher.feed([token("b")]) == Committed([], "", True)
    assert matcher.finish() == Committed([], "", True)


def test_text_left_of_a_token_is_cut_where_its_ids_do_not_fit() -> None:
    assert StopMatcher(["op"], CODEC, max_tokens=3).feed([token("b"), token(" stop")]) == Committed(
        [token("b"), *CODEC.encode_text(" s")], "b s", True
    )
    assert StopMatcher(["op"], CODEC).feed([token("b"), token(" stop")]).text == "b "
    resumed = StopMatcher(["op"], CODEC, max_tokens=3)
    assert resumed.resume([token("b")]) == "b"
    assert resumed.feed([token(" stop")]) == Committed(CODEC.encode_text(" s"), " s", True)


def test_a_beginning_of_a_stop_string_is_withheld_until_it_is_none() -> None:
    matcher = StopMatcher(["STOP"], CODEC)
    assert matcher.feed([token("b"), token("ST")]) == Committed([token("b")], "b", False)
    assert matcher.feed([token("b")]) == Committed([token("ST"), token("b")], "STb", False)
    assert matcher.feed([token("ST")]) == Committed([], "", False)
    assert matcher.finish() == Committed([token("ST")], "ST", False)


@pytest.mark.parametrize(
    ("stop", "text"), [("aab", "xaaab"), ("aabaaab", "aabaabaaab"), ("abab<", "abababab<"), ("\n\n#", "a\n\n\n#")]
)
def test_a_stop_string_is_found_behind_a_false_start(stop: str, text: str) -> None:
    matcher = StopMatcher([stop], CODEC)
    pieces = [matcher.feed([token]) for token in CODEC.encode_text(text)]
    assert pieces[-1].stopped
    assert "".join(piece.text for piece in pieces) == text.removesuffix(stop)


def test_the_longest_of_several_that_are_complete_at_once_counts() -> None:
    ids = [token("ab"), token("aab"), token("b")]
    for stops in (["b", "aab"], ["aab", "b"]):
        assert StopMatcher(stops, CODEC).feed(ids[1:]).text == ""
    assert StopMatcher(["aab", "ba"], CODEC, max_tokens=9).feed(ids).text == "a"


@pytest.mark.parametrize("method", ["feed", "finish"])
def test_without_stop_strings_everything_passes(method: str) -> None:
    matcher = StopMatcher([], CODEC)
    half, rest = "😀".encode()[:1], "😀".encode()[1:]
    assert matcher.feed([token("b"), PIECES.index(half)]) == Committed([token("b"), PIECES.index(half)], "b", False)
    if method == "finish":
        assert matcher.finish() == Committed([], "\N{REPLACEMENT CHARACTER}", False)
    else:
        ids = [PIECES.index(bytes([byte])) for byte in rest]
        assert matcher.feed(ids) == Committed(ids, "😀", False)


def test_a_long_stop_string_costs_a_step_no_more_than_a_short_one() -> None:
    """Work is counted, not time: each character is compared a bounded number of times."""
    compared = 0

    class Counted(str):
        def __getitem__(self, key: object) -> str:
            nonlocal compared
            compared += 1
            return str.__getitem__(self, key)  # type: ignore[index]

    stop = Counted("a" * 500 + "b")
    matcher = StopMatcher([stop], CODEC)
    compared = 0
    matcher.feed([PIECES.index(b"a")] * 2000)
    assert compared < 4 * 2000
