"""Devices by name, on machines that are made up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pingpong_bus.errors import ConfigError
from pingpong_worker.pinning import check_devices, gpu_environment, parse_device, present_cores

UUIDS = ["GPU-aaaa", "GPU-bbbb"]


def environment(*devices: str) -> dict[str, str]:
    check_devices(devices, [0, 1, 2, 5], lambda: UUIDS)
    return gpu_environment(devices, lambda: UUIDS)


@pytest.mark.parametrize(
    ("device", "parsed"),
    [
        ("cpu:3", [3]),
        ("cpu:2-4", [2, 3, 4]),
        ("cuda:1", 1),
        ("GPU-1b2c", "GPU-1b2c"),
        ("MIG-77", "MIG-77"),
    ],
)
def test_parse_device(device: str, parsed: object) -> None:
    assert parse_device(device) == parsed


@pytest.mark.parametrize("device", ["", "cpu", "cpu:", "cpu:x", "cpu:4-2", "cuda:-1", "gpu:0", "tpu:0", "cpu:1,2"])
def test_what_is_no_device_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=f'"{device}" is not a device'):
        parse_device(device)


def test_gpus_are_shown_by_uuid() -> None:
    assert environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}
    assert environment("GPU-aaaa", "cuda:1") == {"CUDA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb"}
    assert environment("MIG-12") == {"CUDA_VISIBLE_DEVICES": "MIG-12"}
    assert environment("cpu:0-2", "cpu:5") == {}


def test_gpus_are_not_looked_up_for_cores() -> None:
    def no_driver() -> list[str]:
        raise AssertionError

    check_devices(["cpu:0"], [0], no_driver)
    assert gpu_environment(["cpu:0"], no_driver) == {}


@pytest.mark.parametrize(
    ("devices", "message", "hint"),
    [
        (["cpu:3"], '"cpu:3" does not exist: there is no core 3', "Cores here: 0-2, 5."),
        (["cpu:0-3"], '"cpu:0-3" does not exist: there is no core 3', "Cores here: 0-2, 5."),
        (["cuda:2"], '"cuda:2" does not exist', "GPUs here: cuda:0 (GPU-aaaa), cuda:1 (GPU-bbbb)."),
        (["GPU-cccc"], '"GPU-cccc" does not exist', "GPUs here: cuda:0 (GPU-aaaa), cuda:1 (GPU-bbbb)."),
        (["cpu:0", "cuda:0"], "devices of one kind", "cores or GPUs"),
        ([], "devices of one kind", "cores or GPUs"),
    ],
)
def test_devices_that_do_not_exist(devices: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment(*devices)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.field == "devices"


def test_every_thread_of_the_process_moves_to_its_cores() -> None:
    core = present_cores()[-1]
    script = f"""
import os, threading
from pathlib import Path
from pingpong_worker.pinning import pin
done = threading.Event()
threading.Thread(target=done.wait).start()
pin(["cpu:{core}"], [{core}])
threads = [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
assert len(threads) == 2
assert all(os.sched_getaffinity(thread) == {{{core}}} for thread in threads)
done.set()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
