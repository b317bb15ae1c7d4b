"""JSON paths: what they name, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.json_path import find, parse_path

DOCUMENT = {"a": {"b": [10, {"c": "deep"}, None]}, "my-key": 1, "it's": 2, 'say "x"': 3, "ü": 4, "list": []}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("$", [DOCUMENT]),
        ("$.a.b[0]", [10]),
        ("$.a.b[-2].c", ["deep"]),
        ("$.a.b[1]['c']", ["deep"]),
        ('$["my-key"]', [1]),
        ("$['it\\'s']", [2]),
        ('$["it\'s"]', [2]),
        ("$['say \"x\"']", [3]),
        ('$["say \\"x\\""]', [3]),
        ("$['\\u00fc']", [4]),
        ("$.ü", [4]),
        ("$[ 'ü' ]", [4]),
        ("$.a.b[*]", [10, {"c": "deep"}, None]),
        ("$.a.b[*].c", ["deep"]),
        ("$.a.*", [[10, {"c": "deep"}, None]]),
        ("$.list[*]", []),
        ("$.a.b[3]", []),
        ("$.a.b[-4]", []),
        ("$.a.b.c", []),
        ("$.a[0]", []),
        ("$.none", []),
    ],
)
def test_a_path_names_values(path: str, found: list[Any]) -> None:
    assert find(parse_path(path), DOCUMENT) == found


@pytest.mark.parametrize(
    "path",
    ["", "a", ".a", "$.", "$.1", "$[01]", "$[-0]", "$[a]", "$..a", "$['a", "$['\\q']", "$.a ", "$[1:2]", "$[?@.a]"],
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"begin|character"):
        parse_path(path)


@given(st.text())
def test_any_name_can_be_written(name: str) -> None:
    double = json.dumps(name)
    single = "'" + double[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
    for quoted in (double, single):
        path = parse_path(f"$[{quoted}]")
        assert path.steps == (name,)
        assert path.is_one


@given(st.text(max_size=20))
def test_any_text_is_a_path_or_refused(text: str) -> None:
    try:
        parse_path("$" + text)
    except ValueError:
        return
