"""Random, damaged and hostile bytes for every decoder and for chain.json, by hypothesis.

    python benchmarks/fuzz_decoders.py [--examples 100000] [--seed 1]

A decoder may answer with a value or with its one error, and with nothing else. What it takes must come back the same
once encoded anew. Prints a line for each decoder; one record is appended to `benchmarks/results/fuzz-decoders.jsonl`.
The exit code is 1 where one raised something else, and then the shortest such input is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from fuzz_frames import CLIENT_FRAMES, OTHER_FRAMES, WORKER_FRAMES
from pingpong_bus import codec
from pingpong_bus.chain import Chain, parse_chain, validate_chain
from pingpong_bus.errors import ChainError, MessageError
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    AgentResult,
    ChainEvent,
    ChainResult,
    HopSpec,
    Literals,
    Prepare,
    ResultReply,
    Sampling,
    StartHop,
    StreamRef,
    TokenChunk,
)
from provenance import provenance

RESULTS = Path(__file__).parent / "results" / "fuzz-decoders.jsonl"

_CHAIN: dict[str, Any] = {
    "name": "fuzz",
    "agents": [
        {"name": "a", "prompt": "say {{input.x}}", "system": "s", "max_tokens": 8, "stop": ["."]},
        {"name": "b", "messages": [{"role": "user", "content": "{{a}}"}], "temperature": 0.5, "seed": 3},
        {"name": "c", "prompt_ids": [1, "{{b}}", 2], "ignore_eos": True, "stop_token_ids": [7]},
    ],
    "inputs": {"x": None, "y": "z"},
}
_SUPERVISOR_FRAMES = [
    codec.encode(Prepare(request=1, chain=msgspec.convert(_CHAIN, Chain), inputs={"x": "1"})),
    codec.encode(
        StartHop(
            spec=HopSpec(
                hop="0a1b2c3d/0/0",
                output=StreamRef(slot=0, generation=1),
                segments=[Literals(ids=[1, 2, 3])],
                sampling=Sampling(max_tokens=4),
            )
        )
    ),
]
_DAEMON_FRAMES = [
    *OTHER_FRAMES[:2],
    codec.encode(ChainEvent(chain="x", kind="tokens", at_ms=1.0, agent="a", data={"ids": [1], "text": "t"})),
    codec.encode(
        ResultReply(
            request=1, result=ChainResult(id="x", name="n", state="finished", agents=[AgentResult(name="a", text="t")])
        )
    ),
]

_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
_trees = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)
_edits = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from("rid"), st.binary(min_size=1, max_size=5)), max_size=5
)


class Target(msgspec.Struct, frozen=True):
    """A decoder and what it may do."""

    name: str
    decode: Callable[[bytes], Any]
    error: type[Exception]
    whole: list[bytes]
    """Inputs that it takes."""
    dump: Callable[[Any], bytes]
    """An accepted value as bytes, for the decoder to take again."""
    trees: Callable[[Any], bytes]
    """Any tree of values as bytes in the decoder's format."""


def _chain_bytes(tree: Any) -> bytes:
    """Any tree as JSON; what JSON has no word for becomes text."""
    return json.dumps(tree, default=repr, skipkeys=True).encode("utf-8", "surrogatepass")


def _chain(data: bytes) -> Chain:
    chain = parse_chain(data)
    validate_chain(chain)  # what was parsed is valid
    return chain


TARGETS = [
    Target(
        "client requests",
        codec.decode_client_request,
        MessageError,
        CLIENT_FRAMES,
        codec.encode,
        msgspec.msgpack.encode,
    ),
    Target(
        "daemon messages",
        codec.decode_daemon_message,
        MessageError,
        _DAEMON_FRAMES,
        codec.encode,
        msgspec.msgpack.encode,
    ),
    Target(
        "supervisor messages",
        codec.decode_supervisor_message,
        MessageError,
        _SUPERVISOR_FRAMES,
        codec.encode,
        msgspec.msgpack.encode,
    ),
    Target(
        "worker messages",
        codec.decode_worker_message,
        MessageError,
        WORKER_FRAMES,
        codec.encode,
        msgspec.msgpack.encode,
    ),
    Target(
        "doorbells",
        codec.decode_bell,
        MessageError,
        [codec.encode_bell(TokenChunk(PROTOCOL_VERSION, 3, 2, 100, [1, 2**32 - 1], 1))],
        codec.encode_bell,
        lambda tree: codec.bell_topic(0, 1) + msgspec.msgpack.encode(tree),
    ),
    Target("chain.json", _chain, ChainError, [_chain_bytes(_CHAIN)], msgspec.json.encode, _chain_bytes),
]


def _edited(frame: bytes, edits: list[tuple[int, str, bytes]]) -> bytes:
    changed = bytearray(frame)
    for where, kind, data in edits:
        at = where % (len(changed) + 1)
        if kind == "d":
            del changed[at : at + len(data)]
        else:
            changed[at : at + (len(data) if kind == "r" else 0)] = data
    return bytes(changed)


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """Bytes for a decoder: at random, of the right format, damaged, cut, and grafted into a message that is whole."""
    whole = st.sampled_from(target.whole)
    decoded = [_plain(target, frame) for frame in target.whole]
    grafted = st.tuples(st.sampled_from(decoded), st.integers(0, 40), _leaves | _trees).map(
        lambda graft: _graft(*graft)
    )
    return st.one_of(
        st.binary(max_size=200),
        _trees.map(target.trees),
        st.tuples(whole, _edits).map(lambda pair: _edited(*pair)),
        st.tuples(whole, st.integers(0, 10**6)).map(lambda pair: pair[0][: pair[1] % (len(pair[0]) + 1)]),
        grafted.map(target.trees),
    )


def _plain(target: Target, frame: bytes) -> Any:
    """A whole message as a tree of plain values."""
    if target.error is ChainError:
        return json.loads(frame)
    body = frame[8:] if target.decode is codec.decode_bell else frame
    return msgspec.msgpack.decode(body)


def _graft(tree: Any, at: int, branch: Any) -> Any:
    """The tree with its `at`-th value, counted from the outside in, put in place of by another."""
    places: list[Any] = [tree]
    for place in places:
        keys = list(place) if isinstance(place, dict) else range(len(place)) if isinstance(place, list) else ()
        places.extend(place[key] for key in keys)
    chosen = places[at % len(places)]

    def copy(value: Any) -> Any:
        if value is chosen:
            return branch
        if isinstance(value, dict):
            return {key: copy(inner) for key, inner in value.items()}
        return [copy(inner) for inner in value] if isinstance(value, list) else value

    return copy(tree)


def check(target: Target, data: bytes) -> bool:
    """Give a decoder some bytes; whether it took them.

    Raises:
        Exception: whatever it may not raise; AssertionError where what it took does not come back.
    """
    try:
        value = target.decode(data)
    except target.error:
        return False
    again = target.decode(target.dump(value))
    # It is what this program is for, and hypothesis shows the input.
    assert target.dump(again) == target.dump(value), "what was taken does not come back"  # noqa: S101
    return True


def fuzz(target: Target, examples: int, seed: int) -> Counter[bool]:
    """Check a decoder with so many inputs; how many it took, and refused."""
    counts: Counter[bool] = Counter()

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(inputs(target))
    def run(data: bytes) -> None:
        counts[check(target, data)] += 1

    for frame in target.whole:
        assert check(target, frame), f"{target.name}: a whole message is refused"  # noqa: S101
    run()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", type=int, default=100_000, help="inputs for each decoder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    failed = False
    for target in TARGETS:
        start = time.monotonic()
        try:
            counts = fuzz(target, arguments.examples, arguments.seed)
        except Exception:  # noqa: BLE001 - whatever a decoder raises is a finding, and the others are still to come
            failed = True
            found[target.name] = {"failure": traceback.format_exc()}
            traceback.print_exc()
            continue
        seconds = round(time.monotonic() - start, 1)
        found[target.name] = {"taken": counts[True], "refused": counts[False], "seconds": seconds}
        print(f"{target.name:20} {counts[True]:8} taken {counts[False]:8} refused in {seconds} s")
    record = {
        "benchmark": "fuzz-decoders",
        **provenance(),
        "settings": {"examples": arguments.examples, "seed": arguments.seed},
        "decoders": found,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
