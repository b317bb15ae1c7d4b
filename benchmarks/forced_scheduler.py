"""vLLM schedulers under a `ForcedPolicy`; named by `mixed_engine.py`, and imported by the engine's process."""

from __future__ import annotations

from typing import Any

from forced_policy import ForcedPolicy
from pingpong_worker.step_ledger import StepLedger
from pingpong_worker.vllm_scheduler import AsyncDecodeFirstScheduler, DecodeFirstScheduler


class _Forced:
    """Mixin: a decode-first scheduler with another policy."""

    _ledger: StepLedger

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ledger.policy = ForcedPolicy.told()


class ForcedScheduler(_Forced, DecodeFirstScheduler):
    """For engines that schedule one step at a time."""


class AsyncForcedScheduler(_Forced, AsyncDecodeFirstScheduler):
    """For engines that plan ahead."""
