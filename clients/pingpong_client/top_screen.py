"""The terminal while `top` has it: a screen to draw on, keys without Enter, and all as it was at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
import tty
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, BinaryIO, Self

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.text import Text

_END_KEYS = b"qQ\x04"
"""\x04 is Ctrl-D; Ctrl-C stays a signal."""
_KEYS_AT_ONCE = 256


class TopScreen:
    """An async context manager; `ended` is set by a key.

    Args:
        redraw: called when the terminal's size has changed, and when the program is in the foreground again.
    """

    def __init__(self, console: Console, keys: BinaryIO, redraw: Callable[[], None]) -> None:
        self._console = console
        self._keys = keys.fileno() if keys.isatty() else None
        self._redraw = redraw
        self._modes: list[Any] | None = None
        self._live = self._new_live()
        self.ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._take()
        if self._keys is not None:
            loop.add_reader(self._keys, self._read)
        loop.add_signal_handler(signal.SIGWINCH, self._redraw)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGWINCH, signal.SIGTSTP):
            loop.remove_signal_handler(number)
        if self._keys is not None:
            loop.remove_reader(self._keys)
        self._give_back()

    def draw(self, lines: Sequence[Text], hint: str) -> None:
        """Draw a frame over the one before, in one piece; the hint stands in the last line."""
        room = self._console.height - 1
        padding = [Text()] * (room - len(lines))
        self._live.update(Group(*lines[:room], *padding, Text(hint, style="dim", no_wrap=True)), refresh=True)

    def _new_live(self) -> Live:
        return Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def _take(self) -> None:
        self._live.start()
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSADRAIN)

    def _give_back(self) -> None:
        # From its last line tmux would push lines into the shell's own screen, where the size has changed.
        self._console.control(Control.home(), Control.clear())
        self._live.stop()
        if self._keys is not None and self._modes is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._modes)
            self._modes = None

    def _suspend(self) -> None:
        """Ctrl-Z: the shell gets its terminal as it was, and we take it again when it lets us go on."""
        self._give_back()
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)  # here we stand still until SIGCONT
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        self._live = self._new_live()
        self._take()
        self._redraw()

    def _read(self) -> None:
        assert self._keys is not None  # noqa: S101 - it is read where it is one
        pressed = os.read(self._keys, _KEYS_AT_ONCE)
        if not pressed or any(key in _END_KEYS for key in pressed):
            self.ended.set()
