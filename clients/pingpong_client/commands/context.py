"""What every command is given: its arguments, where to write, and how to reach the daemon."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TextIO

import msgspec
from rich.console import Console

from pingpong_client.client import AsyncClient

_WIRE_ONLY = ("type", "request")


@dataclass(frozen=True)
class Context:
    """The world as a command sees it."""

    args: argparse.Namespace
    stdin: BinaryIO
    stdout: TextIO
    stderr: TextIO
    connect: Callable[[], AsyncClient]
    """Makes a client for the daemon that the command line names. Raises UsageError."""

    @property
    def on_terminal(self) -> bool:
        """Whether somebody looks at standard output."""
        return self.stdout.isatty()

    @property
    def width(self) -> int | None:
        """Cells of the terminal's line; None where output is piped."""
        return self.console().width if self.on_terminal else None

    def console(self) -> Console:
        """Rich's console on standard output."""
        return Console(file=self.stdout, highlight=False)

    def write(self, *lines: str) -> None:
        """Write lines to standard output."""
        self.stdout.write("".join(f"{line}\n" for line in lines))
        self.stdout.flush()

    def write_json(self, document: msgspec.Struct | dict[str, object] | list[object]) -> None:
        """Write one JSON document, on one line."""
        self.write(msgspec.json.encode(document).decode())

    def write_reply(self, reply: msgspec.Struct) -> None:
        """Write a daemon's reply as JSON, without what only the wire needs."""
        fields = msgspec.to_builtins(reply)
        self.write_json({name: value for name, value in fields.items() if name not in _WIRE_ONLY})

    def note(self, text: str) -> None:
        """Tell the person something that is no result: on standard error, if that is still there."""
        with contextlib.suppress(OSError):  # the terminal was closed: there are better things to do than to say so
            self.stderr.write(f"pingpong-client: {text}\n")
            self.stderr.flush()


class Command(Protocol):
    """The shape of a module in `commands/`."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    async def run(self, context: Context) -> int:
        """Do it and return the exit code.

        Raises:
            PingpongError: with an exit code of its own.
        """
        ...
