"""One hop of an agent as the daemon saw it go: where it ran, when, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pingpong_bus.messages import HopEntry

HopState = Literal["running", "finished", "failed", "aborted", "lost", "moved"]


@dataclass
class HopRecord:
    """Times are CLOCK_MONOTONIC in ns, 0 where it has not come to that."""

    worker: str
    started_ns: int
    tokens_before: int = 0
    opened_ns: int = 0
    finalized_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    state: HopState = "running"
    prompt_tokens: int = 0
    final_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    why: str = ""

    def end(self, state: HopState, at_ns: int, written: int, why: str = "") -> None:
        """It is over; an end that was entered already stands.

        Args:
            state: how it ended.
            at_ns: when.
            written: output tokens of the agent that stand in the log.
            why: of a loss or a move, or of the abort that another agent's wait brought about.
        """
        if self.state == "running":
            self.state, self.ended_ns, self.why = state, at_ns, why
            self.tokens = max(0, written - self.tokens_before)

    def entry(self, zero_ns: int, written: int) -> HopEntry:
        """As users see it.

        Args:
            zero_ns: the chain's submission.
            written: output tokens of the agent that stand in the log; counted where the hop still runs.
        """

        def since(at_ns: int) -> float | None:
            return round((at_ns - zero_ns) / 1e6, 3) if at_ns else None

        running = self.state == "running"
        return HopEntry(
            worker=self.worker,
            started_ms=round((self.started_ns - zero_ns) / 1e6, 3),
            opened_ms=since(self.opened_ns),
            finalized_ms=since(self.finalized_ns),
            first_token_ms=since(self.first_token_ns),
            ended_ms=since(self.ended_ns),
            state=self.state,
            tokens_before=self.tokens_before,
            tokens=max(0, written - self.tokens_before) if running else self.tokens,
            why=self.why,
            prompt_tokens=self.prompt_tokens,
            final_tokens=self.final_tokens,
            cached_tokens=self.cached_tokens,
        )


def restored(entries: Sequence[HopEntry], zero_ns: int) -> list[HopRecord]:
    """The hops of an agent that an earlier life of the daemon has kept.

    Args:
        entries: in order.
        zero_ns: what the chain's submission would have been by today's clock.
    """

    def moment(since_ms: float | None) -> int:
        return zero_ns + round(since_ms * 1e6) if since_ms is not None else 0

    return [
        HopRecord(
            worker=entry.worker,
            started_ns=moment(entry.started_ms),
            tokens_before=entry.tokens_before,
            opened_ns=moment(entry.opened_ms),
            finalized_ns=moment(entry.finalized_ms),
            first_token_ns=moment(entry.first_token_ms),
            ended_ns=moment(entry.ended_ms),
            state=entry.state,
            prompt_tokens=entry.prompt_tokens,
            final_tokens=entry.final_tokens,
            cached_tokens=entry.cached_tokens,
            tokens=entry.tokens,
            why=entry.why,
        )
        for entry in entries
    ]
