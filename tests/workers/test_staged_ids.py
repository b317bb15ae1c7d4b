"""Packed ids give the tensors that vLLM would have made."""

from __future__ import annotations

from typing import Any

import pytest

from pingpong_worker.vllm_staged_ids import LONG, pack_staged_ids, packed

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # what torch and vLLM say at import is not ours to mend


def test_tensors_are_the_same() -> None:
    import torch
    from vllm.utils.torch_utils import async_tensor_h2d

    copy = packed(async_tensor_h2d, torch.int32)
    long = [token * 7919 % 151_936 for token in range(LONG + 5)]
    for data in (long, long[: LONG - 1], [-(2**31), 2**31 - 1] * LONG, [0.5] * LONG):
        dtype = torch.float32 if isinstance(data[0], float) else torch.int32
        expected = async_tensor_h2d(data, device="cpu", dtype=dtype)
        found = copy(data, device="cpu", dtype=dtype)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_only_long_lists_of_int32_are_packed() -> None:
    given: list[Any] = []
    copy = packed(lambda data, **_: given.append(data), "int32")
    for data, dtype in (([1] * LONG, "int32"), ([1] * LONG, "int64"), ([1] * (LONG - 1), "int32")):
        copy(data, device="cpu", dtype=dtype)
    assert [isinstance(data, list) for data in given] == [False, True, True]
    assert given[0].tolist() == [1] * LONG


def test_the_model_runner_copies_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu import buffer_utils

    monkeypatch.setattr(buffer_utils, "async_tensor_h2d", vllms := buffer_utils.async_tensor_h2d)
    pack_staged_ids()
    assert buffer_utils.async_tensor_h2d is not vllms
