"""The benchmark of mixed steps: what it makes of a trace and of its rows, and what it asks of the scheduler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forced_policy import ForcedPolicy
from lone_kernels import LoneKernel
from mixed_figures import setups
from mixed_report import render
from mixed_rows import DeviceStep, LoneRow, MixedStep, Row, StepProfile
from mixed_step import chosen_group, parse_arguments, read_rows
from mixed_trace import device_steps, kernel_kind, read_trace
from pingpong_bus.errors import DataError, UsageError
from pingpong_worker.decode_first import Grant, StepView
from pingpongd.config import parse_config
from runs import append_line

ATTENTION = "void FlashAttnFwdSm90<...>"


def event(name: str, at_us: float, us: float, category: str = "kernel") -> dict[str, Any]:
    return {"cat": category, "ts": at_us, "dur": us, "name": name}


def test_a_step_has_an_attention_kernel_for_each_layer() -> None:
    events = [
        event("nvjet_before", 0, 50),
        event(ATTENTION, 100, 10),
        event("FlashAttnFwdCombine", 110, 5),
        event("nvjet_tst", 112, 30),  # beside the one before for 3 µs
        event("aten::mm", 112, 900, "cpu_op"),
        event(ATTENTION, 150, 10),
        event("Memcpy DtoH", 200, 20, "gpu_memcpy"),
        event(ATTENTION, 300, 10),
        event("rms_norm", 310, 40),
        event(ATTENTION, 360, 10),
        event(ATTENTION, 500, 10),  # begins a step that has no end
        event("nvjet_after", 510, 50),
    ]
    steps, top = device_steps({"traceEvents": events[::-1]}, layers=2)
    assert [(step.wall, step.launches) for step in steps] == [(0.2, 5), (0.2, 3)]
    assert [step.busy for step in steps] == [pytest.approx(0.072), pytest.approx(0.060)]
    assert steps[0].kernels == pytest.approx({"attention": 0.025, "matrices": 0.03, "copies": 0.02})
    assert steps[1].kernels == pytest.approx({"attention": 0.02, "other": 0.04})
    assert top[0] == ("rms_norm", pytest.approx(0.04)) or top[0] == (ATTENTION, pytest.approx(0.04))
    assert dict(top)[ATTENTION] == pytest.approx(0.04), "the step without an end is not counted"


@pytest.mark.parametrize("events", [[], [event("nvjet", 0, 5)], [event(ATTENTION, 0, 5)]])
def test_a_trace_without_a_whole_step_has_none(events: list[dict[str, Any]]) -> None:
    assert device_steps({"traceEvents": events}, layers=1) == ([], [])


def test_kernels_are_known_by_their_names() -> None:
    assert kernel_kind("sm90_xmma_gemm_bf16") == "matrices"
    assert kernel_kind("triton_poi_fused_silu") == "other"


def test_packed_traces_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert read_trace(tmp_path / "a.json.gz") == {"traceEvents": []}


def step(tokens: int, *gaps_ms: float) -> MixedStep:
    return MixedStep(setup="full", context=2048, tokens=tokens, gaps_ms=list(gaps_ms), append_ms=1.0)


ROWS: list[Row] = [
    step(0, 8.0, 8.2),
    step(31, 9.0, 9.1, 30.0),
    step(31, 9.2, 9.3),
    LoneRow(alone=LoneKernel(what="matrices", rows=32, ms=7.0)),
    LoneRow(alone=LoneKernel(what="attention", rows=32, context=2048, splits=0, ms=1.5)),
    LoneRow(alone=LoneKernel(what="attention", rows=32, context=2048, splits=4, ms=1.2)),
    StepProfile(
        setup="full",
        context=2048,
        tokens=31,
        steps=[DeviceStep(wall, wall - 1, {"matrices": 6.0}, 9) for wall in (8.0, 10.0, 10.4)],
        top=[],
    ),
]


def test_the_report_has_medians_of_all_rounds_and_kernels_at_their_best_split() -> None:
    text = render(ROWS)
    assert "| context | + 0 | + 31 |" in text
    assert "| 2048 | 8.10 | 9.20 |" in text
    assert "| context | 32 |\n| --- | --: |\n| 2048 | 8.20 |" in text
    assert "| full, 2048, 31 | 10.20 | 9.20 | 6.00 | 9 |" in text, "the step without appends is left out"
    assert render([]) == ""


def test_steps_of_several_commits_are_not_pooled() -> None:
    other = msgspec.structs.replace(step(31, 5.0), provenance={"commit": "c" * 40})
    assert [times[-1].median_ms for times in setups([step(31, 9.0), other]).values()] == [9.0, 5.0]


def test_rows_of_all_kinds_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for row in ROWS:
        append_line(path, row)
    assert read_rows([path]) == ROWS
    path.write_text(json.dumps({"type": "another"}))
    with pytest.raises(DataError, match=r"steps\.jsonl, line 1, is no row of mixed_step\.py"):
        read_rows([path])


def view(decodes: int, append_tokens: int) -> StepView:
    return StepView(
        decodes=decodes,
        decode_work=0.0,
        target_ratio=1.0,
        target_ms=None,
        append_tokens=append_tokens,
        append_context=0,
        finalizes_wait=True,
        starved_steps=0,
    )


def test_appends_get_what_the_scheduler_is_told_whatever_it_costs() -> None:
    told = memoryview(bytearray(8)).cast("Q")
    policy = ForcedPolicy(told)
    assert policy.grant(view(1, 500)) == Grant(0, "target")
    told[0] = 128
    assert policy.grant(view(1, 500)) == Grant(128, "target")
    assert policy.grant(view(1, 100)).tokens == 100
    assert policy.grant(view(0, 500)) == Grant(500, "full speed")


def test_sizes_and_arguments_are_read_from_the_command_line() -> None:
    options = parse_arguments(
        ["--config", "c.toml", "--tokens", "0,16", "--profile", "64:16,64:0", "--engine-args", '{"seed": 1}']
    )
    assert (options.tokens, options.profile, options.engine_args) == ([0, 16], [(64, 16), (64, 0)], {"seed": 1})


def test_a_group_is_chosen_by_name_and_needs_our_scheduler() -> None:
    groups = [{"name": name, "devices": [f"cpu:{at}"]} for at, name in enumerate("ab")]
    config = parse_config({"model": "m", "groups": groups})
    assert (chosen_group(config, None).name, chosen_group(config, "b").name) == ("a", "b")
    with pytest.raises(UsageError, match="no group 'c'"):
        chosen_group(config, "c")
    with pytest.raises(UsageError, match="not enabled"):
        chosen_group(parse_config({"model": "m", "groups": groups, "decode_first": {"enabled": False}}), None)
