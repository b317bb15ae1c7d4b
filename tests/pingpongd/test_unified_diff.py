"""Unified diffs: what was applied is taken back to the byte, and nothing is applied where it does not fit."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pingpong_bus.errors import ConfigError
from pingpongd.unified_diff import parse_diff

_LINES = st.lists(
    st.sampled_from([b"a", b"b", b"", b"\r", b" c", b"-", b"+++ b/x", b"-- ", b"@@ -1 +1 @@", b"\x0c\xff"])
)


def _diff(path: str, old: bytes, new: bytes, context: int = 3) -> bytes:
    """As `diff -u` writes it."""
    sides = [side.split(b"\n") for side in (old, new)]
    lines = [[*(line + b"\n" for line in side[:-1]), *([side[-1]] if side[-1] else [])] for side in sides]
    made = difflib.diff_bytes(difflib.unified_diff, *lines, b"a/" + path.encode(), b"b/" + path.encode(), n=context)
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in made)


@st.composite
def _contents(draw: st.DrawFn) -> bytes:
    return b"\n".join(draw(_LINES)) + draw(st.sampled_from([b"", b"\n", b"end"]))


@given(_contents(), _contents(), st.integers(0, 3))
def test_any_change_is_applied_and_taken_back_to_the_byte(old: bytes, new: bytes, context: int) -> None:
    assume(old != new)
    _, (found,) = parse_diff(b"Subject: x\n\n" + _diff("vllm/x.py", old, new, context), "x.patch")

    assert found.path == "vllm/x.py"
    assert found.apply(old) == new
    assert found.revert(new) == old


@given(_contents(), _contents(), _contents())
def test_nothing_is_applied_to_lines_that_are_others(old: bytes, new: bytes, other: bytes) -> None:
    assume(old != new)
    _, (found,) = parse_diff(_diff("vllm/x.py", old, new, context=1000), "x.patch")

    try:
        made = found.apply(other)
    except ConfigError:
        return
    assert other.startswith(old)  # all of it is context; what follows is none of the hunk's business
    assert made == new + other[len(old) :]


def test_a_line_further_down_is_elsewhere() -> None:
    old, new = b"a\nb\nc\n", b"a\nB\nc\n"
    _, (found,) = parse_diff(_diff("vllm/x.py", old, new), "x.patch")

    with pytest.raises(ConfigError, match="line 1 does not fit"):
        found.apply(b"0\n" + old)


def test_a_file_is_added_and_taken_away() -> None:
    data = b"Subject: new\n--- /dev/null\n+++ b/vllm/new.py\n@@ -0,0 +1,2 @@\n+a\n+b\n"
    head, (found,) = parse_diff(data, "x.patch")

    assert head == b"Subject: new"
    assert found.added
    assert found.apply(None) == b"a\nb\n"
    assert found.revert(b"a\nb\n") is None
    with pytest.raises(ConfigError, match="such a file already"):
        found.apply(b"")
    with pytest.raises(ConfigError, match="more in it"):
        found.revert(b"a\nb\nc\n")


_GOOD = b"--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -1 +1 @@\n-a\n+b\n"


def test_what_git_adds_is_no_matter() -> None:
    data = b"diff --git a/vllm/x.py b/vllm/x.py\nindex 1..2 100644\n" + _GOOD + b"-- \n2.40.1\n\n"

    _, (found,) = parse_diff(data, "x.patch")

    assert found.apply(b"a\n") == b"b\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no diff"),
        (b"Subject: only words\n", "part of no diff"),
        (b"diff --git a/vllm/x b/vllm/y\nrename from vllm/x\nrename to vllm/y\n", "refused"),
        (b"diff --git a/vllm/x b/vllm/x\nold mode 100644\nnew mode 100755\n", "refused"),
        (b"diff --git a/vllm/x b/vllm/x\nGIT binary patch\nliteral 0\n", "refused"),
        (_GOOD.replace(b"+++ b/vllm/x.py", b"+++ b/vllm/y.py"), "renamed or removed"),
        (_GOOD.replace(b"+++ b/vllm/x.py", b"+++ /dev/null"), "renamed or removed"),
        (_GOOD.replace(b"vllm/x.py", b"vllm/../x.py"), "path"),
        (_GOOD.replace(b"vllm/x.py", b"/etc/x.py"), "path"),
        (_GOOD.replace(b"a/vllm", b"vllm", 1), "path|part of no diff"),
        (_GOOD.replace(b"vllm/x.py", b"vllm/\xc3\xa4.py"), "ASCII"),
        (_GOOD.replace(b"-1 +1", b"-1,2 +1"), "cut off"),
        (_GOOD.replace(b"-1 +1", b"-1 +1,0"), "part of no diff"),
        (_GOOD.replace(b"-1 +1", b"-1 +1,2") + b" c\n", "other numbers of lines"),
        (_GOOD.replace(b"-1 +1", b"-0 +1"), "counted from 1"),
        (_GOOD.replace(b"@@ -1 +1 @@", b"@@ nonsense @@"), "head of a hunk"),
        (_GOOD.replace(b"-a", b"a"), "none of space"),
        (_GOOD + b"more\n", "part of no diff"),
        (_GOOD + _GOOD, "twice"),
        (b"--- a/vllm/x.py\n+++ b/vllm/x.py\n", "no hunk"),
        (b"--- a/vllm/x.py\n@@ -1 +1 @@\n", r"\+\+\+ is missing"),
        (b"--- /dev/null\n+++ b/vllm/x.py\n@@ -1 +1 @@\n-a\n+b\n", "new file"),
    ],
)
def test_what_is_no_diff_or_does_too_much_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_diff(data, "x.patch")
