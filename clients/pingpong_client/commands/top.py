"""Watch the daemon, its devices and its chains, live."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from pingpong_bus.errors import DaemonUnavailable, PingpongError
from pingpong_client.client import AsyncClient
from pingpong_client.commands.arguments import seconds
from pingpong_client.commands.context import Context
from pingpong_client.live import AWAY
from pingpong_client.top_rates import TokenRates
from pingpong_client.top_screen import TopScreen
from pingpong_client.top_view import Seen, frame

HELP = "watch devices, groups and chains, live"
INTERVAL_S = 1.0
SHORTEST_S = 0.1
_CHAINS = 200
_SILENT_S = 3.0
"""So long a daemon may take to answer before the screen says so."""
_TICK_S = 1.0
_PIPED_CELLS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--once", action="store_true", help="print one screen and end, as where the output is no terminal"
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        default=INTERVAL_S,
        help=f"between two looks at the daemon (default: {INTERVAL_S:g}); --once takes two, for the rates",
    )


def _interval(text: str) -> float:
    value = seconds(text)
    if value < SHORTEST_S:
        raise argparse.ArgumentTypeError(f"{text} is less than {SHORTEST_S:g}")
    return value


async def run(context: Context) -> int:
    interval_s = context.args.interval
    async with context.connect() as client:
        watch = _Watch(client)
        await watch.look()
        if context.args.once or not context.on_terminal or os.environ.get("TERM", "dumb") == "dumb":
            await asyncio.sleep(interval_s)
            await watch.look()
            _print(context, watch)
        else:
            await _show(context, watch, interval_s)
    return 0


class _Watch:
    """What the daemon has said last, and how long ago that was."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._rates = TokenRates()
        self._heard_s = time.monotonic()
        self._trouble = ""
        self.seen: Seen | None = None

    @property
    def note(self) -> str:
        """What is wrong with what is shown; empty where nothing is."""
        if self._trouble:
            return self._trouble
        silent_s = time.monotonic() - self._heard_s
        return f"{AWAY} ({silent_s:.0f} s)" if silent_s >= _SILENT_S else ""

    async def look(self) -> None:
        """Ask the daemon.

        Raises:
            PingpongError: it does not answer, or makes no sense.
        """
        status = await self._client.status()
        self._heard_s = time.monotonic()
        self._rates.add(status)
        chains = () if self.seen is None else self.seen.chains
        self.seen = Seen(status, chains, self._rates)
        self.seen = Seen(status, await self._client.list(_CHAINS), self._rates)
        self._trouble = ""

    async def keep_looking(self, interval_s: float, draw: Callable[[], None]) -> None:
        """Ask again and again, whatever becomes of the daemon, and draw what it says."""
        while True:
            began_s = time.monotonic()
            try:
                await self.look()
            except DaemonUnavailable:
                pass  # the note says how long it has been away
            except PingpongError as error:  # such as a daemon of another version, after an upgrade
                self._trouble = str(error)
            draw()
            await asyncio.sleep(max(SHORTEST_S, interval_s - (time.monotonic() - began_s)))


async def _show(context: Context, watch: _Watch, interval_s: float) -> None:
    console = context.console()
    ascii_only = not console.encoding.lower().startswith("utf")
    hint = f"every {interval_s:g} s; q ends"

    def draw() -> None:
        assert watch.seen is not None  # noqa: S101 - the first look was before
        lines = frame(watch.seen, console.width, console.height - 1, note=watch.note, ascii_only=ascii_only)
        screen.draw(lines, hint)

    screen = TopScreen(console, context.stdin, draw)
    async with screen:
        draw()
        looking = asyncio.create_task(watch.keep_looking(interval_s, draw), name="pingpong-client top")
        try:
            while not screen.ended.is_set() and not looking.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await screen.ended.wait()
                if watch.note:
                    draw()  # it says for how long
            if looking.done():
                looking.result()
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking


def _print(context: Context, watch: _Watch) -> None:
    """One screen, as long as it has to be."""
    assert watch.seen is not None  # noqa: S101 - it has just been asked
    console = context.console()
    width = context.width or _PIPED_CELLS
    ascii_only = not console.encoding.lower().startswith("utf")
    lines = frame(watch.seen, width, ascii_only=ascii_only)
    if context.on_terminal:
        for line in lines:
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
    else:
        context.write(*(line.plain.rstrip() for line in lines))
