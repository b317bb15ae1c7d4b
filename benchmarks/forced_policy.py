"""A policy that gives appends as many tokens beside decodes as it is told, for timing steps of single sizes."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

from pingpong_worker.decode_first import DecodeFirst, Grant, StepView

GRANT_FILE = "MIXED_STEP_GRANT"
"""Names the file in which an engine's process finds the number: eight bytes, mapped, in the machine's order."""
GRANT_BYTES = 8


class _Unpriced:
    """Prices of an engine of which nothing is known."""

    def reach(self, *_: object) -> int:
        return 0

    def price(self, *_: object) -> float:
        return math.inf


class ForcedPolicy(DecodeFirst):
    """Knows one number.

    Args:
        number: append tokens of each step with decodes; its first element is looked at for each.
    """

    def __init__(self, number: memoryview) -> None:
        super().__init__(_Unpriced(), (), 0)
        self._number = number

    @classmethod
    def told(cls) -> ForcedPolicy:
        """One that looks at the file that `GRANT_FILE` names."""
        with Path(os.environ[GRANT_FILE]).open("rb") as file:
            return cls(memoryview(mmap.mmap(file.fileno(), GRANT_BYTES, access=mmap.ACCESS_READ)).cast("Q"))

    def grant(self, view: StepView) -> Grant:
        """The number, beside decodes; without them all that waits."""
        if view.decodes == 0 or view.append_tokens == 0:
            return Grant(view.append_tokens, "full speed")
        return Grant(min(self._number[0], view.append_tokens), "target")
