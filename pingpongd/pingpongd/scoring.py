"""How likely tokens are to follow others, asked of an engine beside the chains.

A request of this kind holds room like a hop, and on the grid has its group to itself, too: beside it no hop would keep
its bits. It gives way to hops that wait.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from pingpong_bus.errors import DataError, Overloaded, UsageError
from pingpong_bus.messages import EngineLimits
from pingpongd.fleet import Worker
from pingpongd.hop_room import HopRoom

PATIENCE_S = 60.0
"""How long a request waits for room on a group."""


class Scoring:
    """Takes such requests; belongs to the running event loop."""

    def __init__(self, room: HopRoom, freed: Callable[[], None]) -> None:
        """Args:
        room: of the groups.
        freed: called when a request has given its room back.
        """
        self._room = room
        self._freed = freed
        self._numbers = itertools.count(1)

    async def score(
        self, ids: Sequence[int], tokens: Sequence[int], grid: int | None, model: str = ""
    ) -> list[float | None]:
        """Natural logarithm of each of the tokens' probability to follow `ids`; None where the engine does not say.

        Args:
            ids: at least one.
            tokens: asked about.
            grid: the cell in tokens that the prompt is cut at; None: wherever the engine likes.
            model: that is asked, by name; empty: the default one.

        Raises:
            DataError: no engine takes these ids.
            UsageError: no engine can be held to a grid, or none serves the model.
            Overloaded: no group has had room.
            EngineError: the engine has failed, or is gone.
        """
        limits = self._room.limits(model)
        if not limits:
            which = f'the model "{model}"' if model else "the default model"
            there = ", ".join(f'"{name}"' if name else "the default one" for name in self._room.models())
            raise UsageError(f"no group serves {which}.", field="model", hint=f"There are: {there}.")
        check_score(ids, tokens, grid, limits)
        request = f"score/{next(self._numbers)}"
        worker = await self._take(request, len(ids) + 1, grid, model)
        assert self._room.fleet is not None  # noqa: S101 - it has given a worker
        try:
            return await self._room.fleet.score(worker, ids, tokens, grid)
        finally:
            self._room.give_back(worker.name, request)
            self._freed()

    async def _take(self, request: str, tokens: int, grid: int | None, model: str) -> Worker:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (worker := self._room.take_between(request, tokens, grid=grid is not None, model=model)) is None:
                    await self._room.changed()
        except TimeoutError:
            raise Overloaded(
                f"no group has had room for it within {PATIENCE_S:g} s.", hint="Ask again when fewer chains run."
            ) from None
        return worker


def check_score(ids: Sequence[int], tokens: Sequence[int], grid: int | None, limits: Sequence[EngineLimits]) -> None:
    """Refuse what no engine could answer. Pure.

    Args:
        ids: of the prompt.
        tokens: asked about.
        grid: the cell that the prompt is to be cut at.
        limits: of the engines; the tightest counts.

    Raises:
        DataError: naming the field.
        UsageError: no engine can be held to a grid.
    """
    most = min(min(limit.max_model_len, limit.kv_tokens) for limit in limits)
    if len(ids) >= most:  # one token has to be left to write
        raise DataError(f"{len(ids)} ids and one more are asked for, and the engine takes {most}.", field="ids")
    vocabulary = min(limit.vocabulary_size for limit in limits)
    for field, given in (("ids", ids), ("tokens", tokens)):
        if (highest := max(given)) >= vocabulary:
            raise DataError(f"there is no token {highest}: the vocabulary has {vocabulary}.", field=field)
    if grid is not None and not any(limit.grid_tokens for limit in limits):
        why = limits[0].grid_refusal or "it cannot be held to a grid"
        raise UsageError(f"the engine does not score on a grid: {why.rstrip('.')}.", field="grid")
