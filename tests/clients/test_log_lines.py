"""Log lines in all the forms in which they come; and what is no line of the daemon's."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitter_log import BEGAN, jitter, line, written
from pingpong_bus.log_records import DecodeJitter, GroupHealthChanged
from pingpong_client.log_lines import LONGEST, Lines, parse_line, parse_record

PLAIN = written(1.5, jitter())
FORMS = {
    "as written": PLAIN,
    "with a priority": b"<4>" + PLAIN,
    "journalctl short": b"Nov 30 10:00:01 host pingpongd[123]: " + PLAIN,
    "journalctl json": json.dumps({"MESSAGE": PLAIN.decode(), "_PID": "1", "PRIORITY": "4"}).encode(),
    "journalctl json, bytes": json.dumps({"MESSAGE": list(PLAIN), "_PID": "1"}).encode(),
    "Docker": json.dumps({"log": PLAIN.decode() + "\n", "stream": "stderr", "time": "2026-11-30T10:00:01Z"}).encode(),
    "Kubernetes": b"2026-11-30T10:00:01.5Z stderr F " + PLAIN,
    "Docker in the journal": json.dumps({"MESSAGE": json.dumps({"log": PLAIN.decode()})}).encode(),
    "Windows line end": PLAIN + b"\r",
}
FOREIGN = {
    "words": b"Started pingpongd.service",
    "cut at its end": PLAIN[:-20],
    "cut at its beginning": PLAIN[20:],
    "JSON of another program": b'{"msg": "hello", "time": 5}',
    "no time": b'{"event": "decode_steps"}',
    "a time without a zone": b'{"event": "decode_steps", "timestamp": "2026-11-30T10:00:00"}',
    "no object": b"[1, 2]",
    "no UTF-8": b'{"event": "\xff", "timestamp": "2026-11-30T10:00:00Z"}',
    "an empty message": b'{"MESSAGE": null}',
    "nested without end": b'{"MESSAGE": "' + b'{\\"MESSAGE\\": ' * 5 + b'"}',
}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_the_daemon_is_heard_in_every_form(data: bytes) -> None:
    found = parse_line(data)
    assert found is not None
    assert (found.at, found.event) == (BEGAN + 1.5, "decode_jitter")
    assert parse_record(found) == jitter()


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_the_daemons_is_passed_over(data: bytes) -> None:
    assert parse_line(data) is None


@given(st.binary(max_size=60))
def test_no_line_can_do_harm(data: bytes) -> None:
    assert parse_line(data) is None or data.startswith(b"{")
    parse_line(b'{"event": "decode_jitter", "timestamp": ' + data)


def test_records_of_newer_daemons_are_understood_as_far_as_they_go() -> None:
    known = json.loads(PLAIN)
    found = parse_line(json.dumps(known | {"cause": "cosmic_rays", "humidity": 0.5}).encode())
    assert found is not None
    record = parse_record(found)
    assert isinstance(record, DecodeJitter)
    assert record.cause == "unknown"
    health = parse_line(line(0, "group_health", worker="a", state="healthy", was="degraded", cause="new", why=""))
    assert health is not None
    record = parse_record(health)
    assert isinstance(record, GroupHealthChanged)
    assert (record.was, record.cause) == ("degraded", "unknown")


@pytest.mark.parametrize("change", [{"slowdown": "fast"}, {"cause": 5}, {"devices": None}, {"cause": "not a word"}])
def test_records_that_make_no_sense_are_none(change: dict[str, object]) -> None:
    found = parse_line(json.dumps(json.loads(PLAIN) | change).encode())
    assert found is not None
    assert parse_record(found) is None


def test_events_that_no_report_is_made_from_are_no_records() -> None:
    found = parse_line(line(0, "daemon_ready", seconds=1.0))
    assert found is not None
    assert parse_record(found) is None


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_lines_do_not_depend_on_how_they_come(data: bytes, cuts: list[int]) -> None:
    lines, found, last = Lines(), [], 0
    for cut in sorted(cuts):
        found += lines.feed(data[last:cut])
        last = max(last, cut)
    found += lines.feed(data[last:]) + lines.end()
    assert b"\n".join(found) == data.removesuffix(b"\n")


def test_a_line_without_end_does_not_fill_memory() -> None:
    lines = Lines()
    found = []
    for _ in range(40):
        found += lines.feed(b"x" * (LONGEST // 8))
        assert len(lines._rest) <= LONGEST + LONGEST // 8
    found += lines.feed(b"\nnext\nrest")
    assert found == [b"", b"next"]
    assert lines.end() == [b"rest"]
