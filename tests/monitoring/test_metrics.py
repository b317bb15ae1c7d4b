"""What is counted, and how it comes out on the page."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from metrics_page import LIMITS, Page, agent, beat, result, scheduler, status, step, worker
from pingpong_bus.messages import (
    AppendEntry,
    BusState,
    DeviceState,
    DraftCounts,
    GroupHealth,
    HopEntry,
    HostState,
    ItlSummary,
    SeamCounts,
    StepCounts,
    StoreStatus,
)
from pingpong_bus.step_times import BUCKETS, StepTimes, bucket_of, upper_ms
from pingpong_client.timeline_account import account
from pingpongd.metrics import Metrics
from pingpongd.prefill_account import prefill_times
from pingpongd.token_times import EDGES, LABELS, TokenTimes
from traced_chain import traced


def test_a_finished_chain_is_counted_with_its_times() -> None:
    metrics = Metrics()
    metrics.chain_accepted()
    appends = [AppendEntry(at_ms=60, tokens=40, sent=40, done_ms=90), AppendEntry(at_ms=100, tokens=30, sent=70)]
    second = agent(
        name="two", worker="b", first_token_ms=170.0, ttft_ms=20.0, finalized_ms=151.0, last_token_ms=400.0,
        appends=appends,
    )  # fmt: skip
    metrics.chain_ended(result(agent(), second, started_ms=100.0, predicted_ms=200.0))
    page = Page(metrics)
    assert page("chains_accepted_total") == 1
    assert page("chains_ended_total", state="finished", placement="ping-pong") == 1
    assert page("chains_ended_total", state="failed", placement="none") == 0
    assert page("e2e_chain_latency_seconds_sum", placement="ping-pong") == pytest.approx(0.4)
    assert page("e2e_chain_latency_seconds_bucket", placement="ping-pong", le="0.3") == 0
    assert page("e2e_chain_latency_seconds_bucket", placement="ping-pong", le="0.5") == 1
    assert page("chain_queue_time_seconds_sum") == pytest.approx(0.1)
    assert page("chain_prediction_ratio_sum", placement="ping-pong") == pytest.approx(1.5)
    assert page("time_to_first_token_seconds_sum", placement="ping-pong", role="first") == pytest.approx(0.05)
    assert page("time_to_first_token_seconds_sum", placement="ping-pong", role="downstream") == pytest.approx(0.02)
    # Appends from 60 to 90 and from 100 to 150, when the upstream ended: the second was overtaken at 151.
    assert page("prefill_hidden_seconds_total", placement="ping-pong") == pytest.approx(0.08)
    assert page("prefill_exposed_seconds_total", placement="ping-pong") == pytest.approx(0.07)
    assert page("prompt_tokens_total", worker="b") == 100
    assert page("prompt_tokens_cached_total", worker="b") == 64
    assert page("prompt_tokens_read_ahead_total", worker="b") == 40
    assert page("prompt_tokens_read_ahead_total", worker="a") == 0


def test_appends_that_overlap_are_hidden_once_and_none_after_the_upstream_has_ended() -> None:
    def append(at_ms: float, done_ms: float, sent: int) -> AppendEntry:
        return AppendEntry(at_ms=at_ms, tokens=10, sent=sent, done_ms=done_ms)

    appends = [append(10, 30, 10), append(20, 40, 20), append(90, 120, 30), append(105, 140, 40)]
    times = prefill_times(agent(first_token_ms=160.0, ttft_ms=60.0, finalized_ms=141.0, appends=appends))
    assert times.reads
    assert times.hidden_ms == pytest.approx(30 + 10)
    assert times.exposed_ms == 60
    assert times.ahead_tokens == 40


def test_a_chain_that_failed_in_the_queue_counts_without_times() -> None:
    metrics = Metrics()
    metrics.chain_ended(result(agent(state="waiting", ttft_ms=None), state="failed", placement=None, e2e_ms=None))
    page = Page(metrics)
    assert page("chains_ended_total", state="failed", placement="none") == 1
    assert not page.has("prompt_tokens_total", worker="a")


def test_lost_and_moved_hops_are_counted_where_they_ran() -> None:
    hops = [HopEntry(worker="a", started_ms=0, state="lost"), HopEntry(worker="b", started_ms=1, state="moved")]
    metrics = Metrics()
    metrics.chain_ended(result(agent(hops=[*hops, HopEntry(worker="c", started_ms=2, state="finished")])))
    page = Page(metrics)
    assert page("hops_lost_total", worker="a") == 1
    assert page("hops_moved_total", worker="b") == 1
    assert not page.has("hops_lost_total", worker="c")


def test_guesses_and_joined_texts_are_counted_where_the_agent_ran() -> None:
    drafts, seam = DraftCounts(steps=10, drafted=12, accepted=6), SeamCounts(rollbacks=2, tokens=9)
    metrics = Metrics()
    metrics.chain_ended(result(agent(drafts=drafts), agent(worker="b", drafts=drafts, seam=seam)))
    metrics.chain_ended(result(agent(state="failed", ttft_ms=None, drafts=drafts), state="failed", e2e_ms=None))
    page = Page(metrics)
    assert page("spec_decode_steps_total", worker="a") == 20
    assert page("spec_decode_draft_tokens_total", worker="a") == 24
    assert page("spec_decode_accepted_tokens_total", worker="b") == 6
    assert page("seam_prompts_total", worker="b") == 1
    assert page("seam_rollbacks_total", worker="b") == 2
    assert page("seam_taken_back_tokens_total", worker="b") == 9
    assert not page.has("seam_prompts_total", worker="a")


def test_steps_between_agents_are_no_agents() -> None:
    metrics = Metrics()
    failed = step(kind="extract", state="failed", ttft_ms=None)
    metrics.chain_ended(result(agent(), step(), failed, step(state="cancelled", hops=[])))
    page = Page(metrics)
    assert page("chain_steps_total", kind="call", state="finished") == 1
    assert page("chain_steps_total", kind="extract", state="failed") == 1
    assert page("chain_steps_total", kind="call", state="cancelled") == 0  # it never began
    assert page("chain_step_time_seconds_sum", kind="call") == pytest.approx(0.2)  # its turn it waited for is not in it
    assert page("time_to_first_token_seconds_count", placement="ping-pong", role="first") == 1
    assert not page.has("prompt_tokens_total", worker="")


def test_what_engines_can_do_is_among_their_facts() -> None:
    limits = msgspec.structs.replace(
        LIMITS, speculation="chain", abilities=("prefill-progress",), keep_tokens=4096, host_cache_bytes=2**30
    )
    metrics = Metrics()
    metrics.tick(status(worker(limits=limits)), None)
    page = Page(metrics)
    (info,) = page.families["pingpong_worker_info"].samples
    assert (info.labels["speculation"], info.labels["patches"]) == ("chain", "prefill-progress")
    assert page("kept_prefix_size_tokens", worker="a") == 4096
    assert page("host_cache_size_bytes", worker="a") == 2**30


def test_counts_of_a_worker_go_on_where_its_successor_begins_anew() -> None:
    metrics = Metrics()
    for number, tokens, gc_ms in [(1, 10, 5.0), (1, 50, 5.0), (2, 7, 1.0), (2, 9, 3.0)]:
        metrics.beat("a", number, beat(output_tokens=tokens, gc_ms=gc_ms, scheduler=scheduler(gc_ms=2 * gc_ms)))
    page = Page(metrics)
    assert page("generation_tokens_total", worker="a") == 59
    assert page("gc_pause_seconds_total", worker="a", process="worker") == pytest.approx(0.008)
    assert page("gc_pause_seconds_total", worker="a", process="engine") == pytest.approx(0.016)


def test_the_bus_of_a_worker() -> None:
    metrics = Metrics()
    metrics.tick(status(worker()), None)
    metrics.beat("a", 1, beat(bus=BusState(chunks=4, repairs=1, lag_ms=2.0), loop_late_ms=30.0))
    page = Page(metrics)
    assert page("bus_lag_seconds_count", worker="a") == 4
    assert page("bus_lag_seconds_sum", worker="a") == pytest.approx(0.002)
    assert page("bus_repairs_total", worker="a") == 1
    assert page("worker_event_loop_late_seconds", worker="a") == pytest.approx(0.03)


def test_times_between_tokens_are_told_exactly_at_every_edge() -> None:
    metrics = Metrics()
    cells = {"decode": [8.6, 8.7, 200.0], "appends": [9.9]}
    for kind, times in cells.items():
        counted = StepTimes()
        for ms in times:
            counted.add(ms)
        counts = StepCounts(
            kind=kind, decodes=1, context=0, buckets=counted.buckets(), worst_ms=200, total_ms=sum(times)
        )  # fmt: skip
        metrics.beat("a", 1, beat(step_counts=[counts]))
    page = Page(metrics)
    for edge, label in zip(EDGES, LABELS, strict=True):
        below = sum(ms <= upper_ms(edge) for ms in cells["decode"])
        assert page("inter_token_latency_seconds_bucket", worker="a", kind="decode", le=label) == below
    assert page("inter_token_latency_seconds_count", worker="a", kind="decode") == 3
    assert page("inter_token_latency_seconds_sum", worker="a", kind="decode") == pytest.approx(0.2173)
    assert page("inter_token_latency_seconds_count", worker="a", kind="appends") == 1
    assert page("inter_token_latency_seconds_count", worker="a", kind="prompts") == 0


def test_counts_beyond_the_table_and_beyond_32_bits_are_kept() -> None:
    times = TokenTimes()
    times.add({BUCKETS + 40: 2**32, bucket_of(5.0): 1}, 10.0)
    times.add({BUCKETS - 1: 2}, 0.0)
    buckets, _ = times.cumulative()
    assert buckets[-1] == ("+Inf", float(2**32 + 3))
    assert buckets[-2][1] == 1


def test_episodes_are_counted_by_their_first_cause_and_seen_to_rise_from_0() -> None:
    metrics = Metrics()
    metrics.tick(status(worker()), None)
    assert Page(metrics)("jitter_episodes_total", worker="a", cause="thermal_throttle") == 0
    degraded = GroupHealth(state="degraded", cause="thermal_throttle", slowdown=2.0, episodes=1)
    for _ in range(3):
        metrics.tick(status(worker(health=degraded)), None)
    page = Page(metrics)
    assert page("jitter_episodes_total", worker="a", cause="thermal_throttle") == 1
    assert page("jitter_state", worker="a", state="degraded") == 1
    assert page("jitter_state", worker="a", state="healthy") == 0
    assert page("jitter_cause", worker="a", cause="thermal_throttle") == 1
    assert page("jitter_cause", worker="a", cause="unknown") == 0
    assert page("jitter_slowdown_ratio", worker="a") == 2
    metrics.tick(status(worker(health=GroupHealth(cause="thermal_throttle", episodes=1))), None)
    assert Page(metrics)("jitter_cause", worker="a", cause="thermal_throttle") == 0


def test_the_state_of_the_daemon_and_its_groups() -> None:
    metrics = Metrics()
    busy = worker(restarts=2, kv_held_tokens=100, scheduler=scheduler(kv_usage=0.25, append_tokens=7))
    store = StoreStatus(path="p", chains=9, bytes=1000, pending=1, error="the disk is full")
    found = status(busy, worker("b", state="dead", limits=None), state="degraded", store=store)
    metrics.tick(found, 4)
    page = Page(metrics)
    assert page("state", state="degraded") == 1
    assert page("state", state="ready") == 0
    assert page("chains", state="running") == 3
    assert page("slots_in_use") == 6
    assert page("worker_up", worker="a") == 1
    assert page("worker_up", worker="b") == 0
    assert page("worker_restarts_total", worker="a") == 2
    assert page("kv_cache_usage_ratio", worker="a") == 0.25
    assert page("kv_cache_held_tokens", worker="a") == 100
    assert page("kv_cache_size_tokens", worker="a") == 65536
    assert page("append_tokens_beside_decodes_total", worker="a") == 7
    assert page("store_failing") == 1
    assert page("traces_dropped_chains_total") == 4
    assert page("build_info", version="1", python="", daemon="i") == 1
    assert 0 <= page("event_loop_tick_age_seconds") < 60


def test_of_a_group_without_a_worker_that_serves_nothing_is_said_that_was() -> None:
    """What its dead process and its devices were at is not the case any more; what was counted stays."""
    was: dict[str, Any] = {
        "gpus": [DeviceState(uuid="GPU-1", temperature_c=88, throttle=["sw_thermal_slowdown"])],
        "host": HostState(cpu=1.5),
        "scheduler": scheduler(kv_usage=0.9, append_tokens=7),
        "itl": ItlSummary(usual_ms=9.0),
        "kv_held_tokens": 100,
    }
    metrics = Metrics()
    metrics.beat("a", 1, beat(bus=BusState(chunks=4, repairs=1), loop_late_ms=30.0))
    now = [
        "gpu_temperature_celsius", "gpu_throttled", "worker_cpu_cores", "kv_cache_usage_ratio",
        "worker_resident_memory_bytes", "worker_event_loop_late_seconds", "inter_token_latency_usual_seconds",
    ]  # fmt: skip
    for state, there in [("ready", True), ("draining", True), ("failed", False), ("loading", False)]:
        metrics.tick(status(worker(state=state, **was)), None)
        page = Page(metrics)
        said = {name for name, _ in page.samples}
        assert [f"pingpong_{name}" in said for name in now] == [there] * len(now)
        assert page("append_tokens_beside_decodes_total", worker="a") == 7
        assert page("bus_repairs_total", worker="a") == 1


def test_what_probes_do_not_say_is_absent_and_units_are_base_units() -> None:
    gpu = DeviceState(uuid="GPU-1", sm_mhz=1095, power_w=650.5, throttle=["sw_thermal_slowdown"], pcie_rx_mb_s=2.0)
    host = HostState(cpu=1.5, runnable_wait=0.25)
    metrics = Metrics()
    metrics.tick(status(worker(gpus=[gpu], host=host)), None)
    page = Page(metrics)
    assert page("gpu_sm_clock_hertz", worker="a", gpu="GPU-1") == 1.095e9
    assert page("gpu_power_watts", worker="a", gpu="GPU-1") == 650.5
    assert page("gpu_pcie_receive_bytes_per_second", worker="a", gpu="GPU-1") == 2e6
    assert page("gpu_throttled", worker="a", gpu="GPU-1", reason="sw_thermal_slowdown") == 1
    assert not page.has("gpu_temperature_celsius", worker="a", gpu="GPU-1")
    assert page("worker_cpu_cores", worker="a") == 1.5
    assert page("worker_runnable_wait_ratio", worker="a") == 0.25
    assert not page.has("worker_cpu_steal_ratio", worker="a")


def test_openmetrics_is_offered_to_those_who_ask() -> None:
    metrics = Metrics()
    metrics.tick(status(worker()), None)
    content_type, body = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_every_metric_has_a_text_and_names_keep_the_conventions() -> None:
    metrics = Metrics()
    metrics.tick(status(worker(gpus=[DeviceState(uuid="g")], host=HostState()), store=None), 0)
    metrics.beat("a", 1, beat())
    for name, family in Page(metrics).families.items():
        if not name.startswith("pingpong_"):
            continue
        assert family.documentation.endswith((".", '").')), name
        assert not any(part in name for part in ("_ms", "_mib", "_percent", "_mhz")), name
        if family.type == "counter":
            assert not name.endswith("_count"), name
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_ratio")), name


def test_what_is_hidden_is_what_the_account_of_a_chain_calls_hidden() -> None:
    chain = traced().result
    told = account(chain)
    found = [prefill_times(it) for it in chain.agents]
    assert [it.hidden_ms for it in found] == pytest.approx([it.hidden_ms for it in told.agents])
    assert sum(it.hidden_ms for it in found) == pytest.approx(told.hidden_ms) != 0
    assert [it.exposed_ms for it in found] == pytest.approx([it.prefill_ms for it in told.agents])
