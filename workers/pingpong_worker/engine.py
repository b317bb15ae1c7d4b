"""What a worker asks of an engine: sessions whose prompt grows, then one answer.

Two engines speak it: vLLM (`vllm_engine.py`) and a timing model (`simulated_engine.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from pingpong_bus.messages import (
    DecodePace,
    DraftCounts,
    EngineLimits,
    KeptPrefix,
    Sampling,
    SchedulerState,
    SessionKind,
)


class OutputTokens(msgspec.Struct, frozen=True):
    """Tokens that one engine step, or several merged ones, gave."""

    ids: list[int]
    """Sampled ids in order. A stop token that ended the answer is not among them."""
    finish_reason: str | None = None
    """None while more may come, then "stop" or "length"."""
    stop_token: int | None = None
    """The id that ended the answer, if one did."""
    cached_tokens: int | None = None
    """Prompt tokens that the finalizing request found in the prefix cache; given with the first output."""
    drafts: DraftCounts | None = None
    """How guessing has gone so far; the latest counts. None where no tokens are guessed, or nothing is known yet."""


class Session(Protocol):
    """One request whose prompt is still growing. One coroutine drives it; calls never overlap, but for `abort`."""

    @property
    def kind(self) -> SessionKind:
        """What the session really is; an engine may decline the kind that was asked for."""
        ...

    async def append(self, ids: Sequence[int]) -> int | None:
        """Append-prefill `ids`; returns once the engine has computed them.

        Returns:
            Prompt tokens that it computed for this: neither those that it had, nor those that it found in its prefix
            cache. None where it does not say.

        Raises:
            EngineLost: the engine is gone.
            EngineError: it failed or refused this.
        """
        ...

    def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        """Prefill the rest of the prompt, `ids` (not empty), and decode; the last item has a `finish_reason`.

        Closing the generator ends the request. May be called once, also while an append that was cancelled is still
        in flight.

        Raises:
            EngineLost: the engine is gone.
            EngineError: it failed or refused this.
        """
        ...

    def roll_back(self, tokens: int) -> None:
        """Forget all of the prompt but its first `tokens`; what is appended next follows them.

        For joined prompts, whose ids may turn out otherwise than they were appended. No append may be in flight.

        Raises:
            EngineError: the session is of a kind that cannot take back what it was given.
        """
        ...

    async def abort(self) -> None:
        """Free what the session holds in the engine; harmless when it is over already."""
        ...


@runtime_checkable
class TellsProgress(Protocol):
    """A session that may say how far a prompt is computed before there is any other sign of it."""

    on_computed: Callable[[int], object]
    """Is told how many tokens of the prompt are computed so far; whoever wants to know sets it."""


class Engine(Protocol):
    """An engine in processes of its own, driven from the worker's event loop."""

    @property
    def limits(self) -> EngineLimits:
        """What the engine can take; known once `start` has returned."""
        ...

    async def start(self) -> None:
        """Load the model; returns when the engine serves.

        Raises:
            ConfigError: the model or a setting can never work.
            EngineError: it failed for another reason.
        """
        ...

    def open(
        self,
        session_id: str,
        *,
        cache_salt: str | None,
        sampling: Sampling,
        kind: SessionKind | None = None,
        pace: DecodePace | None = None,
        grid: int | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
        keep: KeptPrefix | None = None,
    ) -> Session:
        """A new session; nothing is computed yet.

        Args:
            session_id: unique among open sessions.
            cache_salt: where set, prefix-cache entries are shared only with sessions of the same salt.
            sampling: what `finalize` will be given, so that the engine can choose the kind of session.
            kind: the kind wished for; None is the engine's default. Where the engine cannot grant it (sampling that
                it does not support, no memory to pin), it opens a prefix-cache session instead.
            pace: how much appends of others may slow its decoding; None is the default of `DecodePace`.
            grid: cut its prompt at multiples of this many tokens; such sessions share prefix-cache entries with no
                others. None: wherever the engine likes.
            drafts: guess the answer's tokens, from its prompt and from these; None: do not. An engine that does not
                guess takes no notice.
            keep: how much of its prompt's beginning is expected to come back, and how often; None: nothing is known.

        Raises:
            EngineLost: the engine is not running.
            EngineError: it cannot be held to this grid.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget every cached block that no session holds."""
        ...

    async def score(self, ids: Sequence[int], tokens: Sequence[int], *, grid: int | None = None) -> list[float | None]:
        """Log probability (natural) of each of `tokens` to follow `ids`; None where the engine does not say.

        Raises:
            EngineLost: the engine is gone.
            EngineError: it refused this.
        """
        ...

    async def check(self) -> None:
        """Raise EngineLost if the engine is gone. Asks nothing of it: one that hangs does not hold this up."""
        ...

    def scheduler_state(self) -> SchedulerState | None:
        """What its scheduler showed last; None before its first step with a decode, and where it is not ours.

        Asks nothing of the engine, as `check`.
        """
        ...

    async def shutdown(self) -> None:
        """End the engine's processes and free its devices; safe to call twice."""
        ...
