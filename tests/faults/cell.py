"""The cells of the fault matrix: which signal hits which process in which phase."""

from __future__ import annotations

import signal
from typing import Literal, NamedTuple, get_args

SignalName = Literal["SIGKILL", "SIGSTOP", "SIGSEGV", "SIGTERM"]
Target = Literal["client", "supervisor", "worker", "engine"]
Phase = Literal["loading", "waiting", "appending", "finalizing", "decoding", "draining"]
How = Literal["", "grid", "overlap"]
"""The chain runs in ping-pong, the same at exactness grid, or on one group."""

SIGNALS: tuple[SignalName, ...] = get_args(SignalName)
TARGETS: tuple[Target, ...] = get_args(Target)
PHASES: tuple[Phase, ...] = get_args(Phase)

_SHORT_STOP_S: dict[Target, float] = {"client": 0.4, "supervisor": 0.4, "worker": 0.3, "engine": 0.6}
_LONG_STOP_S: dict[Target, float] = {"client": 3.0, "supervisor": 3.0, "worker": 2.5, "engine": 8.0}
"""Longer than what `service.WATCH` allows, of engines five times what prefilling the whole prompt takes; of clients
longer than their own pings."""


class Cell(NamedTuple):
    """One fault; SIGSTOP is followed by SIGCONT."""

    signal: SignalName
    target: Target
    phase: Phase
    how: How = ""

    @property
    def name(self) -> str:
        return "-".join(part for part in self if part)

    @property
    def number(self) -> signal.Signals:
        return signal.Signals[self.signal]

    @property
    def long(self) -> bool:
        """Whether a stop lasts longer than the daemon allows; every other one does."""
        return (TARGETS.index(self.target) + PHASES.index(self.phase)) % 2 == 1

    @property
    def must_be_noticed(self) -> bool:
        """Whether it is a stop for which a worker has to be replaced."""
        return self.signal == "SIGSTOP" and self.long and self.target in ("worker", "engine")

    @property
    def stop_s(self) -> float | None:
        """Seconds until SIGCONT; None where the signal is no stop."""
        if self.signal != "SIGSTOP":
            return None
        return (_LONG_STOP_S if self.long else _SHORT_STOP_S)[self.target]


CELLS = [Cell(signal, target, phase) for signal in SIGNALS for target in TARGETS for phase in PHASES]
EXTRA_CELLS = [
    Cell("SIGKILL", "worker", "appending", "grid"),
    Cell("SIGKILL", "worker", "decoding", "grid"),
    Cell("SIGKILL", "supervisor", "decoding", "grid"),
    Cell("SIGKILL", "worker", "decoding", "overlap"),
]
