"""Schedulers that give appends exactly as many tokens beside decodes as they are told, for timing single sizes.

An engine's process finds the number in a file that `MIXED_STEP_GRANT` names: eight bytes, mapped.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any

from pingpong_worker.decode_first import Grant, StepView
from pingpong_worker.vllm_scheduler import AsyncDecodeFirstScheduler, DecodeFirstScheduler

GRANT_FILE = "MIXED_STEP_GRANT"
GRANT_BYTES = 8


class _Forced:
    """A policy that knows one number."""

    def __init__(self) -> None:
        with Path(os.environ[GRANT_FILE]).open("rb") as file:
            self._number = memoryview(mmap.mmap(file.fileno(), GRANT_BYTES, access=mmap.ACCESS_READ)).cast("Q")

    def decode_seconds(self, _view: StepView) -> float:
        return math.inf

    def target_seconds(self, _view: StepView) -> float:
        return math.inf

    def grant(self, view: StepView) -> Grant:
        if view.decodes == 0 or view.append_tokens == 0:
            return Grant(view.append_tokens, "full speed")
        return Grant(min(self._number[0], view.append_tokens), "target")


class ForcedScheduler(DecodeFirstScheduler):
    """For engines that schedule one step at a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ledger.policy = _Forced()  # type: ignore[assignment]


class AsyncForcedScheduler(AsyncDecodeFirstScheduler):
    """For engines that plan ahead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ledger.policy = _Forced()  # type: ignore[assignment]
