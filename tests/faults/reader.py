"""What a reader of a chain has been given: every token exactly once per attempt, or it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from faults.service import HANG_S, CellFault
from pingpong_bus.messages import ChainEvent, ChainResult
from pingpong_client import AsyncClient


class Reader:
    """Follows a chain to its end, over losses of the daemon, and keeps what it gets."""

    def __init__(self, client: AsyncClient, chain: str) -> None:
        self.chain = chain
        self.events: list[ChainEvent] = []
        self.result: ChainResult | None = None
        self._client = client
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._follow(), name=f"reader of {chain}")

    async def _follow(self) -> None:
        async with aclosing(self._client.follow(self.chain)) as events:
            async for event in events:
                self.events.append(event)
                self._news.set()
        self.result = await self._client.wait(self.chain)
        self._news.set()

    def has(self, kind: str, agent: str = "") -> bool:
        """Whether such an event has come."""
        return any(event.kind == kind and event.agent == agent for event in self.events)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for what events bring about.

        Raises:
            CellFault: it does not come, or the chain has ended before.
        """
        try:
            async with asyncio.timeout(HANG_S):
                while not condition():
                    if self.task.done():
                        raise CellFault(f"the chain ended before {what}: {self.task.exception()!r}, {self.result}")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise CellFault(f"not within {HANG_S:g} s: {what}") from None

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def check_reading(events: list[ChainEvent], result: ChainResult, *, from_start: bool = True) -> None:
    """Check what a reader was given against the result.

    Args:
        events: all that it was given, of one chain.
        result: the chain's.
        from_start: it has read from the chain's beginning, and not from a snapshot on.

    Raises:
        CellFault: a token was given twice, or not at all.
    """
    ids: dict[str, list[int]] = {}
    text: dict[str, str] = {}
    attempts: dict[str, int] = {}
    for event in events:
        name = event.agent
        if event.kind == "agent_restarted" or event.attempt > attempts.get(name, event.attempt):
            ids[name], text[name] = [], ""
        if event.attempt < attempts.get(name, 1):
            raise CellFault(f"{name}: {event.kind} of attempt {event.attempt} after {attempts[name]} had begun")
        attempts[name] = event.attempt
        if event.kind == "tokens":
            given = ids.setdefault(name, [])
            if not from_start and not given:
                given += result.agents[_index(result, name)].output_ids[: event.data["first_index"]]
                whole = result.agents[_index(result, name)].text
                text[name] = whole[: event.data.get("first_character", 0)]
            if event.data["first_index"] != len(given):
                raise CellFault(f"{name}: tokens from {event.data['first_index']} on came after {len(given)}")
            given += event.data["ids"]
            text[name] = text.get(name, "") + event.data["text"]
    if not events or events[-1].kind != "ended":
        raise CellFault(f"the last event was {events[-1].kind if events else 'none'}")
    if sum(event.kind == "ended" for event in events) != 1:
        raise CellFault("a chain ended twice")
    if not from_start:
        return
    for agent in result.agents:
        if ids.get(agent.name, []) != agent.output_ids:
            raise CellFault(f"{agent.name}: a reader got {ids.get(agent.name)}, the result has {agent.output_ids}")
        if text.get(agent.name, "") != agent.text:
            raise CellFault(f"{agent.name}: a reader got {text.get(agent.name)!r}, the result has {agent.text!r}")


def _index(result: ChainResult, name: str) -> int:
    return [agent.name for agent in result.agents].index(name)


def check_result(result: ChainResult, reference: ChainResult) -> None:
    """Check a chain against an undisturbed run of it.

    Raises:
        CellFault: it has not finished, or read or wrote something else.
    """
    if result.state != "finished":
        raise CellFault(f"the chain {result.id} {result.state}: {result.error or 'no cause is given'}")
    for got, expected in zip(result.agents, reference.agents, strict=True):
        if got.output_ids != expected.output_ids or got.text != expected.text:
            raise CellFault(f"{got.name} wrote {got.output_ids}, and undisturbed {expected.output_ids}")
        if got.prompt_digest != expected.prompt_digest:
            raise CellFault(f"{got.name} read another prompt than undisturbed")
