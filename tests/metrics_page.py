"""A page of metrics, and what it is made from, for tests."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pingpong_bus.messages import (
    AgentResult,
    BusState,
    ChainResult,
    DeviceState,
    DraftCounts,
    EngineLimits,
    Heartbeat,
    HopEntry,
    HostState,
    ItlSummary,
    SchedulerState,
    SeamCounts,
    StatusReply,
    StoreStatus,
    WorkerStatus,
)
from pingpongd.metrics import Metrics

LIMITS = EngineLimits(
    engine="vllm 0.32.0",
    model="m",
    max_model_len=4096,
    vocabulary_size=1000,
    block_size=16,
    kv_tokens=65536,
    max_num_seqs=16,
    device="NVIDIA H200",
)


def scheduler(**given: Any) -> SchedulerState:
    fields: dict[str, Any] = {
        "steps": 1,
        "step_ms": 1,
        "decode_ms": 1,
        "target_ms": 1,
        "budget_tokens": 0,
        "reason": "",
    }
    return SchedulerState(**(fields | {"append_tokens": 0, "withheld_steps": 0} | given))


def beat(**given: Any) -> Heartbeat:
    return Heartbeat(**({"at_ns": 1, "open_hops": 0, "output_tokens": 0, "rss_bytes": 1} | given))


def worker(name: str = "a", **given: Any) -> WorkerStatus:
    fields: dict[str, Any] = {"devices": ["cuda:0"], "state": "ready", "stage": "serving", "pid": 1, "hops": 2}
    fields |= {"limits": LIMITS, "rss_bytes": 5, "output_tokens": 0}
    return WorkerStatus(name=name, **(fields | given))


def status(*workers: WorkerStatus, **given: Any) -> StatusReply:
    fields: dict[str, Any] = {"request": 0, "instance": "i", "version": "1", "pid": 1, "uptime_s": 60.0}
    fields |= {"state": "ready", "slots_free": 250, "slots_total": 256, "slot_capacity": 4096}
    fields |= {"chains": {"running": 3, "queued": 1, "finished": 8}}
    return StatusReply(workers=list(workers), **(fields | given))


def agent(**given: Any) -> AgentResult:
    fields: dict[str, Any] = {"name": "one", "state": "finished", "worker": "a", "prompt_tokens": 100}
    fields |= {"cached_tokens": 64, "output_tokens": 10, "first_token_ms": 50.0, "last_token_ms": 150.0}
    return AgentResult(**(fields | {"ttft_ms": 50.0, "finalized_ms": 10.0} | given))


def step(**given: Any) -> AgentResult:
    """A call that took 200 ms after a wait of 30."""
    hop = HopEntry(worker="", started_ms=150.0, opened_ms=180.0, first_token_ms=380.0, ended_ms=380.0, state="finished")
    fields: dict[str, Any] = {"name": "look-up", "kind": "call", "state": "finished", "output_tokens": 40}
    fields |= {"first_token_ms": 380.0, "last_token_ms": 380.0, "ttft_ms": 230.0, "hops": [hop]}
    return AgentResult(**(fields | given))


def result(*agents: AgentResult, **given: Any) -> ChainResult:
    fields: dict[str, Any] = {"id": "c", "name": "n", "state": "finished", "placement": "ping-pong", "e2e_ms": 400.0}
    return ChainResult(agents=list(agents), **(fields | given))


class Page:
    """The samples of a page, by name and labels."""

    def __init__(self, metrics: Metrics) -> None:
        content_type, body = metrics.render("text/plain")
        assert content_type.startswith("text/plain")
        self.families = {family.name: family for family in text_string_to_metric_families(body.decode())}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[f"pingpong_{name}", frozenset(labels.items())]

    def has(self, name: str, **labels: str) -> bool:
        return (f"pingpong_{name}", frozenset(labels.items())) in self.samples


def full_page() -> str:
    """A page on which every metric has a sample, as far as something can be said of it."""
    metrics = Metrics()
    gpu = DeviceState(
        uuid="GPU-1", sm_mhz=1, sm_max_mhz=1, memory_mhz=1, throttle=["sw_power_cap"], power_w=1, power_limit_w=1,
        temperature_c=1, utilization=0.5, memory_used_bytes=1, memory_total_bytes=1, ecc_errors=0, xid=79,
        pcie_rx_mb_s=1, pcie_tx_mb_s=1,
    )  # fmt: skip
    host = HostState(
        cpu=1, runnable_wait=0.1, steal=0.1, major_faults=1, swapped_bytes=1, pressure_memory=0.1, throttled=0.1
    )
    store = StoreStatus(path="p", chains=1, bytes=1, pending=0)
    found = worker(gpus=[gpu], host=host, scheduler=scheduler(), itl=ItlSummary(usual_ms=9.0))
    metrics.tick(status(found, store=store, refused_frames={"control": 1}), 0)
    metrics.beat("a", 1, beat(scheduler=scheduler(), bus=BusState(chunks=1)))
    metrics.chain_accepted()
    counted = agent(drafts=DraftCounts(steps=10, drafted=12, accepted=6), seam=SeamCounts(rollbacks=1, tokens=3))
    metrics.chain_ended(result(counted, step(), started_ms=1.0, predicted_ms=400.0))
    _, body = metrics.render("")
    return body.decode()
