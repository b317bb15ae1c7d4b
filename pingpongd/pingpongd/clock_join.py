"""Whether a worker's clock is the daemon's, by what messages say that crossed between them; and whose times are to be
mended. Pure.

Processes of one host share CLOCK_MONOTONIC, so nothing has to be joined, unless a worker runs in another time
namespace (a container, `unshare --time`), where the same clock shows another number. It never drifts: one offset is
all there is to know. No message arrives before it was sent, so each that a worker dates bounds the offset from below,
and each of ours that it dates on arrival bounds it from above (as NTP's and Cristian's do; the least delays bound it
best). While 0 lies between the bounds the clocks are taken for one: then times are exact, which no estimate is.
"""

from __future__ import annotations

import msgspec

from pingpong_bus.messages import (
    AppendRecord,
    HopAppended,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    WorkerMessage,
)


class ClockBounds(msgspec.Struct, frozen=True):
    """What is known of a worker's clock minus ours, in ns; None where it is not bounded."""

    low_ns: int | None = None
    high_ns: int | None = None

    def received(self, sent_ns: int, received_ns: int) -> ClockBounds:
        """A message of the worker's has come.

        Args:
            sent_ns: when, by its clock.
            received_ns: when it came, by ours.
        """
        low = sent_ns - received_ns
        return self if self.low_ns is not None and self.low_ns >= low else ClockBounds(low, self.high_ns)

    def answered(self, sent_ns: int, received_ns: int) -> ClockBounds:
        """A message of ours has come to the worker.

        Args:
            sent_ns: when, by our clock.
            received_ns: when it came, by the worker's.
        """
        high = received_ns - sent_ns
        return self if self.high_ns is not None and self.high_ns <= high else ClockBounds(self.low_ns, high)

    @property
    def offset_ns(self) -> int:
        """By how much the worker's clock is ahead of ours; 0 where they may be one."""
        if self.low_ns is None or self.high_ns is None or self.low_ns <= 0 <= self.high_ns:
            return 0
        return (self.low_ns + self.high_ns) // 2

    @property
    def error_ns(self) -> int:
        """By how much `offset_ns` may be wrong at most."""
        if self.offset_ns == 0 or self.low_ns is None or self.high_ns is None:
            return 0
        return abs(self.high_ns - self.low_ns + 1) // 2


def on_our_clock(message: WorkerMessage, offset_ns: int) -> WorkerMessage:
    """A hop's report with its times by the daemon's clock; other messages are left as they are.

    Args:
        message: from a worker.
        offset_ns: by how much its clock is ahead of ours.
    """
    if not offset_ns:
        return message
    match message:
        case HopOpened() | HopFinalized() | HopFirstToken() | HopEnded():
            return msgspec.structs.replace(message, at_ns=message.at_ns - offset_ns)
        case HopAppended(append=append):
            done = append.done_ns - offset_ns if append.done_ns else 0
            moved = AppendRecord(at_ns=append.at_ns - offset_ns, done_ns=done, tokens=append.tokens, sent=append.sent)
            return msgspec.structs.replace(message, append=moved)
        case _:
            return message
