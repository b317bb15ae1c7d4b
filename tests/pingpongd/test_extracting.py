"""What extract steps take out of the kinds of text that models write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.chain import Extract
from pingpongd.extracting import NotFound, extract, fenced_blocks, last_json

ANSWER = """Sure! Here is a first try: {"title": "draft"}.

And this is it:

```json
{"title": "Ünïcode {braces} in \\"strings\\"", "items": [{"n": 1}, {"n": 2.50}], "none": null}
```

Hope that {helps}!
"""


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("$.title", 'Ünïcode {braces} in "strings"'),
        ("$.items[-1].n", "2.5"),
        ("$.items[*].n", "[1, 2.5]"),
        ("$.items[0]", '{"n": 1}'),
        ("$.none", "null"),
    ],
)
def test_a_path_into_the_last_json_value(path: str, taken: str) -> None:
    assert extract(Extract(json=path), ANSWER) == taken


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"a string"', "a string"),
        (" 42\n", 42),
        ("The answer:\n```\n42\n```\n", 42),
        ('~~~json\n"x"\n~~~', "x"),
        ("first [1, 2] then [3]", [3]),
        ('{"a": {"b": 1}} and no more', {"a": {"b": 1}}),
        ('cut off: {"a": {"b": 1}, "c"', {"b": 1}),
        ('{"a": NaN} [NaN]  {"b": 2}', {"b": 2}),
        ("[" * 5000 + "1", None),
        ('{"a": "' + "x" * 1000, None),
        ("no value {at: all}", None),
        ("", None),
    ],
)
def test_the_last_json_value(text: str, value: Any) -> None:
    if value is None:
        with pytest.raises(NotFound):
            last_json(text)
    else:
        assert last_json(text) == value


_TEXT = st.text(alphabet="ab \n.:,", max_size=20)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    before=_TEXT,
    after=_TEXT,
    value=st.lists(_JSON, max_size=3) | st.dictionaries(st.text(max_size=5), _JSON),
    wide=st.booleans(),
)
def test_any_object_or_array_is_found_in_prose(before: str, after: str, value: Any, wide: bool) -> None:
    text = json.dumps(value, indent=2 if wide else None, ensure_ascii=wide)
    assert last_json(before + text + after) == value


def test_a_value_that_is_nested_too_deeply_is_said_to_be() -> None:
    with pytest.raises(NotFound, match="too deeply"):
        last_json("x " + "[" * 5000 + "]" * 5000)


def test_a_number_that_no_float_holds() -> None:
    with pytest.raises(NotFound, match="too large"):
        extract(Extract(json="$[0]"), "[1e999]")


@pytest.mark.parametrize(
    ("regex", "text", "taken"),
    [
        (r"\d+", "a 12 b 34", "12"),
        (r"Score: (\d+)/(\d+)", "Score: 7/10", "7"),
        (r"(?m)^- (.*)$", "x\n- one\n- two", "one"),
        (r"(?s)<a>(.*?)</a>", "<a>two\nlines</a>", "two\nlines"),
        (r"x*", "abc", ""),
    ],
)
def test_an_expression(regex: str, text: str, taken: str) -> None:
    assert extract(Extract(regex=regex), text) == taken


def test_an_expression_that_matches_nothing_or_without_its_group() -> None:
    with pytest.raises(NotFound, match="matches nothing"):
        extract(Extract(regex=r"\d"), "abc")
    with pytest.raises(NotFound, match="first group"):
        extract(Extract(regex="(a)|b"), "b")


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```py\nx = 1\n```", [("py", "x = 1")]),
        ("~~~ js  and more\na\n\nb\n~~~\n", [("js", "a\n\nb")]),
        ("````md\n```py\ninner\n```\n````", [("md", "```py\ninner\n```")]),
        ("1. first\n\n   ```sh\n   ls\n   ```\n", [("sh", "ls")]),
        ("> ```\n> quoted\n> ```\n", [("", "quoted")]),
        ("    ```\n    indented code\n    ```\n", []),
        ("```not `a` fence\nx\n", []),
        ("```py\nnot closed\n", [("py", "not closed")]),
        ("```\n```\n", [("", "")]),
        ("```a\r\nx\r\n```\r\n", [("a", "x")]),
        ("text ```inline``` text", []),
        ("  ```py\n  x\n    y\n  ```", [("py", "x\n  y")]),
    ],
)
def test_fenced_blocks_are_those_of_commonmark(text: str, blocks: list[tuple[str, str]]) -> None:
    assert fenced_blocks(text) == blocks


def test_the_last_block_of_a_language_is_taken() -> None:
    text = "```Python\none\n```\n```js\ntwo\n```\n```python\nthree\n```\n```\nfour\n```"
    assert extract(Extract(fenced="python"), text) == "three"
    assert extract(Extract(fenced="JS"), text) == "two"
    assert extract(Extract(fenced=""), text) == "four"
    with pytest.raises(NotFound, match='"go"'):
        extract(Extract(fenced="go"), text)


@given(st.text())
def test_any_text_has_blocks_or_none(text: str) -> None:
    fenced_blocks(text)
