"""A chain's timeline in the trace-event format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

A "process" is a device group, and one more is the chain itself, with its critical path; a "thread" is a row of hops,
for slices of one thread have to nest. Times are microseconds since the chain was submitted. Arrows ("flow" events)
lead from the decode that wrote tokens to the append or prefill that took them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import count
from typing import Any

import msgspec

from pingpong_bus.messages import ChainResult
from pingpong_client.guesses import is_step
from pingpong_client.timeline_account import Account, account
from pingpong_client.timeline_spans import HopSpans, Lane, Span, flows, handovers, lanes

Event = dict[str, Any]
_CHAIN_TRACK = 1


def trace_json(results: Sequence[ChainResult]) -> bytes:
    """Chains as one trace, one beneath the other; no text of prompts or outputs is in it."""
    return msgspec.json.format(msgspec.json.encode(trace(results)), indent=1)


def trace(results: Sequence[ChainResult]) -> dict[str, Any]:
    """The trace as an object to be written as JSON."""
    events: list[Event] = []
    for result in results:
        first = 1 + max((event["pid"] for event in events), default=0)
        events += _chain_events(result, first, len(events))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "made_by": f"pingpong-client {version('pingpongd')}",
            "chains": [
                {"id": result.id, "name": result.name, "submitted_at": result.submitted_at} for result in results
            ],
        },
    }


def _chain_events(result: ChainResult, pid: int, flow_ids: int) -> Iterator[Event]:
    made, found = account(result), lanes(result)
    yield from _named(pid, f"chain {result.name} ({result.id})", result.placement or result.state, pid)
    yield from _thread(pid, _CHAIN_TRACK, "critical path", 0)
    yield from _path_events(made, pid)
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for at, lane in enumerate(found, start=1):
        lane_pid = pid + at
        yield from _named(lane_pid, _title(lane), ", ".join(lane.devices), lane_pid)
        for tid, row in enumerate(lane.rows, start=1):
            yield from _thread(lane_pid, tid, "hops" if len(lane.rows) == 1 else f"hops {tid}", tid)
            for hop in row:
                places[hop.agent, hop.number] = lane_pid, tid
                yield from _hop_events(result, hop, lane_pid, tid)
    numbers = count(flow_ids)
    for flow, number in zip(flows(result), numbers, strict=False):
        wrote = flow.writer.spans[-1]
        leaves = min(max(flow.at_ms, wrote.start_ms), _before(wrote.end_ms, wrote.start_ms))
        ends = (places[_key(flow.writer)], leaves), (places[_key(flow.reader)], flow.span.start_ms)
        unit = "characters" if is_step(result.agents[flow.writer.agent]) else "tokens"
        yield from _arrow("tokens", number, *ends, {unit: flow.tokens})
    for (hop, following), number in zip(handovers(result), numbers, strict=False):
        leaves = _before(hop.end_ms, hop.entry.started_ms)
        ends = (places[_key(hop)], leaves), (places[_key(following)], following.entry.started_ms)
        yield from _arrow(hop.entry.state, number, *ends, {"tokens": following.entry.tokens_before})


def _key(hop: HopSpans) -> tuple[int, int]:
    return hop.agent, hop.number


def _before(end_ms: float, start_ms: float) -> float:
    """The last moment inside a slice: at its very end nothing is bound to it."""
    return max(start_ms, end_ms - 0.001)


def _arrow(
    name: str, number: int, tail: tuple[tuple[int, int], float], head: tuple[tuple[int, int], float], args: Event
) -> Iterator[Event]:
    """An arrow from a place (process and thread) and a time to another."""
    common: Event = {"name": name, "cat": name, "id": number, "args": args}
    for phase, ((pid, tid), at_ms) in (({"ph": "s"}, tail), ({"ph": "f", "bp": "e"}, head)):
        # "bp": "e" binds the arrow's head to the slice that encloses it, in place of the next one.
        yield common | phase | {"pid": pid, "tid": tid, "ts": _us(at_ms)}


def _path_events(made: Account, pid: int) -> Iterator[Event]:
    for step in made.path:
        name = step.kind if step.kind == "queue" else f"{step.kind} {step.agent}"
        args = {"agent": step.agent, "worker": step.worker} if step.agent else {}
        yield _slice(name, f"path,{step.kind}", pid, _CHAIN_TRACK, step.start_ms, step.end_ms, args)


def _hop_events(result: ChainResult, hop: HopSpans, pid: int, tid: int) -> Iterator[Event]:
    agent, entry = result.agents[hop.agent], hop.entry
    args: Event = {"agent": agent.name, "hop": hop.number, "state": entry.state}
    if is_step(agent):
        args |= {"kind": agent.kind, "characters": entry.tokens}
    else:
        args |= {
            "prompt_tokens": entry.prompt_tokens,
            "cached_tokens": entry.cached_tokens,
            "output_tokens": entry.tokens,
            "tokens_before": entry.tokens_before,
        }
        args |= {"model": agent.model} if agent.model else {}
    if entry.why:
        args["why"] = entry.why
    if hop.number + 1 == len(agent.hops) and agent.drafts is not None:
        args |= {"guessed": agent.drafts.drafted, "guessed_right": agent.drafts.accepted}
    if hop.number + 1 == len(agent.hops) and agent.seam is not None:
        args |= {"taken_back": agent.seam.tokens}
    yield _slice(agent.name, "hop", pid, tid, entry.started_ms, hop.end_ms, args)
    for span in hop.spans:
        name = f"{span.kind} again" if span.again else span.kind
        yield _slice(name, span.kind, pid, tid, span.start_ms, span.end_ms, _span_args(span))
    if entry.state in ("lost", "moved", "failed", "aborted"):
        name = f"{agent.name} {entry.state}"
        told: Event = {"why": entry.why} if entry.why else {}
        yield {
            "name": name,
            "cat": entry.state,
            "ph": "i",
            "s": "t",
            "pid": pid,
            "tid": tid,
            "ts": _us(hop.end_ms),
            "args": told,
        }


def _span_args(span: Span) -> Event:
    args: Event = {"characters" if span.kind == "step" else "tokens": span.tokens}
    if span.kind in ("append", "prefill"):
        args["sent"] = span.sent
    if span.overtaken:
        args["overtaken"] = True
    return args


def _slice(name: str, category: str, pid: int, tid: int, start: float, end: float, args: Event) -> Event:
    ts = _us(start)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": round(max(0.0, _us(end) - ts), 3),
        "args": args,
    }


def _named(pid: int, name: str, labels: str, place: int) -> Iterator[Event]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
    if labels:
        yield {"name": "process_labels", "ph": "M", "pid": pid, "tid": 0, "args": {"labels": labels}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": place}}


def _thread(pid: int, tid: int, name: str, place: int) -> Iterator[Event]:
    yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": place}}


def _title(lane: Lane) -> str:
    return f"group {lane.worker}" if lane.worker else "steps between agents"


def _us(ms: float) -> float:
    return round(ms * 1e3, 3)
