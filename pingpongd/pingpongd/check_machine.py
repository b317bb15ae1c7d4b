"""Devices, driver, memory, clock."""

from __future__ import annotations

import importlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pingpong_bus.errors import ConfigError
from pingpong_bus.memory_limit import available_memory
from pingpong_bus.slab import MAX_SHARE, slab_bytes
from pingpong_worker.host_cache import LARGEST_SHARE
from pingpong_worker.pinning import parse_device
from pingpongd.check_finding import Finding, doubtful, failed, passed
from pingpongd.config import DaemonConfig
from pingpongd.devices import check_groups

_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written
_SHM_PER_ENGINE = 256 * 2**20
"""What vLLM's message queues and tensor-parallel workers put there, generously."""
_SENSIBLE = 1_735_689_600.0
"""2025-01-01: a clock that shows an earlier time has never been set."""


def machine_findings(config: DaemonConfig) -> Iterator[Finding]:
    """What the machine has, against what the configuration asks of it."""
    yield devices_finding(config)
    if config.engine == "vllm" and _uses_gpus(config):
        yield from _driver_findings()
    slab = slab_bytes(config.slots, config.log_capacity)
    yield judge_slab(slab, int(available_memory() * MAX_SHARE), config.slots, config.log_capacity)
    if config.engine == "vllm":
        stats = os.statvfs(_SHM)
        yield judge_shm(stats.f_bavail * stats.f_frsize, len(config.groups), config.prefixes.host_gib)
        if config.prefixes.host_gib:
            wanted = int(config.prefixes.host_gib * 2**30) * len(config.groups)
            yield judge_host_cache(wanted, available_memory())
        if _uses_gpus(config):
            yield judge_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def clock_finding(newest: float | None) -> Finding:
    """The clock, against the time at which the daemon last wrote."""
    return judge_clock(time.time(), newest)


def devices_finding(config: DaemonConfig) -> Finding:
    """Whether every group's devices and cores are there, and nobody's twice."""
    try:
        check_groups(config)
    except ConfigError as error:
        return failed("devices", error)
    kind = " (simulated)" if config.engine == "simulated" else ""
    return passed("devices", ", ".join(f"{group.name} on {' '.join(group.devices)}" for group in config.groups) + kind)


def judge_driver(driver: str, cuda: int, names: Sequence[str], *, uvm: bool) -> Finding:
    """The NVIDIA driver.

    Args:
        driver: its version.
        cuda: the CUDA version that it supports, as NVML gives it: 12080 is 12.8.
        names: of its GPUs.
        uvm: whether /dev/nvidia-uvm is there.
    """
    text = f"{driver}, CUDA {cuda // 1000}.{cuda % 1000 // 10}, {', '.join(names) or 'no GPU'}"
    if not uvm:
        # Without privileges CUDA cannot make it, and the unit takes the privilege of setuid programs away.
        return doubtful(
            "driver",
            f"{text}; /dev/nvidia-uvm is missing.",
            "Run nvidia-persistenced, or `nvidia-modprobe -u -c0` at boot.",
        )
    return passed("driver", text)


def judge_slab(size: int, most: int, slots: int, capacity: int) -> Finding:
    """The token logs' memory, in bytes, against what a daemon takes at most."""
    text = f"{slots} token logs of {capacity} tokens: {size / 2**20:.0f} MiB"
    if size > most:
        error = ConfigError(
            f"{text}, more than half of the memory that is available.",
            field="slots",
            hint="Lower slots or slot_tokens, or free memory.",
        )
        return failed("memory", error)
    return passed("memory", text)


def judge_host_cache(wanted: int, available: int) -> Finding:
    """What all engines take to keep prefixes in host memory, against what is available; in bytes."""
    text = f"{wanted / 2**30:.1f} GiB for prefixes of all engines"
    if wanted > available * LARGEST_SHARE:
        error = ConfigError(
            f"{text}, and {available / 2**30:.1f} GiB are available.",
            field="prefixes.host_gib",
            hint="Lower it, or free memory.",
        )
        return failed("host memory", error)
    return passed("host memory", text)


def judge_shm(free: int, engines: int, host_gib: float = 0.0) -> Finding:
    """Room in /dev/shm, in bytes; `host_gib` of it for the prefixes of each engine, in GiB."""
    need = engines * (_SHM_PER_ENGINE + int(host_gib * 2**30))
    text = f"{free / 2**20:.0f} MiB free"
    if free < need:
        return doubtful(
            str(_SHM),
            f"{text}; engines may want {need / 2**20:.0f} MiB.",
            "Remove what is left there, or mount it larger (docker run --shm-size).",
        )
    return passed(str(_SHM), text)


def judge_memlock(soft: int) -> Finding:
    """How much memory may be locked, in bytes; engines on GPUs lock what they copy from."""
    if soft == resource.RLIM_INFINITY:
        return passed("memlock", "unlimited")
    return doubtful(
        "memlock",
        f"{soft // 1024} KiB of memory may be locked by this shell.",
        "The service has LimitMEMLOCK=infinity; elsewhere: ulimit -l unlimited.",
    )


def judge_clock(now: float, newest: float | None) -> Finding:
    """The clock; both in seconds since the epoch."""
    if now < _SENSIBLE:
        return doubtful(
            "clock", "it has not been set.", "Set it, or start time synchronization: ages of chains go by it."
        )
    if newest is not None and newest > now + 60:
        return doubtful(
            "clock",
            f"the daemon wrote {(newest - now) / 60:.0f} minutes in the future: the clock was set back.",
            "Nothing is lost by it; ended chains are kept longer, and deadlines come later.",
        )
    return passed("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))


def _uses_gpus(config: DaemonConfig) -> bool:
    try:
        return any(not isinstance(parse_device(device), list) for group in config.groups for device in group.devices)
    except ConfigError:  # a finding of its own
        return False


def _driver_findings() -> Iterator[Finding]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return  # the devices have said so
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion()
        names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
    except nvml.NVMLError as error:
        yield failed("driver", ConfigError(f"NVML: {error}.", hint="Install or load the NVIDIA driver."))
        return
    yield judge_driver(_text(driver), cuda, [_text(name) for name in names], uvm=Path("/dev/nvidia-uvm").exists())


def _text(value: str | bytes) -> str:
    """Older NVML bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
