"""When to append-prefill what is known of a growing prompt, and how much of it.

Pure: no clock, no event loop. An append costs about one decode step whatever its size, and only one is in flight, so
tokens are coalesced. The end decides the latency that a user sees: once the upstream has written its last token, the
downstream's first one is a step away only if no append is still being computed. The upstream's `max_tokens` is known
ahead, so an append that would land in its last few tokens is left to finalize, which computes those tokens anyway;
and where a full batch could not come in time any more, a smaller one is sent at the last moment that can.

That moment is best taken late: an engine that has idled for 30 ms gives its first token later than one that has for 9,
by 1.5 ms of 4.7 with a tiny model on a CPU, for caches, clocks and sleeping threads have cooled down all along the way.
So where it is known how long tokens and appends take, the last append is timed to end just before the upstream does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

_MARGIN = 1
"""Tokens of distance kept on top of the estimate: the first one of a batch was decoded before we saw the batch."""
_LAST_MOMENT = 3
"""How many tokens the last moment lasts: upstream tokens may come in twos, and the estimate grows as they come."""
_WORTH_A_STEP = 4
"""At the last moment at least this part of a full append; fewer tokens ride along with finalize for nothing."""
_RESERVE = 0.25
"""Of an append's time, kept on top of it: on an H200 the slowest of 24 took a fifth more than their mean."""
_LAST_CHANCE = 1.5
"""Token times that the last chance lasts: tokens may come in twos."""
_ALIKE = 4
"""How many times larger an append may have been that another one's time is estimated by: that of a static prefix says
nothing of what a small one takes."""


class PromptProgress(NamedTuple):
    """What the feed knows of its prompt at one moment."""

    pending: int
    """Prompt tokens known and not sent."""
    sent: int
    """Prompt tokens sent."""
    in_flight: bool
    """Whether the engine is still computing an append."""
    complete: bool
    """Whether the whole prompt is known."""
    literal_tail: bool
    """Whether literal tokens follow behind what is pending, so that finalize will not be empty."""
    remaining: int | None
    """The most tokens that upstreams may still write; None where unknown."""
    token_ms: float | None = None
    """What one of them takes; None where unknown, and where several upstreams write at once."""


@dataclass(frozen=True)
class Wait:
    """Nothing to do until more is known or the append in flight is done."""


@dataclass(frozen=True)
class Append:
    """Send the first `tokens` of what is pending."""

    tokens: int


@dataclass(frozen=True)
class Finalize:
    """Send all that is pending, and decode. An append in flight is overtaken."""


Decision = Wait | Append | Finalize


class AppendPace(NamedTuple):
    """How fast upstreams write compared to how fast appends are computed; from the last append that was computed."""

    tokens: int = 0
    """Its tokens; 0 while there is none."""
    arrivals: int = 0
    """Upstream tokens that came while it was computed."""
    ms: float = 0.0
    """How long it took."""

    def arrivals_during(self, tokens: int) -> int:
        """Upstream tokens to expect while an append of `tokens` is computed: one for its step, more in proportion."""
        if self.tokens == 0:
            return 1
        return 1 + math.ceil(max(0, self.arrivals - 1) * tokens / self.tokens)

    def ms_of(self, tokens: int) -> float | None:
        """How long an append of `tokens` should take; None where the last one says nothing of that."""
        if not 0 < self.tokens <= _ALIKE * tokens:
            return None
        return self.ms * max(1.0, tokens / self.tokens)


def decide(progress: PromptProgress, pace: AppendPace, append_tokens: int, align: int) -> Decision:
    """What to do now.

    Args:
        progress: where the prompt stands.
        pace: the last append's.
        append_tokens: a later append waits for at least this many tokens, but for the last moment.
        align: appends end at multiples of this many tokens from the prompt's start: the block size, or the grid's
            cell, where only whole ones are found again, else 1.

    Never appends beside an append in flight, and always leaves a token for finalize.
    """
    if progress.complete:
        return Finalize()
    if progress.in_flight:
        return Wait()
    usable = progress.pending if progress.literal_tail else progress.pending - 1
    tokens = (progress.sent + usable) // align * align - progress.sent
    if tokens < 1:
        return Wait()
    if progress.sent == 0:
        return Append(tokens)  # the static prefix: the bulk of the work, and nothing is gained by waiting
    if progress.remaining is None:
        return Append(tokens) if tokens >= append_tokens else Wait()
    append_ms = pace.ms_of(tokens)
    if progress.token_ms and append_ms is not None:
        chances = (progress.remaining * progress.token_ms - append_ms * (1 + _RESERVE)) / progress.token_ms
        return Append(tokens) if _timed(tokens, append_tokens, chances) else Wait()
    spare = progress.remaining - pace.arrivals_during(tokens) - _MARGIN
    if spare <= 0:
        return Wait()
    if tokens >= append_tokens:
        return Append(tokens)
    spare_of_full = progress.remaining - (append_tokens - tokens) - pace.arrivals_during(append_tokens) - _MARGIN
    if spare_of_full <= 0 and spare <= _LAST_MOMENT and tokens * _WORTH_A_STEP >= append_tokens:
        return Append(tokens)
    return Wait()


def _timed(tokens: int, append_tokens: int, chances: float) -> bool:
    """Whether to append now, with so many upstream tokens to come before an append would end too late."""
    if 0 <= chances < _LAST_CHANCE:
        return tokens * _WORTH_A_STEP >= append_tokens
    # Full; but the last append takes all, where too little would be left for another.
    return tokens >= append_tokens and chances * _WORTH_A_STEP >= append_tokens
