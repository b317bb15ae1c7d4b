"""From what NVML said on an H200 to a cause in the log: the daemon's own probe and watchdog, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import structlog
from structlog.testing import LogCapture

from jitter_world import LIMITS, Group
from nvml_player import NvmlPlayer, process, sample
from pingpong_bus.messages import Heartbeat, HostState
from pingpongd.config import JitterConfig, parse_config
from pingpongd.gpu_probe import GpuProbe
from pingpongd.jitter_watch import JitterWatch
from pingpongd.probes import ProbeSample
from pingpongd.watchdog import starting
from pingpongd.worker_handle import Worker

RECOGNISED_S, CLEARED_S = 5, 30
FAULT_S = 12


class GpuProbes:
    """The GPU half of `Probes`, looked at when the test's clock says so."""

    def __init__(self, player: NvmlPlayer, own: Sequence[int], *, same_pids: bool) -> None:
        self.now, self.own, self.suspected = 0.0, own, False
        self.probe = GpuProbe(
            player,
            same_pids=same_pids,
            descends=lambda pid, family: False,
            clock=lambda: self.now,
            cpu=lambda: 0.002 * sum("ProcessUtilization" in call for call in player.asked),
        )

    def latest(self, name: str) -> ProbeSample | None:
        self.probe.begin()
        gpus = self.probe.look(name, self.probe.resolve(["cuda:0"]), self.own, suspected=self.suspected)
        return ProbeSample(at_s=self.now, host=HostState(), gpus=gpus)

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def configure(self, config: JitterConfig) -> None:
        pass

    def watch(self, name: str, pids: Sequence[int], devices: Sequence[str]) -> None:
        pass

    def suspect(self, name: str, suspected: bool) -> None:
        self.suspected = suspected

    def forget(self, name: str) -> None:
        pass


class World:
    """One worker on the recorded card, which decodes all the time."""

    def __init__(self, recording: str, *, same_pids: bool = True, seconds: int = 40) -> None:
        self.player = NvmlPlayer(recording)
        self.player.show("one")
        if not same_pids:  # nobody but our own is listed, and the memory of another was there before
            self.player.changes["nvmlDeviceGetComputeRunningProcesses"] = [process(439, used=1 << 30)]
            self.player.changes["nvmlDeviceGetMemoryInfo"] = {"used": 3 << 30, "total": 140 << 30}
            self.player.changes["nvmlDeviceGetProcessUtilization"] = [sample(439, 90, 1)]
        own = self.player.frame.get("own") or [430]
        self.probes = GpuProbes(self.player, own, same_pids=same_pids)
        config = parse_config({"engine": "simulated", "groups": [{"name": "gpu0", "devices": ["cuda:0"]}]})
        self.worker = Worker(config.groups[0], "")
        self.watch = JitterWatch(
            {"gpu0": self.worker}, lambda: config, lambda _: None, self.probes, lambda: self.probes.now
        )
        self.group = Group(0, name="gpu0")
        self.worker.begin(starting(0.0), 1.0)
        self.watch.begins(self.worker)
        self.worker.limits, self.worker.state = LIMITS, "ready"
        self.run(seconds)

    def run(self, seconds: int, slow: float = 1.0) -> list[tuple[str, str | None]]:
        """So many seconds, each with the health that follows."""
        seen: list[tuple[str, str | None]] = []
        for _ in range(seconds):
            self.probes.now += 1.0
            counts = self.group.counts(slow=slow)
            message = Heartbeat(
                at_ns=int(self.probes.now * 1e9),
                open_hops=1,
                output_tokens=0,
                rss_bytes=0,
                steps=self.group.steps,
                waiting=1,
                step_counts=[counts],
                pids=list(self.probes.own),
            )
            self.watch.beat(self.worker, message)
            self.watch.tick()
            seen.append((self.worker.health.state, self.worker.health.cause))
        return seen


@pytest.fixture(autouse=True)
def lines() -> Iterator[LogCapture]:
    capture, before = LogCapture(), structlog.get_config()
    structlog.configure(processors=[capture], cache_logger_on_first_use=False)
    yield capture
    structlog.configure(**before)


def judged(world: World, slow: float, cause: str) -> None:
    """The cause is named in time."""
    seen = world.run(FAULT_S, slow)
    at = [number for number, (state, named) in enumerate(seen, 1) if (state, named) == ("degraded", cause)]
    assert at, seen
    assert at[0] <= RECOGNISED_S
    assert seen[-1] == ("degraded", cause)


def cleared(world: World) -> None:
    """And the group is used again in time."""
    states = [state for state, _ in world.run(CLEARED_S)]
    assert "healthy" in states
    assert states[-1] == "healthy"


def test_a_thermal_throttle_is_known_by_the_clock_and_its_reason(lines: LogCapture) -> None:
    world = World("nvml_h200.json")
    world.player.changes |= {
        "nvmlDeviceGetClockInfo 1": 1095,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x20,
        "nvmlDeviceGetTemperature 0": 88,
    }
    judged(world, 1485 / 1095 * 1.1, "thermal_throttle")
    world.player.changes.clear()
    cleared(world)
    (line,) = [entry for entry in lines.entries if entry["event"] == "decode_jitter"]
    assert "the SM clock fell to 1,095 of 1,980 MHz (sw_thermal_slowdown), at 88 °C" in line["why"]
    assert line["devices"] == [world.player.uuid]


def test_another_process_is_known_by_what_it_computes(lines: LogCapture) -> None:
    world = World("nvml_h200_loaded.json")
    frames = [frame for frame in world.player.frames if frame["label"] == "two"]
    seen = []
    for number in range(FAULT_S):
        world.player.frame = frames[min(number, len(frames) - 1)]
        seen += world.run(1, slow=2.0)
    named = [number for number, (_, cause) in enumerate(seen, 1) if cause == "foreign_process"]
    assert named, seen
    assert named[0] <= RECOGNISED_S
    assert seen[-1] == ("degraded", "foreign_process")
    world.player.show("one again", 3)
    cleared(world)
    whys = [entry["why"] for entry in lines.entries if entry["event"].startswith("decode_jitter") and "why" in entry]
    assert any("computed on GPU-" in why for why in whys)


@pytest.mark.parametrize("seconds", range(40, 46))  # it is asked every five, where nobody is seen
def test_another_process_that_nobody_lists_is_known_when_its_load_begins(seconds: int) -> None:
    world = World("nvml_h200_loaded.json", same_pids=False, seconds=seconds)
    seen = []
    for second in range(1, FAULT_S + 1):
        busy = (0, 2, 31, 50)[min(second, 4) - 1]  # NVML's samples lag by a second or two
        world.player.changes["nvmlDeviceGetProcessUtilization"] = [sample(439, 60, second), sample(465, busy, second)]
        seen += world.run(1, slow=2.0)
    named = [number for number, (_, cause) in enumerate(seen, 1) if cause == "foreign_process"]
    assert named, seen
    assert named[0] <= RECOGNISED_S
    assert seen[-1] == ("degraded", "foreign_process")


def test_a_card_that_is_always_at_its_power_cap_is_not_slow_because_of_that() -> None:
    world = World("nvml_h200.json")  # recorded at 691 of 700 W, with the cap in force
    seen = world.run(FAULT_S, slow=2.0)
    assert seen[-1] == ("degraded", "unknown")
    assert {cause for _, cause in seen} <= {None, "unknown"}


def test_a_quiet_card_raises_no_alarm() -> None:
    world = World("nvml_h200_loaded.json")
    for label in ("one again", "after", "idle"):
        world.player.show(label)
        assert {state for state, _ in world.run(20)} == {"healthy"}
