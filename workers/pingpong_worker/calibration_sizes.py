"""How long the prompts and appends are by which an engine is measured. Pure."""

from __future__ import annotations

import math
from typing import Final

_PREFILLS: Final = (64, 256, 1024, 4096, 12288, 32768, 98304)
"""Tokens of the prompts whose prefill is timed."""
_LONGEST_PREFILL_S = 2.0
"""None that should take longer, in proportion to the last, is tried; attention makes that three seconds on a CPU."""
_WORTHWHILE = 1.5
"""Times the longest prompt so far: a last one that is no longer than this tells nothing new."""
_MOST_APPENDED = 4096
_BESIDE_STEPS = 24
"""Steps of the decode, while a long enough append is computed."""


def next_length(tokens: int, seconds: float, most: int) -> int | None:
    """Tokens of the next longer prompt to prefill; None where that would take too long, or tell nothing new.

    Args:
        tokens: of the longest so far; 0 before the first.
        seconds: that it took.
        most: what the engine holds.
    """
    longer = next((one for one in _PREFILLS if one > tokens), most)
    if seconds > 0:
        longer = min(longer, int(tokens * _LONGEST_PREFILL_S / seconds))
    longer = min(longer, most)
    return longer if longer > _WORTHWHILE * tokens else None


def next_append(tokens: int, steps: int, room: int) -> int | None:
    """Tokens of the next append beside a decode; None where the last tells as much.

    Args:
        tokens: of the last.
        steps: of the decode that it lasted.
        room: tokens that the engine has room for.
    """
    if steps >= _BESIDE_STEPS:
        return None
    more = math.ceil(tokens * 1.25 * _BESIDE_STEPS / max(1, steps))
    longer = min(_MOST_APPENDED, room, max(2 * tokens, min(8 * tokens, more)))
    return longer if longer > tokens else None
