"""NVML as it is asked here: a small protocol, and NVIDIA's Python binding behind it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final, Protocol

NOT_FOUND: Final = 6
TIMEOUT: Final = 10
NEVER: Final = frozenset({2, 3, 4, 13})
"""Codes that mean "not on this device": invalid argument, not supported, no permission, function not found."""


class NvmlRefused(Exception):
    """NVML did not answer."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text or f"NVML's error {code}")
        self.code = code


class Nvml(Protocol):
    """What is asked of NVML. Every method may raise NvmlRefused; handles belong to the object that gave them."""

    def uuids(self) -> list[str]:
        """The cards, in NVML's order, which is that of `nvidia-smi`."""

    def handle(self, uuid: str) -> Any:
        """Of a card, or of a MIG slice."""

    def parent(self, handle: Any) -> Any | None:
        """The card of a MIG slice; None where the handle is a card's."""

    def ask(self, call: str, handle: Any, *args: int) -> Any:
        """Call NVML's function of this name, such as "nvmlDeviceGetPowerUsage", with constants by their numbers."""

    def fields(self, handle: Any, ids: Sequence[int]) -> dict[int, int]:
        """Several counters in one call; those that the device does not have are left out."""

    def listen(self, handle: Any) -> None:
        """Collect the XIDs of a card from now on."""

    def next_xid(self) -> tuple[str, int] | None:
        """The next one that was collected, with the card's UUID; None where there is none, at once."""


class PyNvml:
    """The driver's NVML."""

    def __init__(self, module: Any) -> None:
        self._nvml = module
        self._events: Any = None

    def uuids(self) -> list[str]:
        count = self._call("nvmlDeviceGetCount")
        return [_text(self.ask("nvmlDeviceGetUUID", self._call("nvmlDeviceGetHandleByIndex", i))) for i in range(count)]

    def handle(self, uuid: str) -> Any:
        return self._call("nvmlDeviceGetHandleByUUID", uuid)

    def parent(self, handle: Any) -> Any | None:
        if not self._call("nvmlDeviceIsMigDeviceHandle", handle):
            return None
        return self._call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)

    def ask(self, call: str, handle: Any, *args: int) -> Any:
        return self._call(call, handle, *args)

    def fields(self, handle: Any, ids: Sequence[int]) -> dict[int, int]:
        answers = self._call("nvmlDeviceGetFieldValues", handle, list(ids))
        return {
            answer.fieldId: int(getattr(answer.value, _MEMBERS[answer.valueType]))
            for answer in answers
            if answer.nvmlReturn == 0 and answer.valueType in _MEMBERS
        }

    def listen(self, handle: Any) -> None:
        if self._events is None:
            self._events = self._call("nvmlEventSetCreate")
        self._call("nvmlDeviceRegisterEvents", handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)

    def next_xid(self) -> tuple[str, int] | None:
        if self._events is None:
            return None
        try:
            event = self._call("nvmlEventSetWait_v2", self._events, 0)
        except NvmlRefused as refusal:
            if refusal.code == TIMEOUT:
                return None
            raise
        return _text(self.ask("nvmlDeviceGetUUID", event.device)), int(event.eventData)

    def _call(self, name: str, *args: Any) -> Any:
        function = getattr(self._nvml, name, None)
        if function is None:
            raise NvmlRefused(13, f"this nvidia-ml-py has no {name}")
        try:
            return function(*args)
        except self._nvml.NVMLError as error:
            raise NvmlRefused(int(error.value), str(error)) from None


_MEMBERS: Final = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""Of NVML's union of values, by its type."""


def load_nvml() -> Nvml:
    """Connect to the driver. It is not let go of again: a process holds it for its life.

    Raises:
        NvmlRefused: there is no binding, or no driver.
    """
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlRefused(12, "nvidia-ml-py is not installed") from None
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        raise NvmlRefused(int(error.value), str(error)) from None
    return PyNvml(module)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
