"""What an engine is asked before anybody else asks it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from pingpong_bus.messages import EngineLimits, Sampling
from pingpong_worker.engine import OutputTokens
from pingpong_worker.warm_up import warm_up


class RecordingEngine:
    """Refuses what is too long, and remembers prompts, grids, and sessions that were left open."""

    def __init__(self, **limits: Any) -> None:
        values = {"max_model_len": 2048, "vocabulary_size": 50, "decode_first": True, "grid_tokens": 256, **limits}
        sessions = ("prefix-cache", "streaming-input")
        self.limits = EngineLimits(
            engine="", model="", block_size=1, kv_tokens=9999, max_num_seqs=9, sessions=sessions, **values
        )
        self.opened: list[dict[str, Any]] = []
        self.appended: list[int] = []
        self.finalized: list[int] = []
        self.open_sessions: set[str] = set()
        self.resets = 0
        self.scored = False

    def open(self, session_id: str, **how: Any) -> RecordingSession:
        assert session_id not in self.open_sessions
        self.open_sessions.add(session_id)
        self.opened.append(how)
        return RecordingSession(self, session_id)

    async def score(self, ids: Sequence[int], tokens: Sequence[int], *, grid: int | None = None) -> list[float | None]:
        self.scored = True
        return [0.0]

    async def reset_prefix_cache(self) -> None:
        assert not self.open_sessions
        self.resets += 1


class RecordingSession:
    kind = "prefix-cache"

    def __init__(self, engine: RecordingEngine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._prompt: list[int] = []

    async def append(self, ids: Sequence[int]) -> int:
        self._extend(ids, 1)
        self._engine.appended.append(len(ids))
        return len(ids)

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        self._extend(ids, sampling.max_tokens)
        self._engine.finalized.append(len(ids))
        yield OutputTokens([1] * sampling.max_tokens, "length")
        await self.abort()

    async def abort(self) -> None:
        self._engine.open_sessions.discard(self._name)

    def _extend(self, ids: Sequence[int], output: int) -> None:
        assert ids
        assert max(ids) < self._engine.limits.vocabulary_size
        self._prompt += ids
        assert len(self._prompt) + output <= self._engine.limits.max_model_len


@pytest.mark.parametrize("length", [17, 20, 100, 256, 272, 273, 300, 2048])
async def test_no_engine_is_asked_for_more_than_it_holds(length: int) -> None:
    engine = RecordingEngine(max_model_len=length)
    await warm_up(engine)  # type: ignore[arg-type]
    assert engine.resets == 1
    assert engine.scored
    assert any(how["sampling"].seed is not None for how in engine.opened)


async def test_the_scheduler_is_shown_sizes_and_a_cell() -> None:
    engine = RecordingEngine()
    await warm_up(engine)  # type: ignore[arg-type]
    assert {16, 32, 64, 128, 256} <= set(engine.appended)
    salts = [how["cache_salt"] for how in engine.opened if how["cache_salt"]]
    assert len(salts) == len(set(salts)) == 5, "none finds what another has computed"
    assert [how["grid"] for how in engine.opened if how.get("grid")] == [256]
    assert 257 in engine.finalized, "a whole cell, and one that is not"


async def test_an_engine_without_our_scheduler_is_asked_for_neither() -> None:
    engine = RecordingEngine(decode_first=False, grid_tokens=0)
    await warm_up(engine)  # type: ignore[arg-type]
    assert len(engine.opened) == 3
    assert not any(how.get("grid") for how in engine.opened)
