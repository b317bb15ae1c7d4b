"""Which devices a worker's engine may use, and which cores its own process runs on."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pingpong_bus.errors import ConfigError

_CPU = re.compile(r"cpu:(\d+)(?:-(\d+))?")
_CUDA = re.compile(r"cuda:(\d+)")
_UUID_PREFIXES = ("GPU-", "MIG-")


def pin(devices: Sequence[str], cores: Sequence[int]) -> None:
    """Check that the devices are there, show CUDA only those, and put this process on its cores.

    Call it before anything initializes CUDA. Every thread of the process moves, and children inherit both.

    Raises:
        ConfigError: naming the device or core that does not exist, and those that do.
    """
    present = present_cores()
    check_devices(devices, present, cuda_uuids)
    os.environ.update(gpu_environment(devices, cuda_uuids))
    if cores:
        check_cores(cores, present, "cores")
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


def check_devices(devices: Sequence[str], present: Sequence[int], uuids: Callable[[], Sequence[str]]) -> None:
    """Check that a group's devices are there.

    Args:
        devices: "cpu:N", "cpu:N-M", "cuda:N", or the UUID of a GPU or of a MIG slice.
        present: the cores that this machine has.
        uuids: lists the UUIDs of this machine's GPUs, in NVML's order; called only where a GPU is named.

    Raises:
        ConfigError: a device that does not exist, a mixture of cores and GPUs, or no device.
    """
    gpu_environment(devices, uuids)
    for device in devices:
        cores = parse_device(device)
        if isinstance(cores, list):
            check_cores(cores, present, "devices", device)


def gpu_environment(devices: Sequence[str], uuids: Callable[[], Sequence[str]]) -> dict[str, str]:
    """What to set in the environment so that CUDA shows exactly the group's GPUs; nothing for cores.

    Args and errors are those of `check_devices`, which also looks at cores.
    """
    if on_cpu(devices):
        return {}
    known = uuids()
    # By UUID: CUDA numbers GPUs by speed and NVML by bus, so that an index means two different ones (HAMi-core#318).
    return {"CUDA_VISIBLE_DEVICES": ",".join(_visible_gpu(device, known) for device in devices)}


def on_cpu(devices: Sequence[str]) -> bool:
    """Whether a group's devices are CPU cores.

    Raises:
        ConfigError: no device, one of an unknown kind, or cores and GPUs mixed.
    """
    kinds = {isinstance(parse_device(device), list) for device in devices}
    if len(kinds) != 1:
        raise ConfigError(
            f"a group needs devices of one kind, and has {', '.join(devices) or 'none'}.",
            field="devices",
            hint="Name either cores or GPUs.",
        )
    return kinds.pop()


def parse_device(device: str) -> list[int] | int | str:
    """A CPU device's cores, a GPU's index, or a GPU's UUID.

    Raises:
        ConfigError: it is none of them.
    """
    if match := _CPU.fullmatch(device):
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last:
            return list(range(first, last + 1))
    if match := _CUDA.fullmatch(device):
        return int(match[1])
    if device.startswith(_UUID_PREFIXES):
        return device
    raise ConfigError(
        f'"{device}" is not a device.',
        field="devices",
        hint='Write "cpu:0", "cpu:0-3", "cuda:0", or the UUID that `nvidia-smi -L` shows.',
    )


def check_cores(cores: Sequence[int], present: Sequence[int], field: str, name: str = "") -> None:
    """Raise ConfigError for the first core that this process may not run on."""
    for core in cores:
        if core not in present:
            raise ConfigError(
                f'the device "{name or f"cpu:{core}"}" does not exist: there is no core {core}.',
                field=field,
                hint=f"Cores here: {_ranges(present)}.",
            )


def present_cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cuda_uuids() -> list[str]:
    """UUIDs of the GPUs that NVML knows, in its order, which is that of `nvidia-smi`.

    Raises:
        ConfigError: no NVML, or no driver.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise ConfigError(
            "GPUs cannot be looked up: nvidia-ml-py is not installed.",
            field="devices",
            hint="Install pingpongd[cuda], or use cpu:N.",
        ) from None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        found = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except nvml.NVMLError as error:
        raise ConfigError(
            f"GPUs cannot be looked up: {error}.", field="devices", hint="Is the NVIDIA driver loaded?"
        ) from None
    return [uuid.decode() if isinstance(uuid, bytes) else str(uuid) for uuid in found]


def _visible_gpu(name: str, uuids: Sequence[str]) -> str:
    device = parse_device(name)
    if isinstance(device, int) and device < len(uuids):
        return uuids[device]
    # NVML lists cards, not their MIG slices: whether a slice exists shows when CUDA starts.
    if isinstance(device, str) and (device in uuids or device.startswith("MIG-")):
        return device
    listing = ", ".join(f"cuda:{index} ({uuid})" for index, uuid in enumerate(uuids)) or "none"
    raise ConfigError(f'the device "{name}" does not exist.', field="devices", hint=f"GPUs here: {listing}.")


def _ranges(cores: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as "0-2, 5"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
