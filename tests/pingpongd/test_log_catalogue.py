"""The catalogue of log events is what the source writes, and docs/logs.md is what the catalogue says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from logs_page import PAGE, page
from pingpong_bus.log_records import EVENTS as RECORDS
from pingpongd.log_catalogue import EVENTS, limit_of, meaning
from pingpongd.log_fields import COMMON, FIELDS

SOURCE = Path(__file__).parents[2] / "pingpongd" / "pingpongd"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
UNLISTED = {"exc_info", "suppressed"}
"""Fields that any event may have."""
LOGGERS = {"_log", "self._log"}
"""What the daemon's modules call their loggers; `say` is a bound method of one."""


class Call(NamedTuple):
    """A call that writes a line."""

    where: str
    level: str | None
    """None: chosen at run time."""
    event: str | None
    """None: no literal."""
    fields: tuple[str, ...]


def calls() -> Iterator[Call]:
    for path in sorted(SOURCE.glob("*.py")):
        if path.name == "logs.py":  # its `log_record` writes structs, which are checked below
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (level := _level(node)) is not None:
                first = node.args[0] if node.args else None
                event = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
                fields = tuple(one.arg or "**" for one in node.keywords if one.arg not in UNLISTED)
                yield Call(f"{path.name}:{node.lineno}", level or None, event, fields)


def _level(node: ast.Call) -> str | None:
    """The level of a call that writes a line; empty where it is chosen at run time; None: it writes none."""
    if isinstance(node.func, ast.Name) and node.func.id == "say" and isinstance(node.args[0], ast.Constant):
        return ""
    if isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS and ast.unparse(node.func.value) in LOGGERS:
        return "error" if node.func.attr == "exception" else node.func.attr
    return None


CALLS = list(calls())


def test_the_calls_are_found() -> None:
    assert len(CALLS) > 50


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.where}-{call.event}")
def test_each_call_is_as_the_catalogue_says(call: Call) -> None:
    assert call.event in EVENTS, f"{call.where} writes {call.event!r}, which is not in pingpongd/log_catalogue.py"
    event = EVENTS[call.event]
    assert call.level is None or call.level in event.levels, f"{call.where}: level"
    assert set(call.fields) <= set(event.fields), f"{call.where}: fields"


def test_each_event_is_written_somewhere_with_all_its_fields() -> None:
    written: dict[str, set[str]] = {}
    for call in CALLS:
        written.setdefault(str(call.event), set()).update(call.fields)
    written |= {name: set(record.__struct_fields__) for name, record in RECORDS.items()}
    written["lines_suppressed"] = {"of", "count"}  # by logs.py
    assert {name: set(event.fields) for name, event in EVENTS.items()} == written


def test_fields_are_explained_once_and_none_is_left_over() -> None:
    used = {field for event in EVENTS.values() for field in event.fields}
    assert used == set(FIELDS)
    assert not used & set(COMMON)
    for event in EVENTS.values():
        assert set(event.means) <= set(event.fields)
        assert all(meaning(event, field) for field in event.fields)


def test_limits_are_by_fields_that_the_event_has() -> None:
    for name, event in EVENTS.items():
        assert set(limit_of(name).key) <= set(event.fields), name
        assert event.limit.burst >= 1
        assert event.limit.per_s > 0


def test_times_and_amounts_have_units_in_their_names() -> None:
    for name, field in FIELDS.items():
        assert (field.unit == "ms") == name.endswith("_ms"), name
        assert (field.unit == "s") == (name.endswith("_s") or name == "seconds"), name


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python benchmarks/logs_page.py`"
