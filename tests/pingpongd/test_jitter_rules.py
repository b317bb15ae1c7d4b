"""Each row of the table of causes: what it takes, what it does not take, and that its sentence has the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import pytest

from pingpong_bus.messages import DeviceState, HostState, JitterCause
from pingpongd.jitter_evidence import Device, Evidence, Looks
from pingpongd.jitter_judge import Verdict
from pingpongd.jitter_rules import TABLE, cause_of

SLOW = Verdict(
    troubles=("median",), slowdown=1.8, usual_ms=10.0, p50_ms=18.0, worst_ms=25.0, beyond_ms=15.0, lost_ms=400
)
STALL = Verdict(troubles=("stall",), slowdown=1.2, usual_ms=10.0, worst_ms=312.0, beyond_ms=302.0, lost_ms=310)
APPENDS = Verdict(troubles=("appends",), usual_ms=10.0, worst_ms=60.0, appends_ratio=4.2, allowed=1.5)
SILENT = Verdict(troubles=("silence",), usual_ms=10.0, worst_ms=4000.0, silent_s=4.0, beyond_ms=4000)


def gpu(*throttle: str, usual_mhz: float = 1980, mhz: int | None = 1980, **more: Any) -> Device:
    fields = {name: more.pop(name) for name in list(more) if name in Device.__struct_fields__}
    state = DeviceState(uuid="GPU-12345678-abcd", sm_mhz=mhz, sm_max_mhz=1980, throttle=list(throttle), **more)
    return Device(state=state, reasons=frozenset(throttle), usual_mhz=usual_mhz, **fields)


def row(evidence: Evidence) -> tuple[str, str, str]:
    found = cause_of(evidence)
    return found.cause, found.row, found.why


def of(verdict: Verdict = SLOW, *gpus: Device, **more: Any) -> Evidence:
    return Evidence(verdict=verdict, gpus=gpus, **more)


CASES: list[tuple[str, Evidence, JitterCause, Sequence[str]]] = [
    ("device_fault", of(STALL, gpu(xid=79)), "device_fault", ["GPU-12345678", "XID 79"]),
    ("device_fault", of(SLOW, gpu(ecc_errors=3)), "device_fault", ["3 new uncorrected"]),
    (
        "thermal_clock",
        of(SLOW, gpu("sw_thermal_slowdown", mhz=1095, temperature_c=91)),
        "thermal_throttle",
        ["1,095 of 1,980 MHz", "sw_thermal_slowdown", "91 °C"],
    ),
    (
        "thermal_clock",
        of(SLOW, gpu("hw_slowdown", "hw_thermal_slowdown", "sw_power_cap", mhz=1200)),
        "thermal_throttle",
        ["hw_thermal_slowdown"],
    ),
    ("thermal_clock", of(SLOW, gpu("sw_thermal_slowdown", mhz=None)), "thermal_throttle", ["reduces its clocks"]),
    (
        "power_clock",
        of(SLOW, gpu("sw_power_cap", mhz=1400, power_w=698.0, power_limit_w=700.0)),
        "power_throttle",
        ["1,400 of 1,980 MHz", "sw_power_cap", "698 of 700 W"],
    ),
    ("power_clock", of(SLOW, gpu("hw_power_brake_slowdown", mhz=900)), "power_throttle", ["900"]),
    ("appends_alone", of(APPENDS, host={"runnable_wait": 0.6}), "unknown", []),
    (
        "foreign_process",
        of(SLOW, gpu(foreign=0.41, new_pids=(4711,))),
        "foreign_process",
        ["process 4711", "GPU-12345678", "41 %"],
    ),
    ("foreign_process", of(SLOW, gpu(new_pids=(1, 2))), "foreign_process", ["2 other processes"]),
    (
        "foreign_process",  # it draws the power that the cap takes away
        of(SLOW, gpu("sw_power_cap", mhz=1695, power_w=684.0, foreign=0.4, new_pids=(455,))),
        "foreign_process",
        ["process 455", "40 %"],
    ),
    ("collection", of(STALL, gc_engine_ms=250.0), "garbage_collection", ["250 ms", "engine's"]),
    ("collection", of(STALL, gc_worker_ms=180.0), "garbage_collection", ["180 ms", "worker's"]),
    ("faulting", of(SLOW, host={"major_faults": 300.0}), "memory_pressure", ["300 major faults"]),
    (
        "faulting",
        of(SLOW, host={"major_faults": 1.0}, swapped_bytes=64 << 20),
        "memory_pressure",
        ["64 MiB were swapped out"],
    ),
    ("quota", of(SLOW, host={"throttled": 0.4}), "cpu_starvation", ["quota", "40 %"]),
    ("memory_stalls", of(SLOW, host={"pressure_memory": 0.3}), "memory_pressure", ["memory for 30 %"]),
    (
        "runnable",
        of(SLOW, host={"runnable_wait": 0.55}, usual={"runnable_wait": 0.02}),
        "cpu_starvation",
        ["no core for 55 %", "usually 2 %"],
    ),
    ("steal", of(SLOW, host={"steal": 0.2}), "cpu_starvation", ["hypervisor", "20 %"]),
    ("appends", of(APPENDS), "own_appends", ["4.2 times", "1.5 are allowed"]),
    ("cpu_pressure", of(SLOW, host={"pressure_cpu": 0.8}), "cpu_starvation", ["80 %"]),
    ("stall", of(STALL), "engine_stall", ["312 ms", "10 are usual", "the engine stood still"]),
    ("stall", of(STALL, loop_late_ms=300.0), "engine_stall", ["the worker's process", "300 ms late"]),
    ("stall", of(SILENT), "engine_stall", ["nothing for 4.0 s"]),
    ("unknown", of(SLOW), "unknown", ["1.80 times the usual 10 ms", "nothing that is measured says why"]),
    ("unknown", of(SLOW, gpu(mhz=1200)), "unknown", ["1,200 MHz, and the driver gives no reason"]),
    ("unknown", of(SLOW, peers=2, peers_late=1), "unknown", ["1 of 2 other groups"]),
]


@pytest.mark.parametrize(("name", "evidence", "cause", "words"), CASES)
def test_a_row_takes_its_evidence_and_names_the_numbers(
    name: str, evidence: Evidence, cause: JitterCause, words: Sequence[str]
) -> None:
    if name == "appends_alone":
        spared = Evidence(
            verdict=Verdict(troubles=("appends",), appends_ratio=4.2, allowed=1.5, on_time=True), host=evidence.host
        )
        assert row(spared)[:2] == ("own_appends", "appends_alone")
        assert row(evidence)[0] == "cpu_starvation"  # where nothing was spared, the core that is missing tells more
        return
    found, at, why = row(evidence)
    assert (found, at) == (cause, name)
    for word in words:
        assert word in why


def test_the_table_has_every_cause_and_each_row_a_case() -> None:
    assert {entry.cause for entry in TABLE} == set(get_args(JitterCause))
    assert {entry.name for entry in TABLE} == {name for name, *_ in CASES}
    assert len({entry.name for entry in TABLE}) == len(TABLE)


@pytest.mark.parametrize(
    "evidence",
    [
        of(SLOW, gpu("sw_power_cap")),  # in force, but the clock is where it always is
        of(SLOW, gpu("sw_power_cap", mhz=1500, usual_mhz=1510)),
        of(SLOW, gpu("gpu_idle", mhz=345)),
        of(SLOW, gpu("sw_thermal_slowdown", mhz=None, usual_reasons=frozenset({"sw_thermal_slowdown"}))),
        of(SLOW, gpu(foreign=0.01, new_pids=(7,))),  # it is there, and does nothing
        of(SLOW, gpu(foreign=0.3, usual_foreign=0.28)),
        of(SLOW, gc_worker_ms=15.0),
        of(SLOW, gc_worker_ms=100.0),  # of 400 that were lost
        of(SLOW, host={"runnable_wait": 0.5}, usual={"runnable_wait": 0.45}),
        of(SLOW, host={"major_faults": 10.0}),
        of(SLOW, host={"pressure_cpu": 0.5}, usual={"pressure_cpu": 0.4}),
        of(SLOW, host={"pressure_cpu": 0.8, "runnable_wait": 0.03}),  # others wait for cores, and it does not
    ],
)
def test_what_is_always_so_or_too_little_explains_nothing(evidence: Evidence) -> None:
    assert row(evidence)[0] == "unknown"


def test_numbers_are_all_there_with_units_and_finite() -> None:
    found = cause_of(of(SLOW, gpu("sw_power_cap", mhz=1400, power_w=698.0, temperature_c=70), host={"steal": 0.2}))
    assert found.evidence["gpu0_sm_mhz"] == 1400
    assert found.evidence["gpu0_power_w"] == 698.0
    assert found.evidence["steal"] == 0.2
    assert all(isinstance(value, float | int) for value in found.evidence.values())


# ------------------------------------------------------------------------------------------- evidence from looks

QUIET = HostState(cpu=1.0, runnable_wait=0.02, major_faults=0.0, steal=0.0, swapped_bytes=0)
GPU = DeviceState(uuid="GPU-1", sm_mhz=1980, sm_max_mhz=1980, foreign_pids=[9], ecc_errors=4, xid=13)


def looks(times: int = 50) -> Looks:
    found = Looks()
    for _ in range(times):
        found.look(QUIET, [GPU])
        found.learn(QUIET, [GPU])
    return found


def changed(state: DeviceState = GPU, **fields: Any) -> DeviceState:
    return msgspec.structs.replace(state, **fields)


def test_the_worst_of_the_latest_looks_counts_and_older_ones_do_not() -> None:
    found = looks()
    found.look(HostState(runnable_wait=0.7), [changed(sm_mhz=1100, throttle=["sw_thermal_slowdown"])])
    found.look(QUIET, [GPU])
    evidence = found.evidence(SLOW)
    assert evidence.host["runnable_wait"] == 0.7
    assert evidence.usual["runnable_wait"] == pytest.approx(0.02)
    assert evidence.gpus[0].state.sm_mhz == 1100
    assert cause_of(evidence).cause == "thermal_throttle"
    for _ in range(3):
        found.look(QUIET, [GPU])
    assert cause_of(found.evidence(SLOW)).cause == "unknown"


def test_on_a_busy_machine_what_is_left_of_the_time_counts() -> None:
    usual = {"runnable_wait": 0.6}
    assert row(of(SLOW, host={"runnable_wait": 0.75}, usual=usual))[0] == "cpu_starvation"
    assert row(of(SLOW, host={"runnable_wait": 0.65}, usual=usual))[0] == "unknown"
    assert row(of(SLOW, host={"major_faults": 45.0}, usual={"major_faults": 30.0}))[0] == "unknown"


def test_what_was_there_before_is_no_news() -> None:
    found = looks()
    found.look(QUIET, [GPU])
    (device,) = found.devices()
    assert (device.new_pids, device.ecc_errors, device.xid) == ((), 0, None)
    found.look(QUIET, [changed(foreign_pids=[9, 10], ecc_errors=5, xid=79)])
    (device,) = found.devices()
    assert (device.new_pids, device.ecc_errors, device.xid) == ((10,), 1, 79)


def test_the_same_fault_again_is_news() -> None:
    found = looks()
    found.look(QUIET, [changed(xid=13, xids=1)])
    assert cause_of(found.evidence(STALL)).why == "GPU-1 reports XID 13"


def test_a_fault_from_before_the_first_look_is_no_news() -> None:
    found = Looks()
    found.look(QUIET, [GPU])
    assert cause_of(found.evidence(STALL)).cause == "engine_stall"


def test_a_gpu_that_is_at_its_power_cap_all_the_time_is_not_slow_because_of_that() -> None:
    found, capped = Looks(), changed(sm_mhz=1450, throttle=["sw_power_cap"])
    for _ in range(200):
        found.look(QUIET, [capped])
        found.learn(QUIET, [capped])
    found.look(QUIET, [capped])
    assert cause_of(found.evidence(SLOW)).cause == "unknown"
    found.look(QUIET, [changed(capped, sm_mhz=1200)])
    assert cause_of(found.evidence(SLOW)).cause == "power_throttle"


def test_a_clock_that_prompts_bring_down_again_and_again_is_not_why() -> None:
    found = Looks()
    for number in range(200):
        look = changed(sm_mhz=1620, throttle=["sw_power_cap"]) if number % 4 == 0 else GPU
        found.look(QUIET, [look])
        found.learn(QUIET, [look])
    found.look(HostState(runnable_wait=0.6), [changed(sm_mhz=1620, throttle=["sw_power_cap"])])
    assert cause_of(found.evidence(SLOW)).cause == "cpu_starvation"
    found.look(QUIET, [changed(sm_mhz=1300, throttle=["sw_power_cap"])])
    assert cause_of(found.evidence(SLOW)).cause == "power_throttle"


def test_the_low_clock_of_an_idle_card_is_no_fall() -> None:
    found, idle = looks(), changed(sm_mhz=345, throttle=["gpu_idle"])
    for _ in range(20):  # seconds with a few tokens only, of which the look saw none
        found.learn(QUIET, [idle])
    for state in (changed(sm_mhz=1965, throttle=["sw_power_cap"]), idle, GPU):
        found.look(QUIET, [state])
    (device,) = found.devices()
    assert device.usual_mhz == 1980
    assert device.state.sm_mhz == 1965
    assert cause_of(found.evidence(SLOW)).cause == "unknown"


def test_collections_of_the_latest_two_seconds_count() -> None:
    found = looks()
    found.process(0.0, 220.0, 3.0)
    assert cause_of(found.evidence(STALL)).cause == "garbage_collection"
    found.process(0.0, 0.0, 0.0)
    assert cause_of(found.evidence(STALL)).cause == "garbage_collection"
    found.process(0.0, 0.0, 0.0)
    assert cause_of(found.evidence(STALL)).cause == "engine_stall"
