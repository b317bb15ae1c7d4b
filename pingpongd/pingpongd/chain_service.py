"""What clients ask of the chains, as the control socket sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pingpong_bus.messages import ChainResult, ChainSummary, Explain, Explained, Submit


class ChainService(Protocol):
    """Every call may raise a PingpongError, which is then the client's answer."""

    async def submit(self, request: Submit) -> str:
        """Accept a chain, for good, or find the one that its key names; returns its id.

        An accepted chain has no events before the next turn of the event loop.
        """
        ...

    async def explain(self, request: Explain) -> Explained:
        """What a chain should take; checked like a submission, and neither kept nor run."""
        ...

    def start_waiting(self) -> None:
        """Start what can start."""
        ...

    def is_live(self, chain: str) -> bool:
        """Whether events of it are still to come."""
        ...

    async def snapshot(self, chain: str) -> ChainResult:
        """Where it stands; of a live chain in the turn of the event loop in which the call returns."""
        ...

    async def result(self, chain: str, *, prompt_ids: bool = False) -> ChainResult:
        """The same; an ended chain counts as fetched from here on."""
        ...

    async def summaries(self, limit: int) -> list[ChainSummary]:
        """A line for each of the latest chains, the latest last."""
        ...

    def cancel(self, chain: str) -> None:
        """End it; nothing happens to one that has ended."""
        ...

    async def forget(self, chain: str) -> None:
        """Erase one that has ended."""
        ...

    async def reset_caches(self) -> None:
        """Empty every prefix cache."""
        ...

    async def score(
        self, ids: Sequence[int], tokens: Sequence[int], grid: int | None, model: str = ""
    ) -> list[float | None]:
        """Log probability of each of the tokens to follow `ids` by a model (empty: the default one), with the prompt
        cut at multiples of `grid`."""
        ...
