"""NVML played from a recording (`tests/recordings/`), frame by frame, with changes where a test wants another world."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pingpongd.nvml import NvmlRefused

RECORDINGS = Path(__file__).parent / "recordings"
NOT_SUPPORTED = 3
H200 = "GPU-b81cc2cc-42f4-149f-79c1-dead4494ce3a"
"""The card of `nvml_h200.json`."""


class NvmlPlayer:
    """Plays a recording of one card; a test says which frame is now, and what is changed of it.

    A change is a value by the key of a call, such as ``"nvmlDeviceGetClockInfo 1"``; an `NvmlRefused` is raised.
    """

    def __init__(self, name: str = "nvml_h200.json", uuid: str = H200) -> None:
        self.frames = json.loads((RECORDINGS / name).read_text())["frames"]
        self.frame = self.frames[0]
        self.uuid = uuid
        self.changes: dict[str, Any] = {}
        """For the card, or, with "UUID " before the key, for one handle."""
        self.counters: dict[int, int] = {}
        """What `fields` gives; none: what was recorded."""
        self.slices: dict[str, str] = {}
        """MIG slices: the UUID of each one's card."""
        self.xids: list[tuple[str, int]] = []
        self.listening: list[str] = []
        self.asked: list[str] = []

    def show(self, label: str, index: int = 0) -> None:
        """Go to a frame, by its label and its number among those that have it."""
        self.frame = [frame for frame in self.frames if frame["label"] == label][index]

    def uuids(self) -> list[str]:
        return [self.uuid]

    def handle(self, uuid: str) -> str:
        if uuid != self.uuid and uuid not in self.slices:
            raise NvmlRefused(6)
        return uuid

    def parent(self, handle: str) -> str | None:
        return self.slices.get(handle)

    def ask(self, call: str, handle: str, *args: int) -> Any:
        key = " ".join([call, *map(str, args)])
        self.asked.append(key)
        for change in (f"{handle} {key}", f"{handle} {call}", key, call):
            if change in self.changes:
                return _value(self.changes[change])
        if call == "nvmlDeviceGetProcessUtilization":
            key = f"{call} 0"  # was recorded with all that the driver knew
        return _value(self._recorded(key))

    def fields(self, handle: str, ids: Sequence[int]) -> dict[int, int]:
        if self.counters:
            return {field: self.counters[field] for field in ids if field in self.counters}
        recorded = self._recorded(" ".join(["fields", *map(str, ids)]))
        return {int(field): value for field, value in recorded.items()}

    def _recorded(self, key: str) -> Any:
        """The answer in this frame; what was not asked then, for it is dear, is as it was the last time."""
        until = next(number for number, frame in enumerate(self.frames) if frame is self.frame) + 1
        for frame in reversed(self.frames[:until]):
            if (answer := frame["devices"][0].get(key)) is not None:
                if "error" in answer:
                    raise NvmlRefused(answer["error"])
                return answer["value"]
        raise NvmlRefused(NOT_SUPPORTED)

    def listen(self, handle: str) -> None:
        self.listening.append(handle)

    def next_xid(self) -> tuple[str, int] | None:
        return self.xids.pop(0) if self.xids else None


def process(pid: int, instance: int = 0xFFFFFFFF, used: int | None = None) -> dict[str, int | None]:
    """One of a listing of processes."""
    return {"pid": pid, "gpuInstanceId": instance, "usedGpuMemory": used}


def sample(pid: int, busy: int, at_us: int) -> dict[str, int]:
    """One of a listing of utilizations, in percent."""
    return {"pid": pid, "smUtil": busy, "timeStamp": at_us}


def _value(raw: Any) -> Any:
    if isinstance(raw, NvmlRefused):
        raise raw
    if isinstance(raw, list):
        return [_value(item) for item in raw]
    return SimpleNamespace(**raw) if isinstance(raw, dict) else raw
