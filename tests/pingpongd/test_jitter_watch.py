"""The watchdog at its workers: health, summaries and log lines from heartbeats and probes, on a clock of the test's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import structlog
from structlog.testing import LogCapture

from jitter_world import LIMITS, Group
from pingpong_bus.messages import DeviceState, Heartbeat, HostState, StepCounts
from pingpongd.config import DaemonConfig, GroupConfig, JitterConfig, parse_config
from pingpongd.jitter_watch import JitterWatch
from pingpongd.probes import ProbeSample
from pingpongd.watchdog import starting
from pingpongd.worker_handle import Worker


class FakeProbes:
    """Says what a test puts there."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.samples: dict[str, ProbeSample] = {}
        self.suspected: dict[str, bool] = {}

    def start(self) -> None:
        self.calls.append(("start",))

    def stop(self) -> None:
        self.calls.append(("stop",))

    def configure(self, config: JitterConfig) -> None:
        self.calls.append(("configure", config.probe_s))

    def watch(self, name: str, pids: Sequence[int], devices: Sequence[str]) -> None:
        self.calls.append(("watch", name, list(pids), list(devices)))

    def suspect(self, name: str, suspected: bool) -> None:
        self.suspected[name] = suspected

    def forget(self, name: str) -> None:
        self.calls.append(("forget", name))

    def latest(self, name: str) -> ProbeSample | None:
        return self.samples.get(name)


class Desk:
    """Two workers of a kind under a watchdog."""

    def __init__(self, **jitter: Any) -> None:
        self.config = self.configured(**jitter)
        self.now = 100.0
        self.workers = {
            name: Worker(GroupConfig(name=name, devices=[f"cuda:{at}"]), "") for at, name in enumerate("ab")
        }
        self.probes, self.changes = FakeProbes(), list[tuple[str, str]]()
        self.watch = JitterWatch(
            self.workers,
            lambda: self.config,
            lambda worker: self.changes.append((worker.name, worker.health.state)),
            self.probes,
            lambda: self.now,
        )
        self.groups = {name: Group(at, name=name) for at, name in enumerate("ab")}
        for worker in self.workers.values():
            self.begin(worker)

    @staticmethod
    def configured(**jitter: Any) -> DaemonConfig:
        groups = [{"name": name, "devices": ["cpu:0"]} for name in "ab"]
        return parse_config({"engine": "simulated", "groups": groups, "jitter": jitter})

    def begin(self, worker: Worker) -> None:
        worker.begin(starting(self.now), 1.0)
        self.watch.begins(worker)
        worker.limits, worker.state = LIMITS, "ready"
        worker.hops.add("chain7/0/1")

    def second(self, name: str = "a", *counts: StepCounts, waiting: int | None = None, tick: bool = True) -> None:
        self.now += 1.0
        self.beat(name, *counts, waiting=waiting)
        if tick:
            self.watch.tick()

    def beat(self, name: str, *counts: StepCounts, waiting: int | None = None) -> None:
        message = Heartbeat(
            at_ns=int(self.now * 1e9),
            open_hops=1,
            output_tokens=0,
            rss_bytes=0,
            steps=self.groups[name].steps,
            waiting=len(counts) if waiting is None else waiting,
            step_counts=list(counts),
            pids=[10, 11],
        )
        self.watch.beat(self.workers[name], message)

    def run(self, seconds: int, name: str = "a", **how: Any) -> None:
        for _ in range(seconds):
            self.second(name, self.groups[name].counts(**how))

    def sample(self, name: str, *gpus: DeviceState, **host: Any) -> None:
        self.probes.samples[name] = ProbeSample(at_s=self.now, host=HostState(**host), gpus=list(gpus))


@pytest.fixture
def lines() -> Iterator[LogCapture]:
    capture, before = LogCapture(), structlog.get_config()
    structlog.configure(processors=[capture], cache_logger_on_first_use=False)
    yield capture
    structlog.configure(**before)


def named(lines: LogCapture, name: str) -> list[Any]:
    return [entry for entry in lines.entries if entry["event"] == name]


def test_probes_look_closely_at_a_group_until_it_is_well() -> None:
    desk = Desk()
    desk.run(40)
    assert desk.probes.suspected["a"] is False
    desk.run(4, slow=2.0)
    assert desk.probes.suspected["a"] is True
    desk.run(30)
    assert desk.probes.suspected["a"] is False


def test_slow_tokens_make_a_group_degraded_and_others_hear_of_it(lines: LogCapture) -> None:
    desk = Desk()
    desk.run(40)
    desk.run(4, slow=2.0)
    worker = desk.workers["a"]
    assert worker.health.state == "degraded"
    assert worker.health.slowdown == pytest.approx(2.0, rel=0.15)
    assert worker.view(held=False).degraded
    assert desk.changes == [("a", "degraded")]
    (line,) = named(lines, "decode_jitter")
    assert (line["worker"], line["log_level"]) == ("a", "warning")
    desk.run(20)
    assert desk.changes == [("a", "degraded"), ("a", "recovering"), ("a", "healthy")]
    assert worker.health.episodes == 1
    (line,) = named(lines, "decode_jitter_ended")
    assert line["chains"] == ["chain7"]
    assert [entry["state"] for entry in named(lines, "group_health")] == ["degraded", "recovering", "healthy"]


def test_what_probes_say_is_shown_and_names_the_cause(lines: LogCapture) -> None:
    desk, cool = Desk(), DeviceState(uuid="GPU-9", sm_mhz=1980, sm_max_mhz=1980)
    for _ in range(40):
        desk.sample("a", cool, runnable_wait=0.01)
        desk.run(1)
    worker = desk.workers["a"]
    assert worker.gpus == [cool]
    assert worker.host is not None
    for _ in range(4):
        desk.sample("a", msgspec.structs.replace(cool, sm_mhz=1095, throttle=["sw_thermal_slowdown"]))
        desk.run(1, slow=1.8)
    assert worker.health.cause == "thermal_throttle"
    assert worker.health.why == "the SM clock fell to 1,095 of 1,980 MHz (sw_thermal_slowdown)"
    (line,) = named(lines, "decode_jitter")
    assert line["devices"] == ["GPU-9"]
    assert line["evidence"]["gpu0_sm_mhz"] == 1095


def test_what_probes_said_long_ago_is_neither_shown_nor_a_cause() -> None:
    desk, hot = Desk(), DeviceState(uuid="GPU-9", sm_mhz=1095, sm_max_mhz=1980, throttle=["sw_thermal_slowdown"])
    desk.run(40)
    desk.sample("a", hot)
    desk.run(10)
    worker = desk.workers["a"]
    assert worker.gpus == [hot]
    desk.run(10)  # the driver hangs
    assert (worker.host, worker.gpus) == (None, [])
    desk.run(4, slow=2.0)
    assert worker.health.cause == "unknown"


def test_time_between_tokens_is_summed_up_and_logged(lines: LogCapture) -> None:
    desk = Desk(log_s=5)
    desk.run(40)
    itl = desk.workers["a"].itl
    assert itl.p50_ms == pytest.approx(desk.groups["a"].usual_ms(1, 500), rel=0.05)
    assert itl.usual_ms == pytest.approx(itl.p50_ms, rel=0.05)
    assert itl.p50_ms < itl.p99_ms <= itl.worst_ms
    assert len(itl.history_ms) == 40
    steps = named(lines, "decode_steps")
    assert 7 <= len(steps) <= 8
    assert sum(entry["tokens"] for entry in steps) <= desk.groups["a"].steps
    assert all(entry["seconds"] == pytest.approx(5.0, abs=1.0) for entry in steps)
    for _ in range(20):
        desk.second("a")
    assert desk.workers["a"].itl.tokens == 0
    assert len(named(lines, "decode_steps")) <= len(steps) + 1  # nothing is said of a group that does nothing


def test_a_worker_that_falls_silent_is_judged_by_the_clock() -> None:
    desk = Desk()
    desk.run(40)
    desk.second("a", waiting=1)
    for _ in range(4):
        desk.now += 1.0
        desk.watch.tick()
    assert desk.workers["a"].health.cause == "engine_stall"


def test_silence_while_this_process_was_held_up_is_nobodys_fault() -> None:
    desk = Desk()
    desk.run(40)
    desk.second("a", waiting=1)
    desk.now += 30.0
    desk.watch.tick()
    assert desk.workers["a"].health.state == "healthy"


def test_heartbeats_faster_than_a_second_are_judged_together() -> None:
    desk, group = Desk(), Group(0)
    for _ in range(400):
        desk.now += 0.1
        desk.beat("a", group.counts(0.1))
        desk.groups["a"].steps = group.steps
    assert desk.workers["a"].health.state == "healthy"
    for _ in range(40):
        desk.now += 0.1
        desk.beat("a", group.counts(0.1, slow=2.0))
    assert desk.workers["a"].health.state == "degraded"
    assert len(desk.workers["a"].itl.history_ms) < 60


def test_groups_of_a_kind_are_peers_and_others_are_not() -> None:
    desk = Desk()
    for _ in range(40):
        desk.now += 1.0
        desk.beat("a", desk.groups["a"].counts())
        desk.beat("b", desk.groups["b"].counts(slow=2.0))
    assert desk.workers["b"].health.state == "degraded"
    desk = Desk()
    desk.workers["b"].limits = msgspec.structs.replace(LIMITS, device="another device")
    for _ in range(40):
        desk.now += 1.0
        desk.beat("a", desk.groups["a"].counts())
        desk.beat("b", desk.groups["b"].counts(slow=2.0))
    assert desk.workers["b"].health.state == "healthy"


def test_a_new_worker_begins_healthy_and_its_processes_are_watched(lines: LogCapture) -> None:
    desk = Desk()
    assert desk.probes.calls[:2] == [("watch", "a", [], ["cuda:0"]), ("watch", "b", [], ["cuda:1"])]
    desk.run(40)
    assert desk.probes.calls[-1] == ("watch", "a", [10, 11], ["cuda:0"])
    desk.run(4, slow=2.0)
    worker = desk.workers["a"]
    desk.watch.gone(worker)
    assert desk.probes.calls[-1] == ("forget", "a")
    assert worker.health.state == "healthy"
    assert len(named(lines, "decode_jitter_ended")) == 1
    desk.begin(worker)
    assert desk.probes.calls[-1] == ("watch", "a", [], ["cuda:0"])
    desk.run(10)
    assert worker.health.state == "healthy"


def test_the_daemons_end_tells_what_an_episode_has_cost(lines: LogCapture) -> None:
    desk = Desk()
    desk.run(40)
    desk.run(4, slow=2.0)
    desk.watch.close()
    assert [line["lost_ms"] > 0 for line in named(lines, "decode_jitter_ended")] == [True]
    assert [line["state"] for line in named(lines, "group_health")] == ["degraded"]  # it is not well for that
    assert desk.changes == [("a", "degraded")]


def test_nothing_is_judged_or_probed_where_it_is_switched_off(lines: LogCapture) -> None:
    desk = Desk(enabled=False)
    desk.run(40)
    desk.run(10, slow=3.0)
    assert desk.workers["a"].health.state == "healthy"
    assert desk.workers["a"].itl.p50_ms > 40
    assert named(lines, "decode_jitter") == []
    assert desk.probes.calls == []


def test_switching_it_off_ends_what_goes_on(lines: LogCapture) -> None:
    desk = Desk()
    desk.run(40)
    desk.run(4, slow=2.0)
    desk.config = desk.configured(enabled=False, probe_s=2.0)
    desk.watch.apply()
    assert desk.workers["a"].health.state == "healthy"
    assert desk.changes[-1] == ("a", "healthy")
    assert desk.probes.calls[-2:] == [("configure", 2.0), ("stop",)]
    desk.config = desk.configured()
    desk.watch.apply()
    assert desk.probes.calls[-1] == ("start",)
    desk.run(4, slow=2.0)
    assert desk.workers["a"].health.state == "degraded"
