"""What is the case now, for `/metrics`: made from the daemon's status of the latest tick, never from what is live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from pingpong_bus.messages import (
    BusState,
    ChainState,
    DeviceState,
    HealthState,
    Heartbeat,
    HostState,
    JitterCause,
    StatusReply,
    WorkerStatus,
)

_CHAIN_STATES: Final[tuple[ChainState, ...]] = ("queued", "running")
_DAEMON_STATES: Final = ("starting", "ready", "degraded", "draining")
_HEALTH_STATES: Final[tuple[HealthState, ...]] = get_args(HealthState)
_CAUSES: Final[tuple[JitterCause, ...]] = get_args(JitterCause)
_MB = 1e6


class StateCollector(Collector):
    """Gauges, and counters that are kept elsewhere."""

    def __init__(self) -> None:
        self._seen: tuple[StatusReply, float, int | None] | None = None
        """What `tick` was given last; replaced whole, so that no lock is needed."""
        self._bus: dict[str, BusState] = {}
        self._late_s: dict[str, float] = {}

    def beat(self, worker: str, message: Heartbeat) -> None:
        """Take a heartbeat."""
        self._bus = self._bus | {worker: message.bus}
        self._late_s = self._late_s | {worker: message.loop_late_ms / 1000}

    def tick(self, status: StatusReply, now: float, untraced: int | None) -> None:
        """Take the daemon's status.

        Args:
            status: all of it.
            now: seconds of CLOCK_MONOTONIC.
            untraced: chains whose spans were dropped; None where none are sent.
        """
        self._seen = status, now, untraced

    def collect(self) -> Iterator[Metric]:
        """Called in a thread."""
        seen = self._seen
        if seen is None:
            return
        status, ticked_at, untraced = seen
        yield from _of_daemon(status, time.monotonic() - ticked_at)
        yield from _of_store(status)
        yield from _of_workers(status.workers)
        yield from _of_jitter(status.workers)
        serving = [it for it in status.workers if it.serves]
        yield from _of_serving(serving)
        yield from _of_hosts([(it.name, it.host) for it in serving if it.host is not None])
        yield from _of_gpus([(it.name, gpu) for it in serving for gpu in it.gpus])
        yield _by_worker(
            "worker_event_loop_late_seconds",
            "The latest that a worker's event loop was in the latest second.",
            [(it.name, self._late_s[it.name]) for it in serving if it.name in self._late_s],
        )
        yield from self._of_bus()
        if untraced is not None:
            yield CounterMetricFamily("pingpong_traces_dropped_chains", "Chains whose spans nobody has.", untraced)

    def _of_bus(self) -> Iterator[Metric]:
        lag = SummaryMetricFamily(
            "pingpong_bus_lag_seconds", "From a token's commit to its doorbell at a reader.", labels=["worker"]
        )
        repairs = CounterMetricFamily(
            "pingpong_bus_repairs",
            "Times that tokens were found by looking, for their doorbell was lost or late.",
            labels=["worker"],
        )
        for worker, bus in self._bus.items():
            lag.add_metric([worker], count_value=bus.chunks, sum_value=bus.lag_ms / 1000)
            repairs.add_metric([worker], bus.repairs)
        yield lag
        yield repairs


def _of_daemon(status: StatusReply, tick_age_s: float) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "pingpong_build",
        "Version of the daemon.",
        value={"version": status.version, "python": status.python, "daemon": status.instance},
    )
    yield GaugeMetricFamily("pingpong_uptime_seconds", "Since the daemon's start.", status.uptime_s)
    yield GaugeMetricFamily(
        "pingpong_event_loop_tick_age_seconds", "Since the event loop's latest tick, one a second.", tick_age_s
    )
    state = GaugeMetricFamily("pingpong_state", "1 for the state that the daemon is in.", labels=["state"])
    for name in _DAEMON_STATES:
        state.add_metric([name], status.state == name)
    yield state
    chains = GaugeMetricFamily("pingpong_chains", "Chains that wait or run.", labels=["state"])
    for chain_state in _CHAIN_STATES:
        chains.add_metric([chain_state], status.chains.get(chain_state, 0))
    yield chains
    yield GaugeMetricFamily("pingpong_slots", "Token logs in the slab.", status.slots_total)
    yield GaugeMetricFamily(
        "pingpong_slots_in_use", "Token logs that agents hold.", status.slots_total - status.slots_free
    )
    refused = CounterMetricFamily(
        "pingpong_refused_frames", "Frames that made no sense or came from strangers.", labels=["socket"]
    )
    for socket, count in status.refused_frames.items():
        refused.add_metric([socket], count)
    yield refused


def _of_store(status: StatusReply) -> Iterator[Metric]:
    if (store := status.store) is None:
        return
    yield GaugeMetricFamily("pingpong_store_chains", "Chains in the store, live and ended.", store.chains)
    yield GaugeMetricFamily("pingpong_store_bytes", "Size of the store.", store.bytes)
    yield GaugeMetricFamily("pingpong_store_pending_writes", "Changes that are not on disk yet.", store.pending)
    yield GaugeMetricFamily("pingpong_store_failing", "1 while the store cannot be written.", bool(store.error))


def _of_workers(workers: list[WorkerStatus]) -> Iterator[Metric]:
    info = InfoMetricFamily("pingpong_worker", "What a group is.", labels=["worker"])
    for it in workers:
        limits = it.limits
        info.add_metric(
            [it.name],
            {
                "devices": ",".join(it.devices),
                "engine": limits.engine if limits else "",
                "model": limits.model if limits else "",
                "device": limits.device if limits else "",
                "speculation": limits.speculation if limits else "",
                "patches": ",".join(limits.abilities) if limits else "",
            },
        )
    yield info
    yield _by_worker("worker_up", "1 while the group takes hops.", [(it.name, it.state == "ready") for it in workers])
    restarts = CounterMetricFamily("pingpong_worker_restarts", "Times that it was replaced.", labels=["worker"])
    appended = CounterMetricFamily(
        "pingpong_append_tokens_beside_decodes", "Prompt tokens that rode in steps with decodes.", labels=["worker"]
    )
    withheld = CounterMetricFamily(
        "pingpong_append_withheld_steps", "Steps in which appends waited and were granted nothing.", labels=["worker"]
    )
    for it in workers:
        restarts.add_metric([it.name], it.restarts)
        if it.scheduler is not None:
            appended.add_metric([it.name], it.scheduler.append_tokens)
            withheld.add_metric([it.name], it.scheduler.withheld_steps)
    yield restarts
    yield appended
    yield withheld
    yield _by_worker("hops_running", "Hops that it runs.", [(it.name, it.hops) for it in workers])
    yield _by_worker(
        "kv_cache_held_tokens",
        "Tokens of the KV cache that are set aside for the full lengths of open hops.",
        [(it.name, it.kv_held_tokens) for it in workers],
    )
    yield _by_worker(
        "kv_cache_size_tokens",
        "Tokens that the KV cache holds.",
        [(it.name, it.limits.kv_tokens) for it in workers if it.limits is not None],
    )
    yield _by_worker(
        "kept_prefix_size_tokens",
        "Tokens of static beginnings of prompts that are kept from eviction at most.",
        [(it.name, it.limits.keep_tokens) for it in workers if it.limits is not None],
    )
    yield _by_worker(
        "host_cache_size_bytes",
        "Host memory for blocks that the KV cache has no room for.",
        [(it.name, it.limits.host_cache_bytes) for it in workers if it.limits is not None],
    )


def _of_serving(workers: list[WorkerStatus]) -> Iterator[Metric]:
    """What heartbeats say: of a worker that is gone the last one is not the case any more."""
    yield _by_worker("worker_resident_memory_bytes", "Of its own process.", [(it.name, it.rss_bytes) for it in workers])
    yield _by_worker(
        "kv_cache_usage_ratio",
        "Part of the KV cache that requests hold, 0 to 1.",
        [(it.name, it.scheduler.kv_usage) for it in workers if it.scheduler is not None],
    )
    yield _by_worker(
        "kv_cache_kept_ratio",
        "Part of the KV cache that is kept for beginnings of prompts which are expected to come again, 0 to 1.",
        [(it.name, it.scheduler.kv_kept) for it in workers if it.scheduler is not None],
    )
    yield _by_worker(
        "inter_token_latency_usual_seconds",
        "A group's own median for such steps.",
        [(it.name, it.itl.usual_ms / 1000) for it in workers if it.itl.usual_ms],
    )


def _of_jitter(workers: list[WorkerStatus]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "pingpong_jitter_state", "1 for the state that a group's decoding is in.", labels=["worker", "state"]
    )
    cause = GaugeMetricFamily(
        "pingpong_jitter_cause", "1 for what makes a group's tokens late, now.", labels=["worker", "cause"]
    )
    for it in workers:
        for name in _HEALTH_STATES:
            state.add_metric([it.name, name], it.health.state == name)
        for why in _CAUSES:
            cause.add_metric([it.name, why], it.health.state != "healthy" and it.health.cause == why)
    yield state
    yield cause
    yield _by_worker(
        "jitter_slowdown_ratio",
        "What a token takes, over what it should; 1 where the group is healthy.",
        [(it.name, it.health.slowdown) for it in workers],
    )


def _of_hosts(hosts: list[tuple[str, HostState]]) -> Iterator[Metric]:
    said: dict[str, tuple[str, list[float | None]]] = {
        "worker_cpu_cores": ("CPU time of its processes, in cores.", [it.cpu for _, it in hosts]),
        "worker_runnable_wait_ratio": (
            "Part of the time in which its busiest thread was ready to run and had no core.",
            [it.runnable_wait for _, it in hosts],
        ),
        "worker_cpu_throttled_ratio": (
            "Part of the time in which a CPU quota held it up.",
            [it.throttled for _, it in hosts],
        ),
        "worker_cpu_steal_ratio": (
            "Part of the time that the hypervisor took from the machine.",
            [it.steal for _, it in hosts],
        ),
        "worker_memory_pressure_ratio": (
            "Part of the time in which tasks waited for memory.",
            [it.pressure_memory for _, it in hosts],
        ),
        "worker_major_faults_per_second": (
            "Pages of its processes that were read from a disk.",
            [it.major_faults for _, it in hosts],
        ),
        "worker_swapped_bytes": ("Memory of its processes that is swapped out.", [it.swapped_bytes for _, it in hosts]),
    }
    for name, (text, values) in said.items():
        yield _by_worker(
            name,
            text,
            [(worker, value) for (worker, _), value in zip(hosts, values, strict=True) if value is not None],
        )


def _of_gpus(gpus: list[tuple[str, DeviceState]]) -> Iterator[Metric]:
    said: dict[str, tuple[str, list[float | None]]] = {
        "gpu_sm_clock_hertz": ("Of the multiprocessors.", [_scaled(it.sm_mhz, 1e6) for _, it in gpus]),
        "gpu_sm_clock_max_hertz": ("The same, at most.", [_scaled(it.sm_max_mhz, 1e6) for _, it in gpus]),
        "gpu_memory_clock_hertz": ("Of the memory.", [_scaled(it.memory_mhz, 1e6) for _, it in gpus]),
        "gpu_power_watts": ("What it draws.", [it.power_w for _, it in gpus]),
        "gpu_power_limit_watts": ("What it may draw.", [it.power_limit_w for _, it in gpus]),
        "gpu_temperature_celsius": ("Of the chip.", [it.temperature_c for _, it in gpus]),
        "gpu_utilization_ratio": ("Part of the time in which a kernel ran.", [it.utilization for _, it in gpus]),
        "gpu_memory_used_bytes": ("By all processes.", [it.memory_used_bytes for _, it in gpus]),
        "gpu_memory_size_bytes": ("In all.", [it.memory_total_bytes for _, it in gpus]),
        "gpu_uncorrected_ecc_errors": ("Since the driver was loaded.", [it.ecc_errors for _, it in gpus]),
        "gpu_last_xid": ("The latest XID since the daemon's start.", [it.xid for _, it in gpus]),
        "gpu_pcie_receive_bytes_per_second": ("Over PCIe.", [_scaled(it.pcie_rx_mb_s, _MB) for _, it in gpus]),
        "gpu_pcie_transmit_bytes_per_second": ("Over PCIe.", [_scaled(it.pcie_tx_mb_s, _MB) for _, it in gpus]),
        "gpu_foreign_processes": (
            "Processes on the device that are not the group's.",
            [len(it.foreign_pids) for _, it in gpus],
        ),
    }
    for name, (text, values) in said.items():
        family = GaugeMetricFamily(f"pingpong_{name}", text, labels=["worker", "gpu"])
        for (worker, gpu), value in zip(gpus, values, strict=True):
            if value is not None:
                family.add_metric([worker, gpu.uuid], value)
        yield family
    throttle = GaugeMetricFamily(
        "pingpong_gpu_throttled", "1 for each reason for reduced clocks in force.", labels=["worker", "gpu", "reason"]
    )
    for worker, gpu in gpus:
        for reason in gpu.throttle:
            throttle.add_metric([worker, gpu.uuid, reason], 1)
    yield throttle


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _by_worker(name: str, text: str, values: list[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"pingpong_{name}", text, labels=["worker"])
    for worker, value in values:
        family.add_metric([worker], value)
    return family
