"""What NVML says of a group's devices: clocks and what holds them down, power, heat, faults, and who else is on them.

Every question may go unanswered, which is None and no error. What a device does not know is asked once; what takes the
driver long is asked the less often (an H200 takes 20 ms of a core for NVML's PCIe rate, which is why counters are
read instead).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from pingpong_bus.messages import DeviceState
from pingpong_worker.pinning import parse_device
from pingpongd.device_tenants import DeviceTenants
from pingpongd.foreign_load import ForeignLoad
from pingpongd.gpu_counters import GpuCounters
from pingpongd.nvml import NEVER, Nvml, NvmlRefused

REASONS: Final = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""NVML's bits for why clocks are reduced. "gpu_idle" is no throttle: nothing runs."""
_SM, _MEMORY = 1, 2
_UNCORRECTED, _VOLATILE = 1, 0
_ANY_INSTANCE: Final = 0xFFFFFFFF
_LISTINGS: Final = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)


class _Card(msgspec.Struct):
    """A card, or a MIG slice, and what is remembered of it."""

    uuid: str
    handle: Any
    parent: str
    """The card's UUID, of a slice; else empty."""
    instance: int | None = None
    """A slice's GPU instance."""
    refused: set[str] = set()
    """What it does not know."""
    fixed: dict[str, Any] = {}
    """What does not change."""
    counters: GpuCounters = msgspec.field(default_factory=GpuCounters)
    xid: int | None = None
    xids: int = 0
    foreign: ForeignLoad = msgspec.field(default_factory=ForeignLoad)


class GpuProbe:
    """Looks at the devices of groups."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        same_pids: bool,
        descends: Callable[[int, Sequence[int]], bool],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """Args:
        nvml: where it asks.
        same_pids: whether NVML certainly numbers processes as this process does.
        descends: whether a process was started by one of others.
        clock: in seconds.
        cpu: what this thread has used, in seconds.
        """
        self._nvml = nvml
        self._same_pids = same_pids
        self._descends = descends
        self._clock = clock
        self._cpu = cpu
        self._order: list[str] | None = None
        self._cards: dict[str, _Card] = {}
        self._tenants: dict[tuple[str, str], DeviceTenants] = {}
        self._seen: dict[str, DeviceState] = {}

    def begin(self) -> None:
        """A new look: what slices share is asked once in it, and XIDs that came meanwhile are taken."""
        self._seen.clear()
        try:
            while (found := self._nvml.next_xid()) is not None:
                uuid, xid = found
                if uuid in self._cards:
                    self._cards[uuid].xid = xid
                    self._cards[uuid].xids += 1
        except NvmlRefused:
            return  # it goes on at the next look

    def resolve(self, devices: Sequence[str]) -> list[str]:
        """The UUIDs of a group's GPUs; none for cores, nor for a number that no card has."""
        found = []
        for device in devices:
            parsed = parse_device(device)
            if isinstance(parsed, str):
                found.append(parsed)
            elif isinstance(parsed, int):
                order = self._uuids()
                if parsed < len(order):
                    found.append(order[parsed])
        return found

    def starting(self, name: str, uuids: Sequence[str]) -> None:
        """A group's engine is about to start: remember who is on its devices now."""
        for uuid in uuids:
            card = self._card(uuid)
            if card is not None and (listed := self._listed(card)) is not None:
                self._tenant(name, uuid).starting(listed.keys())

    def look(
        self, name: str, uuids: Sequence[str], pids: Sequence[int], *, suspected: bool = False
    ) -> list[DeviceState]:
        """Look at a group's devices, in their order.

        Args:
            name: the group's.
            uuids: as `resolve` gives them.
            pids: the group's processes.
            suspected: its tokens come late, and others on its devices may be why.
        """
        return [self._look(name, uuid, pids, suspected) for uuid in uuids]

    def forget(self, name: str) -> None:
        """A group's processes have ended."""
        for key in [key for key in self._tenants if key[0] == name]:
            del self._tenants[key]

    def _uuids(self) -> list[str]:
        if self._order is None:
            try:
                self._order = self._nvml.uuids()
            except NvmlRefused:
                return []
        return self._order

    def _tenant(self, name: str, uuid: str) -> DeviceTenants:
        return self._tenants.setdefault((name, uuid), DeviceTenants(same_pids=self._same_pids))

    def _card(self, uuid: str) -> _Card | None:
        if uuid in self._cards:
            return self._cards[uuid]
        try:
            handle = self._nvml.handle(uuid)
        except NvmlRefused:
            return None
        card = self._cards[uuid] = _Card(uuid, handle, "")
        parent = self._parent(handle)
        if parent is None:
            try:
                self._nvml.listen(handle)
            except NvmlRefused:
                card.refused.add("xid")
            return card
        card.parent = str(_text(self._ask(card, "nvmlDeviceGetUUID", handle=parent)) or "")
        card.instance = self._ask(card, "nvmlDeviceGetGpuInstanceId")
        return card

    def _parent(self, handle: Any) -> Any | None:
        try:
            return self._nvml.parent(handle)
        except NvmlRefused:
            return None

    def _ask(self, card: _Card, call: str, *args: int, handle: Any = None) -> Any:
        """What a device says; None where it does not."""
        key = " ".join([call, *map(str, args)])
        if key in card.refused:
            return None
        try:
            return self._nvml.ask(call, card.handle if handle is None else handle, *args)
        except NvmlRefused as refusal:
            if refusal.code in NEVER:
                card.refused.add(key)
            return None

    def _fixed(self, card: _Card, call: str, *args: int) -> Any:
        """The same of what does not change; some of it takes the driver milliseconds."""
        key = " ".join([call, *map(str, args)])
        if key not in card.fixed and (value := self._ask(card, call, *args)) is not None:
            card.fixed[key] = value
        return card.fixed.get(key)

    def _look(self, name: str, uuid: str, pids: Sequence[int], suspected: bool) -> DeviceState:
        card = self._card(uuid)
        if card is None:
            return DeviceState(uuid=uuid)
        if card.parent and (parent := self._card(card.parent)) is not None:
            # Of a slice, clocks, power and heat are the card's. Its load is not: that of the others is no part of it.
            shared = msgspec.structs.replace(self._hardware(parent), uuid=uuid, parent_uuid=card.parent)
        else:
            shared = self._hardware(card)
            usage = self._ask(card, "nvmlDeviceGetUtilizationRates")
            shared = msgspec.structs.replace(shared, utilization=None if usage is None else usage.gpu / 100)
        memory = self._ask(card, "nvmlDeviceGetMemoryInfo")
        listed = self._listed(card)
        used = None if memory is None else int(memory.used)
        foreign = [] if listed is None else self._foreign(name, card, listed, used, pids, suspected)
        return msgspec.structs.replace(
            shared,
            name=str(_text(self._fixed(card, "nvmlDeviceGetName")) or ""),
            memory_used_bytes=used,
            memory_total_bytes=None if memory is None else memory.total,
            foreign_pids=foreign,
            foreign_utilization=None if listed is None else card.foreign.utilization,
        )

    def _hardware(self, card: _Card) -> DeviceState:
        """What is of the card as a whole."""
        if card.uuid not in self._seen:
            counted = card.counters.read(self._nvml, card.handle, self._clock(), self._cpu)
            reasons = self._ask(card, "nvmlDeviceGetCurrentClocksEventReasons")
            if reasons is None:
                reasons = self._ask(card, "nvmlDeviceGetCurrentClocksThrottleReasons")
            in_force = [name for bit, name in REASONS.items() if (reasons or 0) & bit]
            power = self._ask(card, "nvmlDeviceGetPowerUsage")
            limit = self._ask(card, "nvmlDeviceGetEnforcedPowerLimit")
            self._seen[card.uuid] = DeviceState(
                uuid=card.uuid,
                sm_mhz=self._ask(card, "nvmlDeviceGetClockInfo", _SM),
                sm_max_mhz=self._fixed(card, "nvmlDeviceGetMaxClockInfo", _SM),
                memory_mhz=self._ask(card, "nvmlDeviceGetClockInfo", _MEMORY),
                throttle=[*in_force, *(name for name in counted.reasons if name not in in_force)],
                power_w=None if power is None else power / 1000,
                power_limit_w=None if limit is None else limit / 1000,
                temperature_c=self._ask(card, "nvmlDeviceGetTemperature", 0),
                ecc_errors=self._ask(card, "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
                xid=card.xid,
                xids=card.xids,
                pcie_rx_mb_s=counted.rx_mb_s,
                pcie_tx_mb_s=counted.tx_mb_s,
            )
        return self._seen[card.uuid]

    def _listed(self, card: _Card) -> dict[int, int | None] | None:
        """The processes on a device, as NVML numbers them, and the bytes that each holds; None where it lists none at
        all."""
        listings = [self._ask(card, call) for call in _LISTINGS]
        if all(listing is None for listing in listings):
            return None
        return {
            process.pid: process.usedGpuMemory
            for listing in listings
            for process in listing or ()
            # Some drivers list the whole card's under each of its slices.
            if card.instance is None or process.gpuInstanceId in (card.instance, _ANY_INSTANCE)
        }

    def _foreign(
        self,
        name: str,
        card: _Card,
        listed: dict[int, int | None],
        used: int | None,
        pids: Sequence[int],
        suspected: bool,
    ) -> list[int]:
        """Others' processes on a device; what they compute is asked where there may be any."""
        tenants = self._tenant(name, card.uuid)
        own = tenants.own(listed.keys(), set(pids), lambda pid: self._descends(pid, pids))
        foreign = listed.keys() - own
        joined = tenants.joined(used, listed)
        if not foreign and (self._same_pids or not own):
            card.foreign.nobody()
            return []
        card.foreign.look(
            lambda call, since: self._nvml.ask(call, card.handle, since),
            own,
            self._clock(),
            self._cpu,
            seen=bool(foreign) or joined or suspected,
        )
        return sorted({*foreign, *card.foreign.pids})


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
