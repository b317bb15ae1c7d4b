"""Devices and the machine on `top`'s screen: what NVML and the kernel say. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from pingpong_bus.messages import DeviceState, HostState, WorkerStatus
from pingpong_client.top_table import WIDE, Block, Column, heading, row, wrapped

GPU_COLUMNS = (
    Column("group", 8, wide=14),
    Column("GPU", 13, stretch=True),
    Column("SM MHz", 11, right=True),
    Column("mem MHz", 7, right=True, from_width=WIDE),
    Column("power W", 9, right=True, from_width=72),
    Column("temp", 5, right=True),
    Column("busy", 5, right=True),
    Column("memory GB", 13, right=True),
    Column("PCIe in MB/s", 12, right=True, from_width=150),
    Column("out", 6, right=True, from_width=150),
)
HOST_COLUMNS = (
    Column("group", 8, wide=14),
    Column("devices", 8, stretch=True),
    Column("CPU", 5, right=True),
    Column("waits", 6, right=True),
    Column("steal", 6, right=True, from_width=72),
    Column("quota", 6, right=True, from_width=WIDE),
    Column("faults/s", 8, right=True, from_width=WIDE),
    Column("swap MB", 8, right=True, from_width=WIDE),
    Column("PSI cpu", 8, right=True),
    Column("mem", 5, right=True),
    Column("io", 5, right=True),
    Column("RSS GB", 7, right=True),
)
_GB = 1e9
_SHORT_UUID = 13
"""Cells of "GPU-" and the first eight digits, and one more for what was cut."""


def gpu_blocks(workers: Sequence[WorkerStatus], width: int) -> tuple[Text, list[Block]]:
    """The heading, and a block for each GPU; none where there are none, or NVML is not there."""
    blocks = [_gpu(worker.name, device, width) for worker in workers if worker.serves for device in worker.gpus]
    return heading(GPU_COLUMNS, width), blocks


def host_blocks(workers: Sequence[WorkerStatus], width: int) -> tuple[Text, list[Block]]:
    """The heading, and a block for each group's processes."""
    blocks = [_host(worker, worker.host, width) for worker in workers if worker.serves and worker.host is not None]
    return heading(HOST_COLUMNS, width), blocks


def _gpu(group: str, device: DeviceState, width: int) -> Block:
    room = width >= WIDE
    uuid = device.uuid if room else device.uuid[: _SHORT_UUID - 1]
    cells = {
        "group": group,
        "GPU": f"{device.name} {uuid}" if room and device.name else uuid,
        "SM MHz": _of(device.sm_mhz, device.sm_max_mhz),
        "mem MHz": "-" if device.memory_mhz is None else f"{device.memory_mhz:,}",
        "power W": _of(device.power_w, device.power_limit_w),
        "temp": "-" if device.temperature_c is None else f"{device.temperature_c} C",
        "busy": _share(device.utilization),
        "memory GB": _memory(device),
        "PCIe in MB/s": "-" if device.pcie_rx_mb_s is None else f"{device.pcie_rx_mb_s:,.0f}",
        "out": "-" if device.pcie_tx_mb_s is None else f"{device.pcie_tx_mb_s:,.0f}",
    }
    lines = [row(GPU_COLUMNS, cells, width)]
    if remarks := _remarks(device):
        lines += wrapped("; ".join(remarks), width, 2, style="yellow")
    return Block(lines)


def _remarks(device: DeviceState) -> list[str]:
    """What is out of the ordinary."""
    remarks = []
    if device.throttle:
        remarks.append(f"clocks held down: {', '.join(device.throttle)}")
    if device.foreign_pids:
        pids = ", ".join(map(str, device.foreign_pids))
        busy = "" if device.foreign_utilization is None else f", busy {device.foreign_utilization:.0%} of the time"
        remarks.append(f"other processes: {pids}{busy}")
    if device.ecc_errors:
        remarks.append(f"{device.ecc_errors:,} uncorrected ECC errors")
    if device.xid is not None:
        remarks.append(f"XID {device.xid}")
    return remarks


def _host(worker: WorkerStatus, host: HostState, width: int) -> Block:
    cells = {
        "group": worker.name,
        "devices": ",".join(worker.devices),
        "CPU": f"{host.cpu:.2f}",
        "waits": _share(host.runnable_wait),
        "steal": _share(host.steal),
        "quota": _share(host.throttled),
        "faults/s": "-" if host.major_faults is None else f"{host.major_faults:,.0f}",
        "swap MB": "-" if host.swapped_bytes is None else f"{host.swapped_bytes / 1e6:,.0f}",
        "PSI cpu": _share(host.pressure_cpu),
        "mem": _share(host.pressure_memory),
        "io": _share(host.pressure_io),
        "RSS GB": f"{host.rss_bytes / _GB:,.2f}",
    }
    return Block([row(HOST_COLUMNS, cells, width)])


def _memory(device: DeviceState) -> str:
    if device.memory_used_bytes is None:
        return "-"
    of = "" if device.memory_total_bytes is None else f" / {device.memory_total_bytes / _GB:,.1f}"
    return f"{device.memory_used_bytes / _GB:,.1f}{of}"


def _of(value: float | None, most: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if most is None else f"{value:,.0f}/{most:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
