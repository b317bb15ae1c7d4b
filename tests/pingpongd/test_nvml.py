"""NVIDIA's binding behind the protocol; the binding itself is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pingpongd import nvml
from pingpongd.nvml import NvmlRefused, PyNvml, load_nvml


class NVMLError(Exception):
    """As the binding's."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return f"error {self.value}"


def binding(**functions: Any) -> SimpleNamespace:
    return SimpleNamespace(NVMLError=NVMLError, nvmlEventTypeXidCriticalError=8, **functions)


def refuse(code: int) -> Any:
    def function(*args: object) -> None:
        raise NVMLError(code)

    return function


def field(number: int, kind: int, value: float, returned: int = 0) -> SimpleNamespace:
    names = ("dVal", "uiVal", "ulVal", "ullVal")
    union = SimpleNamespace(**{name: value if index == kind else -1 for index, name in enumerate(names)})
    return SimpleNamespace(fieldId=number, valueType=kind, value=union, nvmlReturn=returned)


def test_cards_are_listed_in_nvmls_order_whatever_kind_of_text_it_gives() -> None:
    names = {"h0": b"GPU-b", "h1": "GPU-a"}
    found = PyNvml(
        binding(
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda index: f"h{index}",
            nvmlDeviceGetUUID=lambda handle: names[handle],
        )
    )
    assert found.uuids() == ["GPU-b", "GPU-a"]


def test_an_error_keeps_its_code_and_a_function_that_is_not_there_is_one() -> None:
    found = PyNvml(binding(nvmlDeviceGetPowerUsage=refuse(15)))
    with pytest.raises(NvmlRefused, match="error 15") as lost:
        found.ask("nvmlDeviceGetPowerUsage", "h")
    with pytest.raises(NvmlRefused) as missing:
        found.ask("nvmlDeviceGetSomethingNew", "h", 1)
    assert (lost.value.code, missing.value.code) == (15, 13)
    assert missing.value.code in nvml.NEVER


def test_a_slice_has_a_parent_and_a_card_has_none() -> None:
    found = PyNvml(
        binding(
            nvmlDeviceIsMigDeviceHandle=lambda handle: int(handle == "mig"),
            nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: f"card of {handle}",
        )
    )
    assert (found.parent("mig"), found.parent("card")) == ("card of mig", None)


def test_fields_are_read_by_their_types_and_missing_ones_left_out() -> None:
    answers = [field(74, 3, 2**40), field(197, 1, 5), field(269, 3, 1, returned=3), field(270, 0, 2.9), field(1, 99, 0)]
    found = PyNvml(binding(nvmlDeviceGetFieldValues=lambda handle, ids: answers))
    assert found.fields("h", [74, 197, 269, 270, 1]) == {74: 2**40, 197: 5, 270: 2}


def test_xids_are_taken_without_waiting() -> None:
    events = [SimpleNamespace(device="h", eventData=79)]
    waited: list[int] = []

    def wait(collected: object, timeout_ms: int) -> object:
        waited.append(timeout_ms)
        if not events:
            raise NVMLError(10)
        return events.pop()

    registered: list[tuple[object, ...]] = []
    found = PyNvml(
        binding(
            nvmlEventSetCreate=lambda: "set",
            nvmlDeviceRegisterEvents=lambda *args: registered.append(args),
            nvmlEventSetWait_v2=wait,
            nvmlDeviceGetUUID=lambda handle: b"GPU-a",
        )
    )
    assert found.next_xid() is None
    assert waited == []  # nothing was asked for
    found.listen("h")
    found.listen("i")
    assert registered == [("h", 8, "set"), ("i", 8, "set")]
    assert (found.next_xid(), found.next_xid()) == (("GPU-a", 79), None)
    assert waited == [0, 0]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (None, "nvidia-ml-py is not installed"),
        (binding(nvmlInit=refuse(9)), "error 9"),
    ],
)
def test_no_binding_or_no_driver_is_a_refusal(
    module: SimpleNamespace | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> SimpleNamespace:
        if module is None:
            raise ImportError(name)
        return module

    monkeypatch.setattr(nvml, "importlib", SimpleNamespace(import_module=import_module))
    with pytest.raises(NvmlRefused, match=text):
        load_nvml()
