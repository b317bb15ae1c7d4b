"""The trace: what Perfetto and chrome://tracing ask of a trace-event file holds, and it tells what happened."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from pingpong_bus.messages import ChainResult
from pingpong_client.timeline_trace import trace_json
from timeline_samples import in_series, lost_once, queued, read_ahead, void_once, with_steps

Event = dict[str, Any]
ALL = [read_ahead(), in_series(), lost_once(), void_once(), with_steps()]


def events(*results: ChainResult) -> list[Event]:
    found: list[Event] = json.loads(trace_json(results))["traceEvents"]
    return found


def of(found: list[Event], phase: str) -> list[Event]:
    return [event for event in found if event["ph"] == phase]


@pytest.mark.parametrize("results", [[result] for result in ALL] + [ALL], ids=len)
def test_every_event_has_what_its_phase_asks_for(results: list[ChainResult]) -> None:
    for event in events(*results):
        assert event["ph"] in "XMsfi"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            assert event["name"] in {
                "process_name",
                "process_labels",
                "process_sort_index",
                "thread_name",
                "thread_sort_index",
            }
            assert event["args"]
            continue
        assert event["ts"] >= 0
        assert event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"


@pytest.mark.parametrize("results", [[result] for result in ALL] + [ALL], ids=len)
def test_slices_of_a_thread_nest(results: list[ChainResult]) -> None:
    """Perfetto drops a slice that overlaps another of its thread in part."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in of(events(*results), "X"):
        end = round(event["ts"] + event["dur"], 3)
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], end))
    for slices in threads.values():
        open_ends: list[float] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


@pytest.mark.parametrize("result", ALL, ids=lambda result: result.placement)
def test_arrows_lead_from_slice_to_slice(result: ChainResult) -> None:
    found = events(result)
    starts = {event["id"]: event for event in of(found, "s")}
    ends = {event["id"]: event for event in of(found, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(of(found, "s"))
    slices = of(found, "X")

    def within(event: Event, kind: set[str]) -> bool:
        return any(
            (each["pid"], each["tid"]) == (event["pid"], event["tid"])
            and each["cat"] in kind
            and (each["ts"] <= event["ts"] < each["ts"] + each["dur"] or event["ts"] == each["ts"])
            for each in slices
        )

    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        assert ends[number]["bp"] == "e"
        tokens = start["cat"] == "tokens"
        assert within(start, {"decode", "step"} if tokens else {"hop"})
        assert within(ends[number], {"append", "prefill", "step"} if tokens else {"hop"})


def test_an_arrow_leads_from_a_lost_hop_to_the_one_that_went_on() -> None:
    found = [event for event in events(lost_once()) if event["ph"] in "sf" and event["cat"] == "lost"]
    assert [(event["ph"], event["ts"], event["args"]) for event in found] == [
        ("s", 299_999, {"tokens": 20}),
        ("f", 320_000, {"tokens": 20}),
    ]


def test_lanes_are_named_by_group_and_device() -> None:
    found = events(read_ahead())
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    labels = {event["pid"]: event["args"]["labels"] for event in found if event["name"] == "process_labels"}
    assert list(names.values()) == ["chain chain (c1)", "group a", "group b"]
    assert "GPU-11111111-2222-3333-4444-555555555555" in labels.values()


def test_all_work_is_told() -> None:
    found = of(events(read_ahead()), "X")
    assert [event["name"] for event in found if event["cat"] == "hop"] == ["one", "two"]
    work = [(e["name"], e["ts"], e["dur"], e["args"]["tokens"]) for e in found if e["cat"] in ("append", "prefill")]
    assert work == [
        ("prefill", 11_000, 100_000, 200),
        ("append", 112_000, 100_000, 100),
        ("append", 300_000, 10_000, 32),
        ("append", 500_000, 12_000, 18),
        ("prefill", 512_000, 30_000, 10),
    ]
    path = [event["name"] for event in found if event["cat"].startswith("path")]
    assert path == ["queue", "wait one", "prefill one", "decode one", "prefill two", "decode two"]


def test_losses_are_marked_and_what_was_done_again_is_named() -> None:
    found = events(lost_once())
    (lost,) = of(found, "i")
    assert lost["name"] == "one lost"
    assert lost["args"] == {"why": "it ended with signal 9."}
    assert [event["name"] for event in of(found, "X") if "again" in event["name"]] == ["prefill again"]


def test_several_chains_do_not_mix() -> None:
    found = events(read_ahead(), read_ahead())
    pids = [event["pid"] for event in found if event["name"] == "process_name"]
    assert pids == sorted(set(pids))
    assert len(pids) == 6
    arrows = [event["id"] for event in of(found, "s")]
    assert len(arrows) == len(set(arrows)) == 4


def test_a_chain_that_has_not_run_makes_a_trace_too() -> None:
    assert [event["ph"] for event in events(queued())] == ["M"] * 5


def test_no_text_is_told() -> None:
    result = read_ahead()
    told = [msgspec.structs.replace(agent, text="SECRET", output_ids=[424242]) for agent in result.agents]
    trace = trace_json([msgspec.structs.replace(result, agents=told)])
    assert b"SECRET" not in trace
    assert b"424242" not in trace


def test_times_are_in_order_of_the_path() -> None:
    path = [event for event in of(events(lost_once()), "X") if event["cat"].startswith("path")]
    assert all(round(a["ts"] + a["dur"], 3) == b["ts"] for a, b in pairwise(path))
