"""How long the simulated engine's steps take: a model of a few numbers, which it knows and need not learn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from pingpong_worker.config import SimulatedSettings
from pingpong_worker.step_prices import StepKind, attention_work


class TimingModel:
    """Prices of steps, as `decode_first.Prices` has them; true ones."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings
        self._decode_weight = 1.0
        if settings.decode_context_ns is not None and settings.context_ns > 0:
            self._decode_weight = settings.decode_context_ns / settings.context_ns

    def reach(self, kind: StepKind) -> int:  # noqa: ARG002  all kinds alike
        """Every size is known."""
        return self._settings.max_num_batched_tokens

    def price(self, rows: int, work: float, kind: StepKind) -> float:  # noqa: ARG002  all kinds cost alike
        """Seconds of a step with `rows` tokens and the sum `work` of their `work`."""
        settings = self._settings
        if settings.step_rows:
            seconds = _on_line(settings.step_rows, rows) * 1e-3
        else:
            seconds = settings.step_ms * 1e-3 + rows * settings.row_us * 1e-6
        return settings.time_scale * (seconds + work * settings.context_ns * 1e-9)

    def work(self, computed: int, tokens: int, *, decode: bool) -> float:
        """`attention_work` of one request in a step; of a decode in units of what prompt tokens pay."""
        return attention_work(computed, tokens) * (self._decode_weight if decode else 1.0)

    def admission_s(self, prompt_tokens: int) -> float:
        """Seconds from a request's arrival until a step can take it."""
        settings = self._settings
        return settings.time_scale * (settings.request_ms * 1e-3 + prompt_tokens * settings.request_us * 1e-6)


def _on_line(table: Sequence[tuple[int, float]], rows: int) -> float:
    """The value at `rows` of a table of points; before the first one as there."""
    if len(table) == 1 or rows <= table[0][0]:
        return table[0][1]
    at = min(bisect_right(table, rows, key=lambda point: point[0]), len(table) - 1)
    (left, low), (right, high) = table[at - 1], table[at]
    return low + (high - low) * (rows - left) / (right - left)
