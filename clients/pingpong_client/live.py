"""What is shown while a chain runs: one line per agent on a terminal, plain text where output is piped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol, TextIO

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pingpong_bus.messages import ChainEvent
from pingpong_client.progress import AgentProgress, ChainProgress, count_phases
from pingpong_client.table import clean, clip, clip_left

FRAME_S = 0.1
AWAY = "the daemon is away, waiting for it to come back"
_NAME_CELLS = 16
_PHASE_CELLS = 28
_RATE_CELLS = 11
_TAIL_CHARACTERS = 400
_STYLES = {"waiting": "dim", "reading": "cyan", "writing": "yellow", "finished": "green", "failed": "red"}


class ChainView(Protocol):
    """Is told after every event; lives from the chain's start to its end."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *error: object) -> None: ...

    def show(self, event: ChainEvent) -> None: ...


async def watch(events: AsyncIterator[ChainEvent], progress: ChainProgress, view: ChainView) -> None:
    """Feed a chain's events to its progress and its view until it ends."""
    async with view:
        async for event in events:
            progress.apply(event)
            view.show(event)


class SilentView:
    """Shows nothing; for ``--json``."""

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *error: object) -> None:
        pass

    def show(self, event: ChainEvent) -> None:
        pass


class PlainView:
    """Writes each agent's text once it is complete, in the order in which agents finish.

    An agent of which events were lost is left out; `shown` names those that were written. One that has to begin again
    after that is written again, with the number of its attempt.
    """

    def __init__(self, progress: ChainProgress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream
        self.shown: set[str] = set()
        self._void: set[str] = set()

    async def __aenter__(self) -> None:
        for agent in self._progress.agents:
            if agent.phase == "finished":
                self._write(agent)

    async def __aexit__(self, *error: object) -> None:
        pass

    def show(self, event: ChainEvent) -> None:
        if event.kind == "agent_restarted" and event.agent in self.shown:
            self.shown.discard(event.agent)
            self._void.add(event.agent)
        elif event.kind == "agent_finished" and (agent := self._progress.agent(event.agent)) is not None:
            self._write(agent)

    def _write(self, agent: AgentProgress) -> None:
        if agent.name not in self.shown and agent.has_all_text:
            self.shown.add(agent.name)
            name = f"{agent.name}, attempt {agent.attempt}" if agent.name in self._void else agent.name
            self._stream.write(agent_block(name, agent.text))
            self._stream.flush()


class LiveView:
    """Redraws one line per agent, at most ten times a second, and takes them away at the end."""

    def __init__(
        self,
        progress: ChainProgress,
        console: Console,
        *,
        away_s: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        away_s: for how many seconds the daemon has been away; None while it is there.
        """
        self._progress = progress
        self._console = console
        self._away_s = away_s
        self._clock = clock
        self._start = clock()
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._live.start()
        self._ticker = asyncio.create_task(self._tick(), name="pingpong-client view")

    async def __aexit__(self, *error: object) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticker
        self._live.stop()

    def show(self, event: ChainEvent) -> None:
        """The ticker draws; events may come much faster than frames."""

    async def _tick(self) -> None:
        while True:
            elapsed = self._clock() - self._start
            frame = render(self._progress, self._console.width, self._console.height, elapsed, away_s=self._away_s())
            self._live.update(frame, refresh=True)
            await asyncio.sleep(FRAME_S)


def render(progress: ChainProgress, width: int, height: int, elapsed_s: float, *, away_s: float | None = None) -> Group:
    """One frame: a headline, then one line per agent, as many as the screen takes.

    Args:
        width, height: of the screen, in cells.
        away_s: for how many seconds the daemon has been away; None while it is there.
    """
    facts = [progress.placement or progress.state, f"{elapsed_s:.1f} s"]
    headline = f"{clean(progress.name, lines=False)}  {'  '.join(facts)}"
    lines = [Text(clip(headline, width), style="bold", no_wrap=True)]
    agents = progress.agents
    room = max(height - 3, 1)
    if away_s is not None:
        lines.append(Text(clip(f"{AWAY} ({away_s:.0f} s)", width), style="red", no_wrap=True))
        room = max(room - 1, 1)
    if len(agents) > room:
        first = next((at for at, agent in enumerate(agents) if agent.phase in ("reading", "writing", "waiting")), 0)
        first = max(min(first, len(agents) - room), 0)
        finished = count_phases(agents, "finished")
        agents = agents[first : first + room]
        lines.append(Text(clip(f"{finished} of {len(progress.agents)} agents have finished", width), style="dim"))
    name_cells = min(max(cell_len(agent.name) for agent in progress.agents), _NAME_CELLS)
    lines += [_agent_line(agent, width, name_cells) for agent in agents]
    return Group(*lines)


def agent_block(name: str, text: str) -> str:
    """An agent's text with its headline, as plain output has it."""
    body = clean(text).strip("\n")
    return f"== {name} ==\n{body}\n\n" if body else f"== {name} ==\n\n"


def _agent_line(agent: AgentProgress, width: int, name_cells: int) -> Text:
    rate = f"{agent.rate:,.1f} tok/s" if agent.rate is not None and agent.phase != "waiting" else ""
    name = clip(clean(agent.name, lines=False), name_cells)
    left = f"{name}{' ' * (name_cells - cell_len(name))}  "
    phase = f"{_phase(agent):<{_PHASE_CELLS}}  "
    middle = f"{rate:>{_RATE_CELLS}}  "
    line = Text(left, no_wrap=True, overflow="crop", end="")
    line.append(phase, style=_STYLES.get(agent.phase, ""))
    line.append(middle)
    words = clean(agent.text[-_TAIL_CHARACTERS:], lines=False)
    line.append(clip_left(words, width - line.cell_len), style="dim")
    line.truncate(width)
    line.end = "\n"
    return line


def _phase(agent: AgentProgress) -> str:
    if agent.kind != "agent":
        if agent.phase in ("reading", "writing"):
            return f"{agent.kind} runs"
        if agent.phase == "finished":
            return f"{agent.kind}: {agent.written:,} characters"
        return agent.phase
    if agent.phase == "reading":
        total = f"/{agent.prompt_tokens:,}" if agent.prompt_tokens > agent.read else ""
        return f"reading {agent.read:,}{total} tokens"
    if agent.phase == "writing":
        return f"writing {agent.written:,} tokens"
    if agent.phase == "finished":
        return f"finished {agent.written:,} tokens"
    if agent.phase == "waiting" and agent.written:
        return f"resuming at {agent.written:,} tokens"
    if agent.phase == "waiting" and agent.attempt > 1:
        return f"waiting, attempt {agent.attempt}"
    return agent.phase
