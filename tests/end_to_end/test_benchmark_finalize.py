"""The account between two agents: what is noted, and how moments become stages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finalize import STAGES, FinalizeRun, render, stage_times
from pingpong_bus.errors import DataError
from pingpong_bus.messages import AppendRecord, HopAppended, HopEnded, HopFinalized, HopFirstToken
from pingpong_worker.request_trace import TRACE, Moment, read_trace, traced_report

MS = 1_000_000


def test_nothing_is_wrapped_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACE, raising=False)
    sent: list[Any] = []
    subscriber: Any = SimpleNamespace(ring=None)
    assert traced_report(sent.append, subscriber) == sent.append
    assert subscriber.ring is None


def test_a_hops_moments_are_noted_and_its_messages_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TRACE, str(tmp_path))
    sent: list[Any] = []
    subscriber: Any = SimpleNamespace(ring=lambda slot, generation: slot == 3)
    report = traced_report(sent.append, subscriber)
    messages = [
        HopAppended(hop="c/1/0", append=AppendRecord(at_ns=1, done_ns=2, tokens=5, sent=5)),
        HopFinalized(hop="c/1/0", at_ns=3, prompt_tokens=6, prompt_digest="", final_tokens=1),
        HopFirstToken(hop="c/1/0", at_ns=4, cached_tokens=0),
        HopEnded(hop="c/1/0", state="finished", at_ns=5),
    ]
    for message in messages:
        report(message)
    assert sent == messages
    assert [subscriber.ring(3, 1), subscriber.ring(4, 1)] == [True, False]
    moments = read_trace(tmp_path)
    stages = ["appended", "finalized", "first token", "ended"]
    assert moments[:4] == [Moment("c/1/0", stage, at) for at, stage in enumerate(stages, 2)]
    assert [(moment.of, moment.stage) for moment in moments[4:]] == [("3/1", "rung")]


def moments(*entries: tuple[str, str, float]) -> list[Moment]:
    return [Moment(of, stage, int(ms * MS)) for of, stage, ms in sorted(entries, key=lambda entry: entry[2])]


def test_stages_are_those_of_the_request_that_decodes() -> None:
    """What an append that was given up does meanwhile, and what came before, is none of it."""
    seen = moments(
        ("9/1", "rung", 8.0),
        ("c/0/0", "ended", 10.0),
        ("9/1", "rung", 10.5),
        ("c/1/0", "finalized", 11.0),
        ("c/1/0#2", "hashed", 11.1),
        ("c/1/0#3", "encoding", 11.5),
        ("c/1/0#3", "hashed", 13.0),
        ("9/2", "rung", 13.5),
        ("c/1/0#3", "computed", 22.0),
        ("c/1/0", "first token", 23.0),
        ("c/1/0#3", "updated", 24.0),
    )
    assert stage_times(seen, "c/1/0", "c/0/0") == pytest.approx(
        {"bell": 0.5, "feed": 0.5, "submit": 0.5, "hash": 1.5, "compute": 9.0, "commit": 1.0}
    )


def test_a_trace_without_its_ends_is_refused() -> None:
    with pytest.raises(DataError, match="no beginning"):
        stage_times(moments(("c/1/0", "first token", 1.0)), "c/1/0", "c/0/0")


def test_the_table_has_medians_of_runs_that_are_alike() -> None:
    runs = [
        FinalizeRun(
            mode="ping-pong",
            session="prefix-cache",
            prefix=4096,
            output=256,
            index=index,
            prompt_tokens=4368,
            final_tokens=32,
            cached_tokens=4336,
            appends=9,
            gave_up=index == 2,
            ttft_ms=ttft_ms,
            step_ms=8.0,
            stages={"bell": 0.1 * index},
            provenance={},
        )
        for index, ttft_ms in enumerate((12.0, 16.0, 24.0))
    ]
    row = render(runs).splitlines()[2]
    assert row.startswith("| ping-pong, prefix-cache | 4096 | 3 | 1 | 16.00 | 8.00 | 2.00 | 3.00 | 0.10 |")
    assert row.count("|") == 9 + len(STAGES)
