"""What kind of device a group runs on: engines on different kinds round differently, and take different times."""

from __future__ import annotations

import importlib
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pingpong_worker.pinning import on_cpu, parse_device

_CPU_INFO = Path("/proc/cpuinfo")


def device_kind(devices: Sequence[str]) -> str:
    """The kind in its maker's words, and how many: "2 x NVIDIA H200", "Intel(R) Xeon(R) Platinum 8480+, 4 cores".

    How many matters: an engine that splits its sums among several rounds otherwise than one that does not.

    Args:
        devices: of the group, after `pinning.pin` has shown CUDA only those.
    """
    if not on_cpu(devices):
        return _counted(_gpu_names())
    cores = {core for device in devices for core in _cores(device)}
    return f"{cpu_kind(_CPU_INFO.read_text('utf-8'))}, {len(cores)} core{'s' if len(cores) > 1 else ''}"


def _cores(device: str) -> list[int]:
    cores = parse_device(device)
    return cores if isinstance(cores, list) else []


def cpu_kind(cpu_info: str) -> str:
    """The model's name in what /proc/cpuinfo says; the architecture's where it names none, as on ARM."""
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.machine()


def _gpu_names() -> list[str]:
    """By NVML: asking torch would initialize CUDA in this process."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


def _counted(names: Sequence[str]) -> str:
    """``["A", "B", "A"]`` as "2 x A, B"."""
    counts = sorted(Counter(names).items())
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts)
