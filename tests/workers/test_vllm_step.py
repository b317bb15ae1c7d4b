"""What a step is seen to hold, how steps are measured, and how the engine gets its scheduler: no vLLM is imported."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pingpong_bus.errors import ConfigError
from pingpong_worker.config import WorkerConfig
from pingpong_worker.decode_first import Grant, StepView
from pingpong_worker.step_board import BoardWriter, StepBoard
from pingpong_worker.step_ledger import PlannedStep, StepLedger
from pingpong_worker.step_prices import StepPrices
from pingpong_worker.vllm_grid import cell_tokens
from pingpong_worker.vllm_marks import is_append, mark_of
from pingpong_worker.vllm_settings import engine_arguments, engine_environment, is_decode_first
from pingpong_worker.vllm_step import look, urgency
from pingpong_worker.vllm_versions import scheduler_class

APPEND = {"append": True}


def params(mark: Any) -> Any:
    return SimpleNamespace(extra_args=None if mark is None else {"pingpong": mark})


def request(name: str, *, mark: Any = None, prompt: int = 100, tokens: int = 0, computed: int = 0, **more: Any) -> Any:
    """A vLLM `Request` in what a scheduler of ours reads."""
    values = {
        "request_id": name,
        "sampling_params": params(mark),
        "num_prompt_tokens": prompt,
        "num_tokens": max(prompt, tokens),
        "num_computed_tokens": computed,
        "num_output_placeholders": 0,
        "num_output_tokens": max(0, tokens - prompt),
        "max_tokens": 10,
        "spec_token_ids": [],
        "streaming_queue": None,
        "status": SimpleNamespace(name="WAITING"),
    }
    return SimpleNamespace(**(values | more))


# ---------------------------------------------------------------------------------------------------------------- marks


def test_marks_of_others_and_none_are_no_marks() -> None:
    assert mark_of(None) == mark_of(params(None)) == mark_of(params("append")) == {}
    assert mark_of(SimpleNamespace(extra_args={"other": 1})) == {}
    assert not is_append(request("a"))
    assert is_append(request("a", mark=APPEND))


def test_an_append_with_its_sessions_answer_queued_behind_it_is_waited_for() -> None:
    next_append, answer = (SimpleNamespace(sampling_params=params(mark)) for mark in (APPEND, None))
    assert is_append(request("s", mark=APPEND, streaming_queue=deque([next_append])))
    assert is_append(request("s", mark=APPEND, streaming_queue=deque([next_append, None]))), "closed without an answer"
    assert not is_append(request("s", mark=APPEND, streaming_queue=deque([next_append, answer, None])))


# ----------------------------------------------------------------------------------------------------- a step's content


def test_requests_are_sorted_by_who_waits_for_them() -> None:
    decode = request("decode", tokens=103, computed=102, mark={"itl_ratio": 1.2, "itl_target_ms": 20})
    other = request("other", tokens=101, computed=100, mark={"itl_ratio": 2.0})
    prompt = request("prompt", computed=64)
    append = request("append", mark=APPEND, computed=40)
    through = request("through", mark=APPEND, computed=100)
    late = request("late")
    late_append = request("late append", mark=APPEND)
    paused = request("paused", status=SimpleNamespace(name="WAITING_FOR_STREAMING_REQ"))
    content = look([append, through, prompt, other, decode], [[paused, late_append], [late]])
    assert content.decodes == [other, decode]
    assert content.prompts == [prompt]
    assert content.waiting_prompts == [late]
    assert content.appends == [append], "one that is computed to its end needs nothing"
    assert content.waiting_appends == [([paused, late_append], late_append)]
    view = content.view(finalizes_wait=True, starved_steps=3)
    assert (view.decodes, view.decode_work) == (2, 101 + 103)
    assert (view.target_ratio, view.target_ms) == (1.2, 20), "the tightest of each"
    assert (view.append_tokens, view.append_context) == (60 + 100, 40)
    running = [append, prompt, through, decode]
    assert sorted(running, key=lambda one: urgency(one, None)) == [decode, prompt, append, through]
    assert sorted(running, key=lambda one: urgency(one, append)) == [decode, append, prompt, through]


def test_what_will_not_be_in_the_step_is_no_decode() -> None:
    last = request("last", tokens=109, computed=109, num_output_placeholders=1)
    before = request("before", tokens=108, computed=108, num_output_placeholders=1)
    assert look([last, before], []).decodes == [before]


def test_a_preempted_request_computes_its_own_output_again_as_a_prompt() -> None:
    again = request("again", tokens=105, computed=100)
    assert look([again], []).prompts == [again]


def test_cells_end_at_multiples_of_the_grid() -> None:
    assert [cell_tokens(start, 700, 256) for start in (0, 256, 512, 300)] == [256, 256, 188, 212]


# ----------------------------------------------------------------------------------------------------------- the ledger


def view_of(append_tokens: int, ratio: float) -> StepView:
    return StepView(
        decodes=1,
        decode_work=10.0,
        target_ratio=ratio,
        target_ms=None,
        append_tokens=append_tokens,
        append_context=0,
        finalizes_wait=False,
        starved_steps=0,
    )


def planned(output: object, begun: float, **more: Any) -> PlannedStep:
    view = view_of(more.pop("waiting", 0), ratio=1.3)
    values = {"rows": 1, "work": 10.0, "kind": "decodes", "append_tokens": 0, "admits": False}
    values |= {"grant": Grant(0, "no appends")}
    return PlannedStep(output=output, begun=begun, view=view, **(values | more))


def test_a_price_that_was_wrong_forbids_nothing_for_ever() -> None:
    ledger = StepLedger((), 64, None)
    now = 0.0
    for kind, rows, seconds in [("decodes", 1, 0.010), *[("beside", 17, 0.200)] * 8]:
        output = object()
        ledger.plan(planned(output, begun=now, kind=kind, rows=rows, append_tokens=rows - 1, waiting=rows - 1))
        ledger.end(output, now := now + seconds)
    step = view_of(900, ratio=1.5)
    grant = ledger.policy.grant(step)
    assert grant.tokens == 0, "a machine that was busy has made it dear"
    steps = 0
    while grant.tokens == 0:
        output = object()
        ledger.plan(planned(output, begun=now, waiting=900, grant=grant))
        ledger.end(output, now := now + 0.010)
        grant, steps = ledger.policy.grant(step), steps + 1
        assert steps < 200
    assert grant.reason == "exploring"
    assert steps > 100, "a target that nothing meets is not passed more often than once in a hundred steps"


def test_what_it_costs_to_take_a_request_in_is_no_price_of_its_size() -> None:
    ledger = StepLedger((), 64, None)
    alone, first, later = object(), object(), object()
    ledger.plan(planned(alone, begun=0.0))
    ledger.end(alone, 0.010)
    beside: dict[str, Any] = {"kind": "beside", "rows": 33, "append_tokens": 32, "waiting": 64}
    step = view_of(32, ratio=1.5)
    ledger.plan(planned(first, begun=0.010, admits=True, **beside))
    ledger.end(first, 0.030)
    ledger.plan(planned(later, begun=0.030, **beside))
    ledger.end(later, 0.041)
    assert ledger.policy.grant(step).tokens == 32, "a step of this size takes 11 ms, not 20"


def test_a_step_lasts_from_its_start_or_from_the_end_of_the_one_before() -> None:
    ledger = StepLedger((), 64, None)
    first, second, empty = object(), object(), object()
    ledger.plan(planned(first, begun=10.0))
    ledger.plan(planned(second, begun=10.001))  # planned while the first one runs
    ledger.end(first, 10.010)
    assert ledger.policy.decode_seconds(planned(first, 0.0).view) == pytest.approx(0.010)
    ledger.end(second, 10.020)
    ledger.end(empty, 10.5)
    assert ledger.policy.decode_seconds(planned(first, 0.0).view) == pytest.approx(0.010), "nothing in between counts"


def test_the_board_shows_steps_with_decodes(tmp_path: Path) -> None:
    board = StepBoard(tmp_path / "board")
    ledger = StepLedger((), 64, BoardWriter(tmp_path / "board"))
    for at, step in enumerate(
        [
            {},
            {"waiting": 50, "append_tokens": 16, "rows": 17, "kind": "beside", "grant": Grant(16, "exploring")},
            {"waiting": 34, "grant": Grant(0, "measuring")},
        ]
    ):
        output = object()
        ledger.plan(planned(output, begun=float(at), **step))
        ledger.end(output, at + 0.008)
    state = board.state()
    assert state is not None
    assert (state.steps, state.append_tokens, state.withheld_steps) == (3, 16, 1)
    assert (state.budget_tokens, state.reason) == (0, "measuring")
    assert state.step_ms == pytest.approx(8)
    assert state.decode_ms == pytest.approx(8)
    assert state.target_ms == pytest.approx(8 * 1.3)


def test_the_board_shows_the_memory_in_use_also_after_the_last_decode(tmp_path: Path) -> None:
    board = StepBoard(tmp_path / "board")
    ledger = StepLedger((), 64, BoardWriter(tmp_path / "board"))
    ledger.end(object(), 0.0, 0.1)
    assert board.state() is None, "nothing was decoded yet"
    output = object()
    ledger.plan(planned(output, begun=0.0))
    ledger.end(output, 0.008, 0.25)
    shown = board.state()
    assert shown is not None
    assert shown.kv_usage == 0.25
    for usage in (0.5, 0.0):
        ledger.end(object(), 0.1, usage)
        assert board.state() == msgspec.structs.replace(shown, kv_usage=usage)


def test_prices_on_file_are_where_an_engine_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = StepPrices()
    for _ in range(8):
        known.learn(1, 10.0, 0.02, "decodes")
    board = StepBoard(tmp_path / "board")
    board.offer_prices(known.to_dict())
    view = planned(None, 0.0).view
    assert StepLedger((), 64, BoardWriter(tmp_path / "board")).policy.decode_seconds(view) == pytest.approx(0.02)
    board.offer_prices({"graphs": [], "decodes": [["?"]], "beside": [], "prompts": []})
    assert math.isinf(StepLedger((), 64, BoardWriter(tmp_path / "board")).policy.decode_seconds(view))
    assert "make no sense" in caplog.text


# ----------------------------------------------------------------------------------------- which scheduler, and kernels


def config(devices: list[str], **more: Any) -> WorkerConfig:
    values = {"name": "w", "devices": devices, "slab_fd": -1, "control": "", "bell": "", "supervisor_pid": 0}
    return WorkerConfig(**(values | more))


def test_which_scheduler_an_engine_gets() -> None:
    name = "pingpong_worker.vllm_scheduler."
    for version in ((0, 24, 0), (0, 33, 0)):
        assert scheduler_class(version, asynchronous=False, decode_first=True) == f"{name}DecodeFirstScheduler"
        assert scheduler_class(version, asynchronous=True, decode_first=True) == f"{name}AsyncDecodeFirstScheduler"
    assert scheduler_class((0, 33, 0), asynchronous=True, decode_first=False) is None
    assert scheduler_class((0, 24, 0), asynchronous=True, decode_first=False) == f"{name}AsyncSessionScheduler"
    off = config(["cpu:0"], decode_first=False)
    assert "scheduler_cls" not in engine_arguments(off, "m", (0, 32, 0))
    assert not is_decode_first(off)
    own = config(["cpu:0"], engine_args={"scheduler_cls": "a.Scheduler"})
    assert engine_arguments(own, "m", (0, 32, 0))["scheduler_cls"] == "a.Scheduler"
    assert not is_decode_first(own)
    unplanned = config(["cuda:0"], engine_args={"async_scheduling": False})
    assert engine_arguments(unplanned, "m", (0, 32, 0))["scheduler_cls"] == f"{name}DecodeFirstScheduler"
    assert is_decode_first(unplanned)


def test_batch_invariant_kernels_are_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pingpong_worker.vllm_settings.cuda_uuids", lambda: ["GPU-1"])
    with pytest.raises(ConfigError, match="batch_invariant: vLLM has batch-invariant kernels for GPUs only"):
        engine_environment(config(["cpu:0"], batch_invariant=True), {})
    assert engine_environment(config(["GPU-1"], batch_invariant=True), {})["VLLM_BATCH_INVARIANT"] == "1"
    inherited = engine_environment(config(["GPU-1"]), {"VLLM_BATCH_INVARIANT": "1"})
    assert inherited["VLLM_BATCH_INVARIANT"] == "0", "what limits say of the engine has to be so"
