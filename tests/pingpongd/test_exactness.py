"""Which exactness level is given, and with what reason it is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pingpong_bus.chain import Exactness
from pingpong_bus.errors import UsageError
from pingpong_bus.messages import EngineLimits
from pingpongd.exactness import Exact, GroupEngine, engine_kind, exact, unkept

LIMITS = EngineLimits(
    engine="vllm 0.32.0",
    model="m",
    max_model_len=1000,
    vocabulary_size=1000,
    block_size=16,
    kv_tokens=1000,
    max_num_seqs=8,
    sessions=("prefix-cache", "streaming-input"),
    dtype="bfloat16",
    device="H200",
    grid_tokens=256,
    decode_first=True,
    batch_invariant=True,
)


def engine(
    group: str = "a",
    *,
    arguments: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **limits: Any,
) -> GroupEngine:
    found = msgspec.structs.replace(LIMITS, **limits)
    return GroupEngine(group, found, engine_kind(found, arguments or {}, environment or {}))


def resolve(level: Exactness, *engines: GroupEngine, grid_tokens: int | None = None, **asked: Any) -> Exact:
    given: dict[str, Any] = {"mode": "auto", "session": None} | asked
    return exact(level, engines=engines, grid_tokens=grid_tokens, **given)


def test_fast_is_given_by_any_engines() -> None:
    assert resolve("fast", engine(grid_tokens=0), engine("b", device="L4"), mode="overlap") == Exact()


@pytest.mark.parametrize(
    ("configured", "cells", "cell"),
    [(None, (256, 256), 256), (None, (256, 1024), 1024), (64, (256, 1024), 64)],
)
def test_all_groups_cut_at_one_cell(configured: int | None, cells: tuple[int, int], cell: int) -> None:
    engines = [engine(name, grid_tokens=tokens) for name, tokens in zip("ab", cells, strict=True)]
    assert resolve("grid", *engines, grid_tokens=configured) == Exact("grid", cell, engines[0].kind)


@pytest.mark.parametrize("mode", ["auto", "serial", "ping-pong", "overlap"])
def test_invariant_is_given_in_every_mode(mode: str) -> None:
    assert resolve("invariant", engine(), mode=mode) == Exact("invariant", None, engine().kind)


UNLIKE = "round differently"


@pytest.mark.parametrize(
    ("level", "engines", "asked", "why"),
    [
        ("grid", [engine()], {"mode": "overlap"}, "a hop has to have it to itself"),
        ("grid", [engine()], {"session": "streaming-input"}, "cuts its prompt where chunks end"),
        ("grid", [engine(sessions=("streaming-input",))], {}, "cuts its prompt where chunks end"),
        ("grid", [engine(grid_tokens=0, grid_refusal="it speculates.")], {}, 'of group "a": it speculates'),
        ("grid", [engine(), engine("b", grid_tokens=0)], {}, 'of group "b": it cannot be held to a grid'),
        ("invariant", [engine(batch_invariant=False)], {}, "does not run batch-invariant kernels"),
        ("grid", [engine(), engine("b", device="L4")], {}, UNLIKE),
        ("grid", [engine(), engine("b", dtype="float32")], {}, UNLIKE),
        ("grid", [engine(), engine("b", engine="vllm 0.33.0")], {}, UNLIKE),
        ("grid", [engine(), engine("b", model="n")], {}, UNLIKE),
        ("grid", [engine(), engine("b", device="2 x H200")], {}, UNLIKE),
        ("grid", [engine(), engine("b", arguments={"enforce_eager": True})], {}, UNLIKE),
        ("grid", [engine(), engine("b", environment={"VLLM_ATTENTION_BACKEND": "X"})], {}, UNLIKE),
        ("grid", [engine(), engine("b", batch_invariant=False)], {}, UNLIKE),
        ("invariant", [engine(), engine("b", device="L4")], {}, UNLIKE),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(
    level: Exactness, engines: list[GroupEngine], asked: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=f'exactness: exactness "{level}" cannot be kept: .*{why}'):
        resolve(level, *engines, **asked)


def test_what_touches_no_result_makes_an_engine_no_other() -> None:
    arguments, environment = {"gpu_memory_utilization": 0.5}, {"VLLM_CPU_KVCACHE_SPACE": "2"}
    engines = [engine(), engine("b", arguments=arguments, environment=environment, kv_tokens=500)]
    assert resolve("grid", *engines).allows(engines[1].kind)


def test_a_kind_tells_what_it_is_and_no_secret() -> None:
    assert str(engine(device="2 x H200").kind) == "vllm 0.32.0, m, bfloat16, 2 x H200, batch-invariant"
    kind = engine(arguments={"hf_token": "secret"}, environment={"HF_TOKEN": "secret", "OTHER": "secret"}).kind
    assert "secret" not in f"{kind} {msgspec.json.encode(kind)!r}"


def test_a_kept_chain_runs_on_engines_of_its_kind_only() -> None:
    kept = resolve("grid", engine())
    asked: dict[str, Any] = {"mode": "auto", "session": None}
    assert unkept(kept, engines=[engine(grid_tokens=64)], **asked) == ""  # it goes on with its own cell
    assert unkept(kept, engines=[], **asked) == ""
    assert 'accepted at exactness "grid" for vllm 0.32.0' in unkept(kept, engines=[engine(dtype="float32")], **asked)
    told = unkept(kept, engines=[engine(grid_tokens=0, grid_refusal="it speculates")], **asked)
    assert "it speculates" in told
    assert "can be cancelled" in told
    assert unkept(Exact(), engines=[engine(grid_tokens=0, dtype="float32")], **asked) == ""


def test_it_is_kept_as_it_is() -> None:
    kept = resolve("grid", engine(arguments={"enforce_eager": True}))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=Exact) == kept
