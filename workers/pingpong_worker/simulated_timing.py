"""How long the simulated engine's steps take: a model of three numbers, which it knows and need not learn."""

from __future__ import annotations

from pingpong_worker.config import SimulatedSettings
from pingpong_worker.step_prices import StepKind


class TimingModel:
    """Prices of steps, as `decode_first.Prices` has them; true ones."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings

    def reach(self, kind: StepKind) -> int:  # noqa: ARG002  all kinds alike
        """Every size is known."""
        return self._settings.max_num_batched_tokens

    def price(self, rows: int, work: float, kind: StepKind) -> float:  # noqa: ARG002  all kinds cost alike
        """Seconds of a step with `rows` tokens and the sum `work` of `attention_work`."""
        settings = self._settings
        return settings.step_ms * 1e-3 + rows * settings.row_us * 1e-6 + work * settings.context_ns * 1e-9
