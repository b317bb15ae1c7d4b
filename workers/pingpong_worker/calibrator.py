"""When an engine is measured: at its start, unless it was before, and when the supervisor asks; users go first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from pingpong_bus.errors import EngineError
from pingpong_bus.messages import EngineFigures, Progress
from pingpong_worker.calibration import calibrate
from pingpong_worker.config import WorkerConfig
from pingpong_worker.engine import Engine
from pingpong_worker.figures_file import drop_figures, figures_kind, load_figures, save_figures

_LIMIT_S = 90.0
"""An engine that takes longer hangs; it is not for the measuring to say so."""
_LET_GO_S = 1.0
"""How long it may take to end what was measured."""
NOISY: Final = 1.8
"""Step times, p99 ÷ p50, above which something else ran beside the measuring. An H200 has 1.1, a busy CPU 2 to 2.7."""
_log = logging.getLogger("pingpong_worker")


class Calibrator:
    """Measures one engine, one run at a time."""

    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        """Args:
        engine: started.
        config: what the worker was told.
        """
        self._engine = engine
        self._config = config
        self._run: asyncio.Task[EngineFigures] | None = None
        self._gave_way = False

    def kept(self) -> EngineFigures | None:
        """Figures of an earlier start of such an engine, if there are any."""
        return load_figures(figures_kind(self._engine.limits, self._config))

    async def at_start(self, on_progress: Callable[[Progress], object] = lambda _: None) -> EngineFigures | None:
        """Measure the engine; None, and a line in the log, where that fails: the engine may serve all the same."""
        try:
            return await self.measure(on_progress)
        except EngineError as error:
            _log.warning("the engine was not measured, and placements go by a rule of thumb: %s", _in_one_line(error))
            return None

    async def measure(self, on_progress: Callable[[Progress], object] = lambda _: None) -> EngineFigures:
        """Measure the engine, and keep the figures for its next start; noisy ones count until then only.

        Raises:
            EngineError: it failed, gave way to others, takes too long, or is being measured already.
        """
        if self._run is not None:
            raise EngineError("the engine is being measured already.", hint="Wait for that.")
        self._gave_way = False
        self._run = run = asyncio.create_task(
            calibrate(self._engine, self._config.paces, on_progress), name="calibration"
        )
        try:
            await asyncio.wait([run], timeout=_LIMIT_S)
        finally:
            self._run = None
            run.cancel()
            await asyncio.wait([run], timeout=_LET_GO_S)
        if not run.done() or run.cancelled():
            raise EngineError("it gave way to other work." if self._gave_way else f"it took more than {_LIMIT_S:g} s.")
        error = run.exception()
        if isinstance(error, EngineError):
            raise error
        if error is not None:  # a fault of ours: it costs the figures only
            _log.error("measuring the engine failed", exc_info=error)
            raise EngineError(f"the measuring failed: {type(error).__name__}: {error}") from error
        figures, kind = run.result(), figures_kind(self._engine.limits, self._config)
        if figures.step_p99_ms > NOISY * figures.step_p50_ms:
            _log.warning(
                "the engine was measured while its steps were uneven (p50 %.3g ms, p99 %.3g ms): "
                "the figures are used, but not kept, and its next start measures it again",
                figures.step_p50_ms,
                figures.step_p99_ms,
            )
            drop_figures(kind)
        else:
            save_figures(kind, figures)
        return figures

    def give_way(self) -> None:
        """End a run that is under way: somebody wants the engine."""
        if self._run is not None and not self._gave_way:  # a second cancellation would interrupt its cleaning up
            self._gave_way = True
            self._run.cancel()

    async def make_room(self) -> None:
        """The same, and wait until nothing of the run is left in the engine, or for a second."""
        self.give_way()
        if self._run is not None:
            await asyncio.wait([self._run], timeout=_LET_GO_S)


def _in_one_line(error: EngineError) -> str:
    """The daemon takes what a worker prints line by line."""
    return " ".join(str(error).split())
