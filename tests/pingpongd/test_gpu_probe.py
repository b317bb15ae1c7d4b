"""Looks at GPUs, with NVML played from what an H200 answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nvml_player import H200, NvmlPlayer, process, sample
from pingpong_bus.messages import DeviceState
from pingpongd.gpu_probe import GpuProbe
from pingpongd.nvml import NvmlRefused

OURS, THEIRS = 430, 455
"""The two processes of the recording."""
SLICE = "MIG-11111111-2222-3333-4444-555555555555"


class Clock:
    """Moves a second with every look."""

    def __init__(self) -> None:
        self.now = 100.0
        self.used = 0.0

    def cpu(self) -> float:
        return self.used


class Bench:
    """A probe over a player."""

    def __init__(self, *, same_pids: bool = True, children: dict[int, int] | None = None) -> None:
        self.player, self.clock = NvmlPlayer(), Clock()
        parents = children or {}

        def descends(pid: int, family: Sequence[int]) -> bool:
            return parents.get(pid) in family

        self.probe = GpuProbe(
            self.player, same_pids=same_pids, descends=descends, clock=lambda: self.clock.now, cpu=self.clock.cpu
        )

    def look(self, pids: Sequence[int] = (OURS,), uuid: str = H200, *, suspected: bool = False) -> DeviceState:
        self.clock.now += 1.0
        self.probe.begin()
        return self.probe.look("gpu0", [uuid], pids, suspected=suspected)[0]


def test_an_idle_card_is_read_as_it_was_recorded() -> None:
    state = Bench().look()
    assert state == DeviceState(
        uuid=H200,
        name="NVIDIA H200",
        sm_mhz=375,
        sm_max_mhz=1980,
        memory_mhz=3201,
        throttle=["gpu_idle"],
        power_w=106.33,
        power_limit_w=700.0,
        temperature_c=31,
        utilization=0.0,
        memory_used_bytes=644939776,
        memory_total_bytes=150754820096,
        ecc_errors=0,
        foreign_utilization=0.0,
    )


def test_our_own_load_is_not_foreign() -> None:
    bench = Bench()
    bench.player.show("one")
    state = bench.look()
    assert (state.throttle, state.utilization) == (["sw_power_cap"], 1.0)
    assert (state.foreign_pids, state.foreign_utilization) == ([], 0.0)
    assert not any("ProcessUtilization" in key for key in bench.player.asked)  # takes 2 ms: only where there is someone


def test_a_second_process_is_foreign_with_what_it_computes() -> None:
    bench, seen = Bench(), []
    for index in range(5):
        bench.player.show("two", index)
        seen.append(bench.look())
    assert [state.foreign_pids for state in seen] == [[THEIRS]] * 5
    assert [state.foreign_utilization for state in seen] == [0.02, 0.07, 0.13, 0.14, 0.20]
    bench.player.show("after")
    assert bench.look().foreign_utilization == 0.0


def test_a_child_of_the_engine_is_the_groups_own() -> None:
    bench = Bench(children={THEIRS: OURS})
    bench.player.show("two")
    assert bench.look().foreign_pids == []


def test_pids_of_another_namespace_are_told_apart_by_when_they_came() -> None:
    bench = Bench(same_pids=False)
    bench.player.changes["nvmlDeviceGetComputeRunningProcesses"] = [process(90001)]
    bench.probe.begin()
    bench.probe.starting("gpu0", [H200])
    bench.player.changes["nvmlDeviceGetComputeRunningProcesses"] = [process(90001), process(90002)]
    bench.probe.starting("gpu0", [H200])  # the engine loads: its process is on the device by now
    assert bench.look([7, 8]).foreign_pids == [90001]
    bench.player.changes["nvmlDeviceGetComputeRunningProcesses"] = [process(90002), process(90003)]
    assert bench.look([7, 8]).foreign_pids == [90003]


def test_a_new_start_has_processes_of_its_own() -> None:
    bench = Bench(same_pids=False)
    bench.player.changes["nvmlDeviceGetComputeRunningProcesses"] = [process(90002)]
    assert bench.look([7, 8]).foreign_pids == []
    bench.probe.forget("gpu0")
    bench.player.changes["nvmlDeviceGetComputeRunningProcesses"] = []
    bench.probe.starting("gpu0", [H200])
    bench.player.changes["nvmlDeviceGetComputeRunningProcesses"] = [process(90005)]
    assert bench.look([9, 10]).foreign_pids == []


def test_on_the_machines_own_numbers_nothing_is_guessed() -> None:
    bench = Bench(same_pids=True)
    bench.player.show("one")
    assert bench.look([7, 8]).foreign_pids == [OURS]


@pytest.mark.parametrize("code", [1, 3, 4, 13, 15, 999])
def test_whatever_is_refused_is_none_and_no_error(code: int) -> None:
    bench = Bench()
    for frame in bench.player.frames:
        frame["devices"] = [{key: {"error": code} for key in frame["devices"][0]}]
    assert bench.look() == DeviceState(uuid=H200)


def test_what_is_not_supported_is_asked_once() -> None:
    bench = Bench()
    bench.player.changes["nvmlDeviceGetPowerUsage"] = NvmlRefused(3)
    bench.player.changes["nvmlDeviceGetTemperature 0"] = NvmlRefused(999)
    for _ in range(3):
        assert bench.look().power_w is None
    assert bench.player.asked.count("nvmlDeviceGetPowerUsage") == 1
    assert bench.player.asked.count("nvmlDeviceGetTemperature 0") == 3


def test_an_older_driver_calls_reasons_by_their_old_name() -> None:
    bench = Bench()
    bench.player.changes["nvmlDeviceGetCurrentClocksEventReasons"] = NvmlRefused(13)
    bench.player.changes["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x20 | 0x4
    assert bench.look().throttle == ["sw_power_cap", "sw_thermal_slowdown"]


def test_a_card_that_is_not_there_has_only_its_name() -> None:
    assert Bench().look(uuid="GPU-gone") == DeviceState(uuid="GPU-gone")


def test_devices_are_resolved_as_they_are_claimed() -> None:
    probe = Bench().probe
    assert probe.resolve(["cuda:0", "cpu:0-3", "GPU-x", "MIG-y", "cuda:9"]) == [H200, "GPU-x", "MIG-y"]


def test_throttles_between_two_looks_and_pcie_come_from_counters() -> None:
    bench = Bench()
    bench.player.counters = {74: 0, 269: 5_000_000, 197: 0, 198: 2**32 - 1_000_000}
    assert bench.look().pcie_rx_mb_s is None
    bench.player.counters = {74: 9_000_000, 269: 305_000_000, 197: 3_000_000, 198: 6_000_000}
    state = bench.look()
    assert state.throttle == ["gpu_idle", "sw_thermal_slowdown"]  # 9 ms of the power cap are less than a hundredth
    assert state.pcie_tx_mb_s == pytest.approx(3.0)
    assert state.pcie_rx_mb_s == pytest.approx(7.0)  # they count in 32 bits
    assert bench.look().throttle == ["gpu_idle"]  # as it is now, not as it was once


def test_dear_counters_are_read_the_less_often() -> None:
    bench = Bench()
    reads: list[tuple[int, ...]] = []
    counted = bench.player.fields

    def dear(handle: Any, ids: Sequence[int]) -> dict[int, int]:
        reads.append(tuple(ids))
        bench.clock.used += 0.008 if 197 in ids else 0.00003
        return counted(handle, ids)

    bench.player.fields = dear  # type: ignore[method-assign]
    bench.player.counters = {74: 0, 197: 0}
    for _ in range(80):
        bench.look()
    assert reads.count((74, 269)) == 80
    assert reads.count((197, 198)) == 2  # 8 ms at 0.02 % of a core: every 40 s


def test_xids_are_kept_by_card() -> None:
    bench = Bench()
    bench.look()
    assert bench.player.listening == [H200]
    bench.player.xids = [("GPU-other", 13), (H200, 31), (H200, 79)]
    assert [(state.xid, state.xids) for state in (bench.look(), bench.look())] == [(79, 2), (79, 2)]
    bench.player.xids = [(H200, 79)]
    assert (bench.look().xid, bench.look().xids) == (79, 3)


class TestSlices:
    """MIG: NVML answers some questions about the slice, some about its card."""

    @staticmethod
    def bench() -> Bench:
        bench = Bench()
        bench.player.show("one")
        bench.player.slices = {SLICE: H200}
        bench.player.changes |= {
            f"{SLICE} nvmlDeviceGetName": "NVIDIA H200 MIG 1g.18gb",
            f"{SLICE} nvmlDeviceGetGpuInstanceId": 7,
            f"{SLICE} nvmlDeviceGetMemoryInfo": {"used": 5, "free": 13, "total": 18},
            f"{SLICE} nvmlDeviceGetUtilizationRates": NvmlRefused(3),
            f"{SLICE} nvmlDeviceGetProcessUtilization": NvmlRefused(3),
            f"{SLICE} nvmlDeviceGetComputeRunningProcesses": [process(OURS, 7), process(THEIRS, 9)],
        }
        return bench

    def test_clocks_are_the_cards_and_memory_the_slices(self) -> None:
        state = self.bench().look(uuid=SLICE)
        assert (state.uuid, state.parent_uuid, state.name) == (SLICE, H200, "NVIDIA H200 MIG 1g.18gb")
        assert (state.memory_used_bytes, state.memory_total_bytes) == (5, 18)
        assert (state.sm_mhz, state.power_w, state.throttle) == (1485, 691.004, ["sw_power_cap"])
        assert state.utilization is None  # never the whole card's

    def test_processes_in_other_slices_are_not_on_this_one(self) -> None:
        bench = self.bench()
        assert bench.look(uuid=SLICE).foreign_pids == []
        bench.player.changes[f"{SLICE} nvmlDeviceGetComputeRunningProcesses"] += [process(777, 7)]
        state = bench.look(uuid=SLICE)
        assert (state.foreign_pids, state.foreign_utilization) == ([777], None)

    def test_xids_are_the_cards(self) -> None:
        bench = self.bench()
        bench.look(uuid=SLICE)
        assert bench.player.listening == [H200]
        bench.player.xids = [(H200, 63)]
        assert bench.look(uuid=SLICE).xid == 63

    def test_the_card_is_asked_once_for_all_its_slices(self) -> None:
        bench = self.bench()
        other = SLICE.replace("1", "2")
        bench.player.slices[other] = H200
        bench.clock.now += 1.0
        bench.probe.begin()
        bench.probe.look("a", [SLICE], [OURS])
        bench.probe.look("b", [other], [OURS])
        assert bench.player.asked.count("nvmlDeviceGetPowerUsage") == 1


def test_samples_of_processes_need_not_be_of_the_same_second() -> None:
    bench = Bench()
    bench.player.changes["nvmlDeviceGetComputeRunningProcesses"] = [process(OURS), process(8), process(9)]
    bench.player.changes["nvmlDeviceGetProcessUtilization"] = [sample(OURS, 50, 5_000_000), sample(8, 30, 4_100_000)]
    assert bench.look().foreign_utilization == 0.3
    bench.player.changes["nvmlDeviceGetProcessUtilization"] = [sample(9, 90, 5_500_000), sample(8, 30, 5_400_000)]
    assert bench.look().foreign_utilization == 1.0
    assert [key for key in bench.player.asked if "ProcessUtil" in key][-1].endswith(" 4000000")


class TestUnlisted:
    """Newer drivers list a container's own processes alone, and still say what others compute."""

    @staticmethod
    def bench() -> Bench:
        bench = Bench(same_pids=False)
        bench.player.changes |= {
            "nvmlDeviceGetComputeRunningProcesses": [process(2, used=1_000 << 20)],
            "nvmlDeviceGetMemoryInfo": {"used": 1_600 << 20, "free": 0, "total": 9_000 << 20},
            "nvmlDeviceGetProcessUtilization": [sample(2, 90, 5_000_000)],
        }
        used = bench.player.ask

        def dear(call: str, handle: str, *args: int) -> Any:
            if call == "nvmlDeviceGetProcessUtilization":
                bench.clock.used += 0.002
            return used(call, handle, *args)

        bench.player.ask = dear  # type: ignore[method-assign]
        return bench

    @staticmethod
    def asked(bench: Bench) -> int:
        return sum("ProcessUtilization" in key for key in bench.player.asked)

    def test_alone_it_is_asked_every_five_seconds(self) -> None:
        bench = self.bench()
        states = [bench.look([1, 2]) for _ in range(20)]
        assert {(tuple(state.foreign_pids), state.foreign_utilization) for state in states} == {((), 0.0)}
        assert self.asked(bench) == 4

    def test_where_tokens_come_late_it_is_asked_at_every_look(self) -> None:
        bench = self.bench()
        bench.look([1, 2])
        for _ in range(4):
            bench.look([1, 2], suspected=True)
        assert self.asked(bench) == 5

    def test_memory_that_nobody_listed_holds_shows_that_someone_came(self) -> None:
        bench = self.bench()
        for _ in range(2):
            bench.look([1, 2])
        bench.player.changes["nvmlDeviceGetMemoryInfo"] = {"used": 2_300 << 20, "free": 0, "total": 9_000 << 20}
        bench.player.changes["nvmlDeviceGetProcessUtilization"] = [sample(2, 11, 9_000_000), sample(489, 86, 9_100_000)]
        state = bench.look([1, 2])
        assert (state.foreign_pids, state.foreign_utilization) == ([489], 0.86)
        before = self.asked(bench)
        for _ in range(5):
            assert bench.look([1, 2]).foreign_pids == [489]
        assert self.asked(bench) == before + 5
        bench.player.changes["nvmlDeviceGetMemoryInfo"] = {"used": 1_600 << 20, "free": 0, "total": 9_000 << 20}
        bench.player.changes["nvmlDeviceGetProcessUtilization"] = [sample(2, 99, 19_000_000)]
        assert [bench.look([1, 2]).foreign_pids for _ in range(6)][-1] == []

    def test_our_own_growth_is_not_taken_for_someone_else(self) -> None:
        bench = self.bench()
        bench.look([1, 2])
        bench.player.changes["nvmlDeviceGetComputeRunningProcesses"] = [process(2, used=3_000 << 20)]
        bench.player.changes["nvmlDeviceGetMemoryInfo"] = {"used": 3_600 << 20, "free": 0, "total": 9_000 << 20}
        for _ in range(4):
            bench.look([1, 2])
        assert self.asked(bench) == 1

    def test_where_not_even_our_own_is_listed_nothing_is_guessed(self) -> None:
        bench = self.bench()
        bench.player.changes["nvmlDeviceGetComputeRunningProcesses"] = []
        bench.player.changes["nvmlDeviceGetProcessUtilization"] = [sample(7001, 90, 5_000_000)]
        assert bench.look([1, 2]).foreign_pids == []
        assert self.asked(bench) == 0


class TestLoaded:
    """An H200 beside a second process that multiplies large matrices, with counters: `benchmarks/nvml_record.py`."""

    @staticmethod
    def looks() -> list[tuple[str, DeviceState]]:
        bench = Bench()
        bench.player = NvmlPlayer("nvml_h200_loaded.json")
        bench.probe = GpuProbe(
            bench.player, same_pids=True, descends=lambda pid, family: False, clock=lambda: bench.clock.now, cpu=float
        )
        found = []
        for frame in bench.player.frames:
            bench.player.frame = frame
            found.append((frame["label"], bench.look(frame["own"])))
        return found

    def test_the_other_process_and_what_it_does_to_the_clock_are_seen(self) -> None:
        alone = [state for label, state in self.looks() if label == "one"]
        beside = [state for label, state in self.looks() if label == "two"]
        assert {(state.sm_mhz, tuple(state.throttle), state.foreign_utilization) for state in alone} == {
            (1980, (), 0.0)
        }
        assert {tuple(state.throttle) for state in beside} == {("sw_power_cap",)}
        assert max(state.sm_mhz or 0 for state in beside) <= 1830
        assert max(state.foreign_utilization or 0.0 for state in beside) >= 0.5
        assert len({tuple(state.foreign_pids) for state in beside}) == 1
        assert len(beside[0].foreign_pids) == 1

    def test_it_is_gone_with_the_process(self) -> None:
        after = [state for label, state in self.looks() if label == "one again"]
        assert {(tuple(state.foreign_pids), state.foreign_utilization, state.sm_mhz) for state in after} == {
            ((), 0.0, 1980)
        }
        assert after[-1].throttle == []
